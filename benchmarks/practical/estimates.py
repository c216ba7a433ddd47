"""What engram says about the practical nets from one recorded training each, beside the truth.

``python -m benchmarks.practical.estimates`` needs the truths of ``python -m benchmarks.practical``;
where those of single examples are not there, levels are over the mean truth of its record. With
``--ways`` some ways are computed again, and the others are those of the record as it was.
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
from torch.nn import functional

import engram
from benchmarks.practical.data import Split
from benchmarks.practical.loop import Recording
from benchmarks.practical.settings import SETTINGS
from benchmarks.practical.truths import FOLDER, epochs, evaluated, folds, truth
from benchmarks.records import RESULTS, conditions, table, write
from benchmarks.timing import environment

SEEDS = 2  # full trainings of each setting
SAME_TRAINING = 1e-4  # difference of two training losses below which the training was the same
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


def estimates(name: str, seed: int, folder: Path, ways: list[str]) -> dict[str, Any]:
    """Ways on one training of a setting; seconds are processor time."""
    setting, (mean, out) = SETTINGS[name], known(name, folder)
    split, watched = setting.split(), Watched(augment=setting.augment)
    began = time.process_time()
    model = setting.train(seed, watched)
    trained = time.process_time() - began
    guess = engram.Training.guess(model, watched.optimizer, steps=watched.training.num_steps)
    scores: dict[str, Tensor] = {}
    seconds: dict[str, float] = {}
    for way, training, estimator in (
        ("trajectory", watched.training, "trajectory"),
        ("end", watched.training, "linear"),
        ("guessed", guess, "linear"),
    ):
        if way not in ways:
            continue
        began = time.process_time()
        given = {"structure": "kronecker", "training": training, "progress": False}
        posterior = engram.laplace(model, split.data, **given)
        result = engram.sensitivities(
            model, split.data, posterior, estimator=estimator, progress=False
        )
        scores[way], seconds[way] = result.loo_loss, time.process_time() - began
    outputs = evaluated(model, split.inputs)
    scores["loss"] = functional.cross_entropy(outputs, split.given, reduction="none")
    assert watched.training.visits is not None
    scores["visits"] = watched.training.visits.prequential(split.data)
    if "epochs" in ways:
        scores["epochs"] = epochs(name, folder)["losses"][seed].mean(0)
    if "folds" in ways:
        scores["folds"] = folds(name, folder).loss_out
    if out is not None:
        scores["truth"] = out
    loss = float(scores["loss"].mean())
    return {
        "setting": name,
        "seed": seed,
        "training_seconds": trained,
        "seconds": seconds,
        "training_loss": loss,
        "true_loo_loss": mean["loo_loss"],
        "true_increase": mean["loo_loss"] - mean["loss"],
        "ways": {way: _against(score, out, loss, mean, split) for way, score in scores.items()},
    }


def known(name: str, folder: Path) -> tuple[dict[str, float], Tensor | None]:
    """The mean truth, and that of every example where it is there."""
    if (folder / name / "truth" / "subset_truth.json").is_file():
        found = truth(name, folder)
        mean = {"loo_loss": found.loo_loss.value, "loss": found.loss.value}
        return mean, found.loss_out
    record = json.loads((RESULTS / "practical.json").read_text())
    (row,) = (row for row in record["settings"] if row["setting"] == name)
    return {"loo_loss": row["loo_loss"][0], "loss": row["loss_where_seen"][0]}, None


def merged(row: dict[str, Any], output: Path) -> dict[str, Any]:
    """The row, with ways of the record as it was where it lacks them."""
    file = output / "practical-estimates.json"
    rows = json.loads(file.read_text())["rows"] if file.is_file() else []
    for old in rows:
        same = (old["setting"], old["seed"]) == (row["setting"], row["seed"])
        if same and abs(old["training_loss"] - row["training_loss"]) < SAME_TRAINING:
            ways = dict(old["ways"])
            for way, found in row["ways"].items():
                ways[way] = dict(ways.get(way, {})) | {
                    k: v for k, v in found.items() if v is not None
                }
                if found["pearson"] is None and way == "trajectory":
                    ways[way] |= {"pearson": None, "spearman": None}
            return row | {"ways": ways}
    return row


def _against(
    score: Tensor, out: Tensor | None, loss: float, mean: dict[str, float], split: Split
) -> dict[str, float | None]:
    truth_known = torch.ones(len(score), dtype=torch.bool) if out is None else torch.isfinite(out)
    fine = truth_known & torch.isfinite(score)
    score, wrong = score.double()[fine], split.wrong[fine]
    pairs = None if out is None else (score, out.double()[fine])
    count = int(wrong.sum())
    first = wrong[score.argsort(descending=True)[:count]].double().mean()
    return {
        "level": float(score.mean()) / mean["loo_loss"],
        "increase": (float(score.mean()) - loss) / (mean["loo_loss"] - mean["loss"]),
        "pearson": None if pairs is None else float(pearsonr(*pairs)[0]),
        "spearman": None if pairs is None else float(spearmanr(*pairs)[0]),
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
            own = [
                row["ways"][way] for row in rows if row["setting"] == name and way in row["ways"]
            ]
            parts = [[one[key] for one in own if one[key] is not None] for key in keys]
            found.append(" / ".join(_spread(values) for values in parts if values) or "-")
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
which the mean and, in brackets, the lowest and the highest. {record.get("note", "")}

Leave-one-out loss over the true one / its increase over the training loss over the true one:

{table(["", *names], levels)}

Correlation over examples with the true loss without the example (its noise bounds it below 1):

{table(["", *names], ranks)}

Wrong labels, AUROC / precision at their number:

{table(["", *names], wrong)}

Processor time of the estimate along the record, fit included, over that of the training:

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
    parser.add_argument("--ways", nargs="*", default=list(WAYS), help="that are computed")
    parser.add_argument("--note", default="", help="what the page says of the other ways")
    chosen = parser.parse_args()
    rows = []
    for seed in range(chosen.seeds):
        for name in chosen.names or list(SETTINGS):
            row = estimates(name, seed, chosen.folder, chosen.ways)
            rows.append(merged(row, chosen.output))
            print(json.dumps(rows[-1]), flush=True)
            record = {
                "environment": environment(seed=0),
                "trainings": chosen.seeds,
                "note": chosen.note,
                "rows": rows,
            }
    write(chosen.output, "practical-estimates", record, page(record))


if __name__ == "__main__":
    main()
