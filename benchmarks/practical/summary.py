"""What is known of a setting, in a few numbers, and the page of all settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.nn import functional

from benchmarks.practical.data import Split
from benchmarks.practical.settings import SETTINGS
from benchmarks.practical.truths import FOLDS, KEEP, SEEDS, epochs, folds, truth
from benchmarks.records import conditions, table

RANKINGS = {
    "truth": "true loss without",
    "folds": "five-fold loss",
    "end": "loss at the end",
    "epochs": "mean loss over epochs",
}


def summary(name: str, folder: Path) -> dict[str, Any]:
    """Losses with their standard errors, and how well each ranks the wrong labels."""
    split, found = SETTINGS[name].split(), truth(name, folder)
    crossed, watched = folds(name, folder), epochs(name, folder)
    ends, means = watched["losses"][:, -1], watched["losses"].mean(1)
    nets = found.evaluation_outputs
    tested = [float(functional.cross_entropy(outputs, split.test_given)) for outputs in nets]
    scores = {
        "truth": [found.loss_out],
        "folds": [crossed.loss_out],
        "end": list(ends),
        "epochs": list(means),
    }
    return {
        "setting": name,
        "examples": len(split.given),
        "wrong_labels": int(split.wrong.sum()),
        "trainings": found.num_trainings,
        "seconds_each": float(found.seconds.mean()),
        "loss_where_seen": [found.loss.value, found.loss.standard_error],
        "loo_loss": [found.loo_loss.value, found.loo_loss.standard_error],
        "test_loss": float(found.test_loss.mean()),
        "test_loss_with_equal_noise": sum(tested) / len(tested),
        "folds_loss": crossed.loo_loss.value,
        "full_training_loss": [float(loss.mean()) for loss in ends],
        "wrong_labels_found": {key: _found(split, rows) for key, rows in scores.items()},
    }


def _found(split: Split, scores: Sequence[Tensor]) -> dict[str, list[float]] | None:
    """AUROC and precision at the number of wrong labels; None where no label is wrong."""
    count = int(split.wrong.sum())
    if not count:
        return None
    firsts = [split.wrong[score.argsort(descending=True)[:count]] for score in scores]
    return {
        "auroc": [float(roc_auc_score(split.wrong.numpy(), row.numpy())) for row in scores],
        "precision": [float(first.double().mean()) for first in firsts],
    }


def page(record: dict[str, Any]) -> str:
    """The settings in two tables."""
    rows = record["settings"]
    noisy = [row for row in rows if row["wrong_labels"]]
    losses = table(
        ["setting", "N", "trainings", "loss seen", "loss left out", f"{FOLDS}-fold", "test"],
        [_losses(row) for row in rows],
    )
    wrong = table(["setting", *RANKINGS.values()], [_rankings(row) for row in noisy])
    return f"""# The truth about nets as people train them

Each net is trained from the start many times, on a random {KEEP:.0%} of its data and with another
seed each, by a loop with mini-batches, BatchNorm or LayerNorm, dropout and a fixed number of epochs
(`benchmarks/practical/settings.py`). "Loss seen" and "loss left out" are means over all examples of
the nets that saw the example and of those that did not, with standard errors; the test loss has as
many wrong labels as the training data. TREC's test questions are a set of their own (TREC 10), not
drawn as the training questions are.
{conditions(record["environment"])}
Written by `python -m benchmarks.practical page`.

{losses}

Wrong labels found, AUROC / precision at their number; for the last two columns the mean of {SEEDS}
full trainings:

{wrong}
"""


def _losses(row: dict[str, Any]) -> list[str]:
    seen, left_out = row["loss_where_seen"], row["loo_loss"]
    return [
        row["setting"],
        f"{row['examples']:,}",
        str(row["trainings"]),
        f"{seen[0]:.3f} \u00b1 {seen[1]:.3f}",
        f"{left_out[0]:.3f} \u00b1 {left_out[1]:.3f}",
        f"{row['folds_loss']:.3f}",
        f"{row['test_loss_with_equal_noise']:.3f}",
    ]


def _rankings(row: dict[str, Any]) -> list[str]:
    cells = [row["setting"]]
    for key in RANKINGS:
        found = row["wrong_labels_found"][key]
        auroc, precision = (torch.tensor(found[name]).mean() for name in ("auroc", "precision"))
        cells.append(f"{float(auroc):.3f} / {float(precision):.3f}")
    return cells
