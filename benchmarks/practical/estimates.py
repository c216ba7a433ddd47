"""What engram says about the practical nets from one recorded training each, beside the truth.

``python -m benchmarks.practical.estimates`` needs the truths of ``python -m benchmarks.practical``.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn, optim

import engram
from benchmarks.practical.data import Split
from benchmarks.practical.loop import Recording
from benchmarks.practical.settings import SETTINGS
from benchmarks.practical.truths import FOLDER, epochs, folds, truth
from benchmarks.records import RESULTS, conditions, table, write
from benchmarks.timing import environment

SEEDS = 2  # full trainings of each setting
WAYS = {
    "trajectory": "along the record",
    "end": "at the end, training time known",
    "guessed": "nothing recorded",
    "loss": "loss at the end",
    "epochs": "mean loss over epochs",
    "visits": "mean loss at the visits",
    "folds": "five-fold loss",
    "truth": "true loss without",
}


class Watched(Recording):
    """Records the training, its visits, and keeps the optimizer for who has recorded nothing."""

    def started(self, optimizer: optim.Optimizer, model: nn.Module) -> None:
        super().started(optimizer, model)
        self.optimizer = optimizer

    def visited(self, indices: Tensor, outputs: Tensor) -> None:
        self.training.visit(indices, outputs)


def estimates(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """All ways on one training of a setting."""
    setting, known = SETTINGS[name], truth(name, folder)
    split, watched = setting.split(), Watched()
    began = time.perf_counter()
    model = setting.train(seed, watched)
    trained = time.perf_counter() - began
    guess = engram.Training.guess(model, watched.optimizer, steps=watched.training.num_steps)
    scores: dict[str, Tensor] = {}
    seconds: dict[str, float] = {}
    for way, training, estimator in (
        ("trajectory", watched.training, "trajectory"),
        ("end", watched.training, "linear"),
        ("guessed", guess, "linear"),
    ):
        began = time.perf_counter()
        given = {"structure": "kronecker", "training": training, "progress": False}
        posterior = engram.laplace(model, split.data, **given)
        result = engram.sensitivities(
            model, split.data, posterior, estimator=estimator, progress=False
        )
        scores[way], seconds[way] = result.loo_loss, time.perf_counter() - began
    scores["loss"] = result.loss
    scores["epochs"] = epochs(name, folder)["losses"][seed].mean(0)
    assert watched.training.visits is not None
    scores["visits"] = watched.training.visits.prequential(split.data)
    scores["folds"], scores["truth"] = folds(name, folder).loss_out, known.loss_out
    increase = known.loo_loss.value - known.loss.value
    return {
        "setting": name,
        "seed": seed,
        "training_seconds": trained,
        "seconds": seconds,
        "training_loss": float(result.loss.mean()),
        "true_loo_loss": known.loo_loss.value,
        "true_increase": increase,
        "ways": {
            way: _against(score, known.loss_out, float(result.loss.mean()), increase, split)
            for way, score in scores.items()
        },
    }


def _against(
    score: Tensor, out: Tensor, loss: float, increase: float, split: Split
) -> dict[str, float | None]:
    fine = torch.isfinite(out)
    score, out, wrong = score.double()[fine], out.double()[fine], split.wrong[fine]
    count = int(wrong.sum())
    first = wrong[score.argsort(descending=True)[:count]].double().mean()
    return {
        "level": float(score.mean() / out.mean()),
        "increase": (float(score.mean()) - loss) / increase,
        "pearson": float(pearsonr(score, out)[0]),
        "spearman": float(spearmanr(score, out)[0]),
        "auroc": float(roc_auc_score(wrong, score)) if count else None,
        "precision": float(first) if count else None,
    }


def page(record: dict[str, Any]) -> str:
    """Two tables over the settings, with the spread over trainings."""
    rows = record["rows"]
    names = list(dict.fromkeys(row["setting"] for row in rows))

    def cells(way: str, *keys: str) -> list[str]:
        found = []
        for name in names:
            own = [row["ways"][way] for row in rows if row["setting"] == name]
            parts = [[one[key] for one in own] for key in keys]
            known = [values for values in parts if None not in values]
            found.append(" / ".join(_spread(values) for values in known) or "-")
        return found

    levels = [
        [WAYS[way], *cells(way, "level", "increase")] for way in ("trajectory", "end", "guessed")
    ]
    ranks = [[WAYS[way], *cells(way, "pearson")] for way in WAYS if way != "truth"]
    wrong = [[label, *cells(way, "auroc", "precision")] for way, label in WAYS.items()]
    cost = [[WAYS["trajectory"], *[_cost(rows, name) for name in names]]]
    return f"""# One recorded training against the truth

Leave-one-out losses of nets as people train them, each from one training and a record of it, with
Kronecker factors, over the truth of [many trainings on subsets](practical.md).
{conditions(record["environment"])}
Written by `python -m benchmarks.practical.estimates`; {record["trainings"]} trainings of each, of
which the mean and, in brackets, the lowest and the highest.

Leave-one-out loss over the true one / its increase over the training loss over the true one:

{table(["", *names], levels)}

Correlation over examples with the true loss without the example (its noise bounds it below 1):

{table(["", *names], ranks)}

Wrong labels, AUROC / precision at their number:

{table(["", *names], wrong)}

Time of the estimate along the record, fit included, over that of the training:

{table(["", *names], cost)}
"""


def _spread(values: list[float]) -> str:
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{mean:.3f}"
    return f"{mean:.3f} [{min(values):.2f}, {max(values):.2f}]"


def _cost(rows: list[dict[str, Any]], name: str) -> str:
    own = [row for row in rows if row["setting"] == name]
    shares = [row["seconds"]["trajectory"] / row["training_seconds"] for row in own]
    return _spread(shares)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of settings; all of them where none is named")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where truths are kept")
    parser.add_argument("--output", type=Path, default=RESULTS, help="of the page")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="trainings of each setting")
    chosen = parser.parse_args()
    rows = []
    for seed in range(chosen.seeds):
        for name in chosen.names or list(SETTINGS):
            rows.append(estimates(name, seed, chosen.folder))
            print(json.dumps(rows[-1]), flush=True)
    record = {"environment": environment(seed=0), "trainings": chosen.seeds, "rows": rows}
    write(chosen.output, "practical-estimates", record, page(record))


if __name__ == "__main__":
    main()
