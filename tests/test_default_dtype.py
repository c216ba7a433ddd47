"""torch's default type is the user's affair: nothing that is computed depends on it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import engram
from engram.optimizers import DiagonalVON, Newton

NUM_DATA, DELTA = 40, 0.8


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def other_default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    yield request.param
    torch.set_default_dtype(torch.float32)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_DATA, 4, generator=generator, dtype=torch.float32)
    return x, (x[:, 0] + 0.5 * x[:, 1] > 0).long()


def start() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).float()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=DELTA / NUM_DATA)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 60) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        functional.cross_entropy(model(data()[0]), data()[1]).backward()
        optimizer.step()


def fitted(model: nn.Module, structure: str) -> tuple[nn.Module, engram.Posterior]:
    trained(model, adam(model))
    posterior = engram.laplace(
        model, data(), structure=structure, prior_precision=DELTA, progress=False
    )
    return model, posterior


def sensitivities(structure: str, estimator: str = "auto") -> Callable[[nn.Module, Path], Any]:
    def run(model: nn.Module, folder: Path) -> Any:
        model, posterior = fitted(model, structure)
        given = {"estimator": estimator, "progress": False}
        result = engram.sensitivities(model, data(), posterior, **given)
        again = engram.load(result.save(folder))
        return [again.loo_loss, again.score, again.leverage]

    return run


def removal(model: nn.Module, folder: Path) -> Any:
    model, posterior = fitted(model, "full")
    found = engram.remove(model, data(), posterior, [0, 5], evaluate_on=data())
    assert found.evaluation is not None
    return [found.group.change, found.evaluation.change]


def others(model: nn.Module, folder: Path) -> Any:
    model, posterior = fitted(model, "kronecker")
    x, y = data()
    pairs = engram.influence(model, data(), (x[:5], y[:5]), posterior, progress=False)
    spread = engram.prediction_variance(model, data(), posterior, progress=False)
    scaled = engram.calibrate(model, data(), posterior, curvature="ggn")
    result = engram.sensitivities(model, data(), posterior, progress=False)
    better = engram.refine(model, data(), result, posterior, method="solve", curvature="ggn")
    return [pairs, spread, scaled.log_det(), better.loo_loss]


def updated(**settings: Any) -> Callable[[nn.Module, Path], Any]:
    def run(model: nn.Module, folder: Path) -> Any:
        optimizer = adam(model)
        tracker = engram.Tracker(model, optimizer, data(), validation=data(), **settings)
        for _ in range(2):
            trained(model, optimizer, 20)
            tracker.update()
        return [tracker.history.to_frame()[["train", "estimate", "validation"]].to_numpy()]

    return run


def streamed(**settings: Any) -> Callable[[nn.Module, Path], Any]:
    def run(model: nn.Module, folder: Path) -> Any:
        optimizer, (x, y) = adam(model), data()
        tracker = engram.Tracker(model, optimizer, (x, y), **settings)
        for batch in torch.arange(2 * NUM_DATA).remainder(NUM_DATA).split(10):
            optimizer.zero_grad()
            with tracker.step(batch):
                functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        tracker.save(folder)
        tracker.resume(folder)
        return [tracker.history.to_frame()["estimate"].to_numpy(), tracker.history.score_matrix()]

    return run


def own_optimizer(kind: Any) -> Callable[[nn.Module, Path], Any]:
    def run(model: nn.Module, folder: Path) -> Any:
        layer = copy.deepcopy(model[0])
        optimizer = kind(layer.parameters(), num_data=NUM_DATA, prior_precision=DELTA)
        for _ in range(3):
            optimizer.step(lambda: functional.cross_entropy(layer(data()[0]), data()[1]))
        posterior = engram.posterior_of(optimizer, layer, num_data=NUM_DATA)
        return [engram.sensitivities(layer, data(), posterior, progress=False).loo_loss]

    return run


CASES: dict[str, Callable[[nn.Module, Path], Any]] = {
    **{s: sensitivities(s) for s in ("full", "kronecker", "ekfac", "diagonal", "low_rank")},
    "corrected": sensitivities("full", "corrected"),
    "iterated": sensitivities("diagonal", "iterated"),
    "paper": sensitivities("kronecker", "paper"),
    "remove": removal,
    "others": others,
    "update": updated(),
    "samples": updated(samples=2),
    "sampled deviations": updated(samples=2, expectation="deviation"),
    "running": updated(posterior="kronecker", prior_precision=DELTA, average=0.5),
    "stream": streamed(),
    "stream and held out": streamed(held_out=8),
    "stream with a fit": streamed(posterior="diagonal", prior_precision=DELTA),
    "newton": own_optimizer(Newton),
    "von": own_optimizer(DiagonalVON),
}


@pytest.mark.parametrize("case", CASES)
def test_the_default_type_changes_nothing(
    case: str, other_default: torch.dtype, tmp_path: Path
) -> None:
    model = start()
    expected = CASES[case](copy.deepcopy(model), tmp_path / "expected")
    torch.set_default_dtype(other_default)
    found = CASES[case](copy.deepcopy(model), tmp_path / "found")
    assert torch.get_default_dtype() == other_default
    for one, other in zip(found, expected, strict=True):
        kinds = [v.dtype for v in (one, other) if isinstance(v, Tensor)]
        assert len(set(kinds)) < 2
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=2e-4, atol=1e-6)
