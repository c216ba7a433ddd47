"""Nets of the study of practical nets, recorded or not: their wrong labels, a class, and others.

The truth is the mean over seeds of training with and without the group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import engram
from benchmarks.groups.estimates import Replayable
from benchmarks.practical.data import Split
from benchmarks.practical.loop import Setting
from benchmarks.removal_verdicts.rows import Row, row
from benchmarks.trust.practical.settings import SETTINGS

NETS = ("mlp-3", "mlp-10", "cnn-2", "cnn-7", "cnn-10", "resnet-2", "transformer-2", "transformer-5")
SEEDS = range(4)  # of the truth; the first training is recorded and estimated
CLEAR = 2.0  # standard errors that a true change must exceed to be one
CLASS = 3
ANY = 0.1  # of the examples, drawn at random
RECORDED, ALONE = "recorded", "stopped, no record"
WAYS: dict[tuple[str, str], dict[str, Any]] = {
    (RECORDED, "one step"): {"estimator": "gauss_newton"},
    (RECORDED, "factors"): {"estimator": "linear"},
    (RECORDED, "replay"): {"estimator": "replay"},
    (ALONE, "kronecker auto"): {},
}


def groups(split: Split) -> dict[str, Tensor]:
    """Positions of what is left out, by name."""
    generator = torch.Generator().manual_seed(2)
    number = len(split.given)
    some = torch.randperm(number, generator=generator)[: round(ANY * number)]
    found = {"wrong labels": split.wrong.nonzero()[:, 0]}
    return found | {f"class {CLASS}": (split.given == CLASS).nonzero()[:, 0], "any": some}


def practical(name: str) -> Iterator[Row]:
    """A setting's rows where the truth is clear."""
    setting, watcher = SETTINGS[name], Replayable()
    split = setting.split()
    truth = true_changes(setting, split)
    model = setting.train(SEEDS[0], watcher)
    watcher.training.stop()
    fits = {
        RECORDED: engram.laplace(
            model, split.data, training=watcher.training, structure="kronecker", progress=False
        ),
        ALONE: engram.laplace(model, split.data, structure="kronecker", progress=False),
    }
    for (kind, way), how in WAYS.items():
        walked = way == "replay"
        extra = {"training": watcher.training, "loss": functional.cross_entropy} if walked else {}
        for group, indices in groups(split).items():
            found = engram.remove(
                model, split.data, fits[kind], indices,
                evaluate_on=split.test, progress=False, **how, **extra,
            )  # fmt: skip
            assert found.evaluation is not None
            changes = {"own": found.group.change, "test": found.evaluation.change}
            for loss, change in changes.items():
                mean, error = truth[group, loss]
                if abs(mean) > CLEAR * error:
                    yield row((kind, name, way, group), loss, change, mean, found.verdict)


def true_changes(setting: Setting, split: Split) -> dict[tuple[str, str], tuple[float, float]]:
    """Mean and standard error over the seeds, by group and loss."""
    found: dict[tuple[str, str], list[float]] = {}
    for seed in SEEDS:
        whole = _losses(setting.train(seed), split)
        for name, group in groups(split).items():
            kept = torch.ones(len(split.given), dtype=torch.bool).index_fill(0, group, False)
            torch.manual_seed(seed)
            other = setting.fit(setting.net(), (split.inputs[kept], split.given[kept]))
            own, test = _losses(other, split)
            found.setdefault((name, "own"), []).append(float((own - whole[0])[group].mean()))
            found.setdefault((name, "test"), []).append(float((test - whole[1]).mean()))
    changes = {key: torch.tensor(values).double() for key, values in found.items()}
    return {key: (float(v.mean()), float(v.std() / len(v) ** 0.5)) for key, v in changes.items()}


def _losses(model: nn.Module, split: Split) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return tuple(  # type: ignore[return-value]
            functional.cross_entropy(model.eval()(inputs), labels, reduction="none")
            for inputs, labels in (split.data, split.test)
        )
