"""Devices without double precision: none is asked for, and results stay near."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import engram
from engram.core import dtypes

SOURCE = Path(engram.__file__).parent
# what these files handle has left the device, or is a factorisation on the processor
ON_THE_PROCESSOR = {
    "batches.py",
    "dense.py",
    "columns.py",
    "diagnostics.py",
    "digests.py",
    "streaming.py",
    "clock.py",
    "checkpoints.py",
    "history.py",
    "draws.py",
    "dtypes.py",
    "result.py",
}


class NoDouble(TorchDispatchMode):
    """Fails where an operation on the device would give double precision."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.randn:  # drawn on the processor
            return result
        if any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in tree_leaves(result)):
            file = _calling_file()
            assert file in ON_THE_PROCESSOR, f"{func} in {file} makes double precision"
        return result


def _calling_file() -> str:
    frame: Any = sys._getframe()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(SOURCE):
            return path.name
        frame = frame.f_back
    return "none of ours"


torch.manual_seed(0)
DATA = (torch.randn(40, 12), torch.randint(0, 3, (40,)))


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 70), nn.Tanh(), nn.Linear(70, 65), nn.Linear(65, 3))


def fitted(structure: str) -> Callable[[], Tensor]:
    def run() -> Tensor:
        model = network()
        if structure in ("full", "last_layer"):
            model = nn.Linear(12, 3)
            nn.init.zeros_(model.weight)
        posterior = engram.laplace(
            model, DATA, structure=structure, progress=False, prior_precision=1.0
        )
        return engram.sensitivities(model, DATA, posterior, progress=False).score

    return run


def streamed() -> Tensor:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=1e-3)
    tracker = engram.Tracker(model, optimizer, DATA)
    for _ in range(3):
        for indices in torch.arange(40).split(20):
            optimizer.zero_grad()
            with tracker.step(indices):
                nn.functional.cross_entropy(model(DATA[0][indices]), DATA[1][indices]).backward()
            optimizer.step()
    tracker.update()
    assert tracker.last_epoch is not None
    return tracker.last_epoch.score


RUNS = {
    name: fitted(name)
    for name in ("isotropic", "diagonal", "kronecker", "ekfac", "low_rank", "full", "last_layer")
}
RUNS["streamed"] = streamed


@pytest.mark.parametrize("name", RUNS)
def test_no_double_precision_on_such_a_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = RUNS[name]()
    monkeypatch.setattr(dtypes, "WITHOUT_DOUBLE", frozenset({"cpu"}))
    with NoDouble():
        found = RUNS[name]()
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-4)


def test_what_a_device_has() -> None:
    tensor = torch.ones(2)
    assert dtypes.wide(tensor).dtype == torch.float64
    assert dtypes.in_double(tensor).dtype == torch.float64
    assert dtypes.widest(torch.device("mps")) == torch.float32


@pytest.mark.parametrize("seed", range(8))
def test_eigenvalues_of_a_singular_matrix_with_empty_rows(seed):
    """Sums of few gradients over units of which half are never on: LAPACK fails on some of them."""
    generator = torch.Generator().manual_seed(seed)
    rows = 0.01 * torch.randn(24, 512, generator=generator)
    on = (torch.rand(512, generator=generator) < 0.5).float()
    matrix = (rows * on).T @ (rows * on)
    values, vectors = dtypes.eigh(matrix, single=True)
    expected = torch.linalg.eigvalsh(matrix.double())
    assert torch.allclose(values, expected, atol=1e-5 * float(expected[-1]))
    assert torch.allclose((vectors * values) @ vectors.T, matrix.double(), atol=1e-6)
