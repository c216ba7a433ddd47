"""How losses without the examples are spread, by three ways to read them out.

``python -m benchmarks.trust.practical.spread NAMES``: along a recorded training there is a loss
without each example at every checkpoint and at the end. Each way beside the truth of some nets of
the study.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from scipy.stats import pearsonr
from torch import Tensor

import engram
from benchmarks.by_net import main
from benchmarks.records import conditions, table
from benchmarks.refine_stopped import Everything
from benchmarks.trust.practical.settings import SETTINGS
from benchmarks.trust.practical.truths import ranks, truth
from benchmarks.trust.runs import rounded
from engram.sensitivity import leave_one_out
from engram.sensitivity.estimators.trajectory import SMALLEST, level

NAME = "loo-spread"
NETS = (
    *("mlp-2", "mlp-9", "mlp-11", "cnn-1", "cnn-10", "cnn-14", "transformer-2", "resnet-6"),
    "linear-1",
)
PARTS = ("mean", "median", "high")
SEED = 0


def averaged(readouts: Tensor) -> Tensor:
    """The geometric mean over readouts, at the mean level of the last."""
    mean = readouts.clamp(min=SMALLEST).log().mean(1).exp()
    return mean * (readouts[:, -1].mean() / mean.mean())


WAYS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "end alone": lambda readouts: readouts[:, -1],
    "geometric mean": averaged,
    "with the spread of the end": level,
}


@contextmanager
def readouts_kept() -> Iterator[list[Tensor]]:
    """The readouts of every walk inside."""
    found: list[Tensor] = []

    def kept(readouts: Tensor) -> Tensor:
        found.append(readouts.double())
        return level(readouts)

    leave_one_out.level = kept
    try:
        yield found
    finally:
        leave_one_out.level = level


def rows_of(name: str) -> list[dict[str, Any]]:
    """A row a way."""
    setting, watched = SETTINGS[name], Everything()
    data = setting.split().data
    model = setting.train(SEED, watched)
    watched.training.stop()
    posterior = engram.laplace(
        model, data, structure="kronecker", training=watched.training, progress=False
    )
    with readouts_kept() as kept:
        engram.sensitivities(model, data, posterior, progress=False)
    true = truth(name).out.double()
    fine = true.isfinite()
    return [
        {"net": name, "way": way} | rounded(_beside(make(kept[-1])[fine], true[fine]))
        for way, make in WAYS.items()
    ]


def _beside(found: Tensor, true: Tensor) -> dict[str, float]:
    return {
        "ranking": ranks(found, true),
        "pearson": float(pearsonr(found, true).statistic),
        "error": float((found - true).square().mean().sqrt()),
        "mean": float(found.mean()),
        "true_mean": float(true.mean()),
        "median": float(found.median()),
        "true_median": float(true.median()),
        "high": float(found.quantile(0.95)),
        "true_high": float(true.quantile(0.95)),
    }


def page(record: Mapping[str, Any]) -> str:
    """A table."""
    header = [
        "net",
        "losses without the examples",
        "rank correlation",
        "Pearson",
        "root of squares",
    ]
    cells = [
        [
            row["net"],
            row["way"],
            f"{row['ranking']:.3f}",
            f"{row['pearson']:.3f}",
            f"{row['error']:.2f}",
            *(
                f"{row[name]:.3f} ({row[f'true_{name}']:.3f})"
                for name in ("mean", "median", "high")
            ),
        ]
        for row in record["rows"]
    ]
    return f"""# How losses without the examples are spread

Along a recorded training the loss without each example is read out at every checkpoint and at the
end. The mean over readouts ranks the examples better than the end does, but an early net has larger
losses on easy examples and smaller ones on hard ones: so the mean is given the spread of the end,
in logarithms. Nets of [the study](trust-practical.md), one training each, beside the mean loss
of trainings without the example; in brackets the truth. *High* is the loss that one in twenty has
or more. The truth is smoother than the losses of one net, being a mean over seeds.
{conditions(record["environment"])}
Written by `python -m benchmarks.trust.practical.spread`.

{table([*header, "mean", "median", "high"], cells)}
"""


if __name__ == "__main__":
    main(NAME, NETS, rows_of, page, SEED, __doc__)
