"""What refining costs and brings for nets that were stopped, one way beside the other.

``python -m benchmarks.refine_stopped NAMES``: nets of the study of practical nets, one recorded
training each. Some examples by more segments of the walk, by replays of a part of the training and
by refits from new first weights, beside the whole training walked again without each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from scipy.stats import pearsonr, spearmanr
from torch import Tensor
from torch.nn import functional

import engram
from benchmarks.by_net import main
from benchmarks.practical.loop import Recording
from benchmarks.records import conditions, table
from benchmarks.trust.practical.settings import SETTINGS
from engram.retraining.recipes import FromStart, Replay

NAME = "refine-stopped"
NETS = ("mlp-10", "cnn-2", "transformer-2")
CHECKPOINTS = 24  # so that there are enough for the most segments
SEGMENTS = (4, 8, 12)  # 4 is what an estimate takes by itself
PARTS = (0.75, 0.5)  # of the training that replays begin after
HIGHEST, OTHERS, SEED = 6, 4, 0  # examples: of the highest scores, and drawn from all others


class Everything(Recording):
    """A record with its order, its visits and many checkpoints."""

    def __init__(self) -> None:
        super().__init__(replay=True, checkpoints=CHECKPOINTS)

    def comes(self, indices: Tensor) -> None:
        self.training.note(indices)

    def visited(self, indices: Tensor, outputs: Tensor) -> None:
        self.training.visit(indices, outputs)


def rows_of(name: str) -> list[dict[str, Any]]:
    """A row a way."""
    setting, watched = SETTINGS[name], Everything()
    data, began = setting.split().data, time.process_time()
    model = setting.train(SEED, watched)
    watched.training.stop()
    one, training = time.process_time() - began, watched.training
    posterior = engram.laplace(
        model, data, structure="kronecker", training=training, progress=False
    )
    ours = partial(engram.sensitivities, model, data, posterior, progress=False)
    result = ours()
    chosen = _chosen(result.score)

    def refined(train: object) -> engram.Result:
        return engram.refine(
            model, data, result, posterior, indices=chosen, train=train, progress=False
        )  # fmt: skip

    ways: dict[str, Callable[[], engram.Result]] = {
        f"replay of the last {1 - part:.0%}": partial(refined, _replay(training, part))
        for part in PARTS
    }
    ways["refit from new first weights"] = partial(refined, FromStart(setting.fit, setting.net))
    whole, cost = _timed(partial(refined, _replay(training, 0.0)), one * len(chosen))
    rows = [_row(name, "replay of all", whole, whole, chosen, cost)]
    for segments in SEGMENTS:
        found, cost = _timed(partial(ours, segments=segments), one)
        rows.append(_row(name, f"walk, {segments} segments", found, whole, chosen, cost))
    for way, made in ways.items():
        found, cost = _timed(made, one * len(chosen))
        rows.append(_row(name, way, found, whole, chosen, cost))
    return rows


def _replay(training: engram.Training, start: float) -> Replay:
    return Replay(training, loss=functional.cross_entropy, start=start)


def _chosen(score: Tensor) -> Tensor:
    order = score.argsort(descending=True)
    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.randperm(len(order) - HIGHEST, generator=generator)[:OTHERS]
    return torch.cat([order[:HIGHEST], order[HIGHEST:][drawn]]).sort().values


def _timed(made: Callable[[], engram.Result], unit: float) -> tuple[engram.Result, float]:
    began = time.process_time()
    found = made()
    return found, (time.process_time() - began) / unit


def _row(
    name: str,
    way: str,
    found: engram.Result,
    whole: engram.Result,
    chosen: Tensor,
    cost: float,
) -> dict[str, Any]:
    loss, true = found.loo_loss[chosen].double(), whole.loo_loss[chosen].double()
    before = whole.loss[chosen].double()
    numbers = {
        "spearman": float(spearmanr(loss, true).statistic),
        "pearson": float(pearsonr(loss, true).statistic),
        "size": float((loss - before).mean() / (true - before).mean()),
        "cost": cost,
    }
    return {"net": name, "way": way} | {key: round(value, 4) for key, value in numbers.items()}


def page(record: Mapping[str, Any]) -> str:
    """A table."""
    rows = record["rows"]
    header = ["net", "way", "Spearman", "Pearson", "increase over that of the replay", "cost"]
    keys = ("spearman", "pearson", "size", "cost")
    cells = [[row["net"], row["way"], *(f"{row[key]:.2f}" for key in keys)] for row in rows]
    return f"""# Refining the estimates of nets that were stopped

{HIGHEST} examples of the highest scores and {OTHERS} others of nets of
[the study](trust-practical.md), one recorded training each: leave-one-out losses beside those of
the whole training walked again without the example. The cost is processor time in trainings, per
example; that of a walk is for all examples at once, fit not included. A refit begins at other first
weights, so that what it differs by is also the seed's.
{conditions(record["environment"])}
Written by `python -m benchmarks.refine_stopped`.

{table(header, cells)}
"""


if __name__ == "__main__":
    main(NAME, NETS, rows_of, page, SEED, __doc__)
