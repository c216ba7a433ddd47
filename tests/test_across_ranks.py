"""Two processes that share the examples have the numbers of one that has them all.

One spawn for everything: starting a process takes longer than all that it does here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import engram
from engram.core.processes.meeting import together
from engram.engine.session import session
from engram.errors import DataError, EngineError, ModelMismatchError, NonFiniteError
from ranks import Examples, convolutional, examples, perceptron, run_on_ranks

QUIET: dict[str, Any] = {"progress": False}
COLUMNS = ("loss", "loo_loss", "score", "deviation", "outputs", "targets", "indices", "leverage")
GROUP = [1, 3, 8, 9, 20]


def close(found: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(
        found, expected, rtol=1e-7, atol=1e-9, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )


def same_posterior(found: engram.Posterior, expected: engram.Posterior, what: str) -> None:
    assert found.structure == expected.structure
    torch.manual_seed(3)
    vector = {name: torch.randn_like(mean) for name, mean in expected.mean.items()}
    image, wanted = found.multiply(vector), expected.multiply(vector)
    for name, value in wanted.items():
        close(image[name], value, f"{what}, {name}")


def same_result(found: engram.Result, expected: engram.Result, what: str) -> None:
    for name in COLUMNS:
        close(getattr(found, name), getattr(expected, name), f"{what}, {name}")
    close(
        torch.tensor(found.diagnostics.relative_gradient),
        torch.tensor(expected.diagnostics.relative_gradient),
        what,
    )
    assert found.provenance["settings"]["ranks"] == 2


def compare(
    parted: nn.Module, whole: nn.Module, data: Examples, what: str, **settings: Any
) -> tuple[engram.Posterior, engram.Posterior]:
    """A model on both processes against a model by itself."""
    settings = {"prior_precision": 2.0, **QUIET, **settings}
    found = engram.laplace(parted, data, across_ranks=True, **settings)
    expected = engram.laplace(whole, data, **settings)
    same_posterior(found, expected, what)
    result = engram.sensitivities(parted, data, found, across_ranks=True, **QUIET)
    same_result(result, engram.sensitivities(whole, data, expected, **QUIET), what)
    return found, expected


def structures() -> None:
    """Shares of 12 and 11 examples, and of one and none."""
    net, data, single = convolutional(), examples(), examples(1)
    for structure in ("diagonal", "ekfac", "full", "low_rank"):
        compare(net, net, data, structure, structure=structure)
    for structure in ("kronecker", "isotropic"):
        compare(net, net, single, f"{structure} of one", structure=structure)
    sampled = {"structure": "kronecker", "curvature": "fisher", "seed": 5}
    compare(net, net, data, "sampled labels", **sampled)
    compare(perceptron(), perceptron(), data, "auto", prior_precision="auto")


def removals() -> None:
    net, data, test = convolutional(), examples(), examples(7)
    given = {"prior_precision": 2.0, **QUIET}
    for structure, estimator in (("kronecker", "downdated"), ("full", "corrected")):
        posterior = engram.laplace(net, data, structure=structure, **given)
        asked = {"estimator": estimator, "evaluate_on": test, **QUIET}
        found = engram.remove(net, data, posterior, GROUP, across_ranks=True, **asked)
        expected = engram.remove(net, data, posterior, GROUP, **asked)
        for name in ("outputs_without", "loss", "loss_without", "indices"):
            close(getattr(found.group, name), getattr(expected.group, name), estimator)
        assert found.evaluation is not None
        assert expected.evaluation is not None
        close(found.evaluation.loss_without, expected.evaluation.loss_without, estimator)
        assert found.signals is not None
        assert found.verdict.level == expected.verdict.level
    classes = engram.remove_classes(net, data, posterior, across_ranks=True, **QUIET)
    for label, removal in engram.remove_classes(net, data, posterior, **QUIET).items():
        close(classes[label].group.loss_without, removal.group.loss_without, f"class {label}")


def trained(model: nn.Module, rows: Tensor, steps: int = 3) -> torch.optim.Optimizer:
    """Some steps of AdamW on some examples."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    step(model, optimizer, rows, steps)
    return optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: Tensor, steps: int) -> None:
    x, y = examples()
    for _ in range(steps):
        optimizer.zero_grad()
        functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()


def wrapped_by_ddp(rank: int) -> None:
    """A training that was recorded on every process."""
    half, whole = torch.arange(22).tensor_split(2)[rank], torch.arange(22)
    plain, inner = perceptron(), perceptron()
    parallel = DistributedDataParallel(inner)
    records = []
    for model, rows in ((plain, whole), (parallel, half)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        records.append(engram.record(optimizer, model))
        step(model, optimizer, rows, 5)
        records[-1].stop()
    data = examples()
    settings = {"structure": "kronecker", **QUIET}
    expected = engram.laplace(plain, data, training=records[0], **settings)
    found = engram.laplace(parallel, data, training=records[1], across_ranks=True, **settings)
    same_posterior(found, expected, "recorded")
    result = engram.sensitivities(parallel, data, found, across_ranks=True, **QUIET)
    same_result(result, engram.sensitivities(plain, data, expected, **QUIET), "recorded")


def sharded(rank: int) -> None:
    """FSDP2: whole weights while a call lasts, pieces and training as before."""
    half, every = torch.arange(22).tensor_split(2)[rank], torch.arange(22)
    plain, model, data = perceptron(), perceptron(), examples()
    fully_shard(model[3])
    fully_shard(model)
    expected, optimizer = trained(plain, every), trained(model, half)
    kinds, hooks = [type(m) for m in model.modules()], [len(m._forward_hooks) for m in model]
    found, wanted = compare(model, plain, data, "sharded", structure="kronecker")
    asked = {"across_ranks": True, **QUIET}
    removal = engram.remove(model, data, found, GROUP, **asked)
    alone = engram.remove(plain, data, wanted, GROUP, **QUIET)
    close(removal.group.loss_without, alone.group.loss_without, "sharded")
    held = engram.posterior_of(optimizer, model, num_data=23)
    of_plain = engram.posterior_of(expected, plain, num_data=23)
    same_posterior(held, of_plain, "optimizer's")
    result = engram.sensitivities(model, data, held, across_ranks=True, **QUIET)
    same_result(result, engram.sensitivities(plain, data, of_plain, **QUIET), "optimizer's")
    assert [type(m) for m in model.modules()] == kinds
    assert [len(m._forward_hooks) for m in model] == hooks
    step(model, optimizer, half, 2)
    step(plain, expected, every, 2)
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        close(own.full_tensor(), other.detach(), "trained on")  # type: ignore[attr-defined]
    with pytest.raises(EngineError, match="across_ranks=True"):
        engram.laplace(model, data, prior_precision=1.0, **QUIET)
    with pytest.raises(EngineError, match="record a training with DDP"):
        engram.record(optimizer, model)


def no_weight_is_differentiated() -> None:
    """Gradients are those of activations: whole weights are multiplied with, and no more."""
    model, data = perceptron(), examples()
    posterior = engram.laplace(model, data, prior_precision=2.0, structure="kronecker", **QUIET)
    fully_shard(model)
    differentiated: list[str] = []
    with (
        together(True, model, data, "a pass") as peers,
        session(model, data, "categorical", progress=False, peers=peers) as opened,
    ):
        assert len(list(model.parameters())) == len(opened.engine.parameters)
        for name, parameter in opened.engine.parameters.items():
            assert type(parameter) is nn.Parameter
            parameter.register_hook(lambda _, name=name: differentiated.append(name))
        for observed in opened.passes("deviations", opened.own_rows()):
            deviation = observed.trace.deviation(observed.residual, posterior)
            assert deviation.abs().sum() > 0
        assert differentiated == []
        opened.pull_back(observed.batch, observed.residual, opened.engine.parameters)
        assert len(differentiated) == len(opened.engine.parameters)  # the hooks do tell


def refused(rank: int) -> None:
    """What the processes do not share is named, and so is who has it."""
    model, (x, y) = perceptron(), examples()
    asked = {"across_ranks": True, "prior_precision": 1.0, **QUIET}
    with torch.no_grad():
        model[4].weight *= 1 + rank
    with pytest.raises(ModelMismatchError, match=r"other weights.*process 1 \(4.weight\)"):
        engram.laplace(model, (x, y), **asked)
    model = perceptron()
    changed = y.clone()
    changed[-1] = (y[-1] + rank) % 3
    with pytest.raises(ModelMismatchError, match=r"other examples.*process 1 \(example 22\)"):
        engram.laplace(model, (x, changed), **asked)
    count = 23 - rank
    with pytest.raises(ModelMismatchError, match="process 1 \\(number of examples"):
        engram.laplace(model, (x[:count], y[:count]), **asked)
    with pytest.raises(ModelMismatchError, match=r"other call.*process 1 \(structure\)"):
        engram.laplace(model, (x, y), structure=("diagonal", "full")[rank], **asked)
    broken = x.clone()
    broken[-2] = torch.nan  # in the share of process 1
    error, words = ((EngineError, "process 1 stopped with NonFiniteError"), (NonFiniteError, ""))[
        rank
    ]
    with pytest.raises(error, match=words):
        engram.laplace(model, (broken, y), structure="diagonal", **asked)
    sampler = torch.utils.data.DistributedSampler(range(23), 2, rank)  # type: ignore[arg-type]
    dataset = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(dataset, 4, sampler=sampler)
    with pytest.raises(DataError, match="across_ranks=True"):
        engram.laplace(model, loader, **asked)


class Limited(nn.Module):
    """Has memory for so many examples at a time on the second process, and for all on the first."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.inner, self.limit = perceptron(), (100, 5)[rank]

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.limit:
            raise MemoryError
        output: Tensor = self.inner(x)
        return output


def short_of_memory(rank: int) -> None:
    """All of them begin again with half of the examples at a time."""
    asked = {"prior_precision": 2.0, "structure": "diagonal", **QUIET}
    limited = Limited(rank)
    with pytest.warns(UserWarning, match="out of memory with 10 examples at a time; trying 5"):
        found = engram.laplace(limited, examples(), batch_size=10, across_ranks=True, **asked)
    same_posterior(found, engram.laplace(limited, examples(), batch_size=5, **asked), "memory")


def everything(rank: int, folder: str) -> None:
    structures()
    removals()
    wrapped_by_ddp(rank)
    sharded(rank)
    no_weight_is_differentiated()
    refused(rank)
    short_of_memory(rank)


def test_two_processes_have_the_numbers_of_one(tmp_path: Path) -> None:
    run_on_ranks(everything, str(tmp_path), 2)
