"""What ``engram.remove`` says of the groups of one recorded training, and what it took."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor
from torch.nn import functional

import engram
from benchmarks.groups.settings import CASES
from benchmarks.practical.loop import Recording

WAYS = {
    "factors": {"estimator": "linear"},
    "gauss_newton": {"estimator": "gauss_newton"},
    "replay": {"estimator": "replay"},
}


class Replayable(Recording):
    """A record that can be walked again."""

    def __init__(self) -> None:
        super().__init__(replay=True)

    def comes(self, indices: Tensor) -> None:
        self.training.note(indices)


def estimates(name: str, seed: int) -> list[dict[str, Any]]:
    """A row for every group and way; costs are in trainings."""
    case, watcher = CASES[name], Replayable()
    split = case.setting.split()
    began = time.perf_counter()
    model = case.setting.train(seed, watcher)
    watcher.training.stop()
    one_training = time.perf_counter() - began
    began = time.perf_counter()
    posterior = engram.laplace(
        model, split.data, training=watcher.training, structure="kronecker", progress=False
    )
    fit = (time.perf_counter() - began) / one_training
    rows = []
    for group, indices in case.source.groups().items():
        for way, chosen in WAYS.items():
            began = time.perf_counter()
            removal = engram.remove(
                model,
                split.data,
                posterior,
                indices,
                evaluate_on=split.test,
                training=watcher.training,
                loss=functional.cross_entropy,
                progress=False,
                **chosen,
            )
            took = (time.perf_counter() - began) / one_training
            rows.append(_row(removal) | {"case": name, "seed": seed, "group": group, "way": way})
            rows[-1] |= {"seconds_over_training": took, "fit_over_training": fit}
            walked = None if removal.passes is None else removal.passes / case.setting.epochs
            rows[-1] |= {"trainings": walked}
            print(rows[-1], flush=True)
    return rows


def _row(removal: engram.Removal) -> dict[str, Any]:
    assert removal.evaluation is not None
    assert removal.signals is not None
    return {
        "own": removal.group.change,
        "test": removal.evaluation.change,
        "flagged": removal.flagged,
        "verdict": removal.verdict.level,
        "line": removal.verdict.line,
        "rise": removal.signals.remaining_change,
        "leverage": removal.signals.leverage,
        "agreement": removal.signals.agreement,
    }
