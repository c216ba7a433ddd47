"""What is known of a setting, in a few numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.nn import functional

from benchmarks.practical.data import Split
from benchmarks.practical.settings import SETTINGS
from benchmarks.practical.truths import epochs, folds, truth


def summary(name: str, folder: Path) -> dict[str, Any]:
    """Losses with their standard errors, and how well each ranks the wrong labels."""
    split, found = SETTINGS[name].split(), truth(name, folder)
    crossed, watched = folds(name, folder), epochs(name, folder)
    ends, means = watched["losses"][:, -1], watched["losses"].mean(1)
    tested = torch.stack([_loss(outputs, split.test_given) for outputs in found.evaluation_outputs])
    return {
        "examples": len(split.given),
        "trainings": found.num_trainings,
        "seconds_each": float(found.seconds.mean()),
        "loss_where_seen": [found.loss.value, found.loss.standard_error],
        "loo_loss": [found.loo_loss.value, found.loo_loss.standard_error],
        "test_loss": float(found.test_loss.mean()),
        "test_loss_with_equal_noise": float(tested.mean()),
        "folds_loss": crossed.loo_loss.value,
        "full_training_loss": [float(loss.mean()) for loss in ends],
        "auroc_of_wrong_labels": {
            "true loss without": _auroc(split, found.loss_out),
            "five-fold loss": _auroc(split, crossed.loss_out),
            "loss at the end": [_auroc(split, row) for row in ends],
            "mean loss over epochs": [_auroc(split, row) for row in means],
        },
    }


def _loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, labels)


def _auroc(split: Split, score: Tensor) -> float | None:
    """None where no label is wrong."""
    if not bool(split.wrong.any()):
        return None
    return float(roc_auc_score(split.wrong.numpy(), score.numpy()))
