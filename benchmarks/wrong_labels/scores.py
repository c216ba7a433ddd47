"""Every way's score of every example, from one setting and seed; the higher, the likelier wrong."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cleanlab.rank import get_label_quality_scores
from torch import Tensor, nn
from torch.nn import functional

import engram
from benchmarks.practical.data import Split
from benchmarks.practical.loop import Recording, Setting

FOLDS = 5
FOLDER = Path("build") / "wrong_labels"


class Watched(Recording):
    """Records the training and its visits, and takes every epoch's losses for comparison."""

    def __init__(self, split: Split) -> None:
        super().__init__()
        self.split, self.losses, self.seconds = split, list[Tensor](), 0.0

    def visited(self, indices: Tensor, outputs: Tensor) -> None:
        self.training.visit(indices, outputs)

    def epoch_ended(self, epoch: int, model: nn.Module) -> None:
        began = time.process_time()
        self.losses.append(losses(model, self.split))
        self.seconds += time.process_time() - began


def losses(model: nn.Module, split: Split) -> Tensor:
    """Of every example, as the model is in eval mode, which it leaves as it was."""
    was = model.training
    model.eval()
    with torch.no_grad():
        outputs = torch.cat([model(part) for part in split.inputs.split(1000)])
    model.train(was)
    return functional.cross_entropy(outputs, split.given, reduction="none")


def cross_validated(setting: Setting, seed: int) -> dict[str, Any]:
    """Probabilities of every example under a net that was trained on four fifths without it."""
    split, began = setting.split(), time.process_time()
    order = torch.randperm(len(split.given), generator=torch.Generator().manual_seed(seed))
    found = torch.zeros(len(split.given), int(split.given.max()) + 1)
    for number, fold in enumerate(order.chunk(FOLDS)):
        rest = torch.ones(len(order), dtype=torch.bool)
        rest[fold] = False
        torch.manual_seed(1000 * seed + number)
        model = setting.fit(setting.net(), (split.inputs[rest], split.given[rest]))
        with torch.no_grad():
            found[fold] = model(split.inputs[fold]).softmax(1)
    return {"probabilities": found, "seconds": time.process_time() - began}


def quality(labels: Tensor, probabilities: Tensor, method: str) -> Tensor:
    """One minus cleanlab's label quality."""
    rows = probabilities.double()
    rows = rows / rows.sum(1, keepdim=True)
    return 1 - torch.from_numpy(
        np.asarray(get_label_quality_scores(labels.numpy(), rows.numpy(), method=method))
    )


def scores(setting: Setting, seed: int) -> dict[str, Any]:
    """All ways on one training; seconds are processor time of one thread."""
    split = setting.split()
    watched = Watched(split)
    seconds: dict[str, float] = {}
    began = time.process_time()
    model = setting.train(seed, watched)
    seconds["training"] = time.process_time() - began - watched.seconds
    began = time.process_time()
    given = {"structure": "kronecker", "training": watched.training, "progress": False}
    posterior = engram.laplace(model, split.data, **given)
    result = engram.sensitivities(model, split.data, posterior, progress=False)
    seconds["walk"] = time.process_time() - began
    began = time.process_time()
    posterior = engram.laplace(model, split.data, curvature="fisher", **given)
    end = engram.sensitivities(model, split.data, posterior, estimator="linear", progress=False)
    seconds["end"] = time.process_time() - began
    assert watched.training.visits is not None
    return {
        "wrong": split.wrong,
        "given": split.given,
        "seconds": seconds,
        "loss": result.loss,
        "epochs": torch.stack(watched.losses).mean(0),
        "visits": watched.training.visits.prequential(split.data),
        "walk": result.loo_loss,
        "walk probabilities": result.loo_probabilities,
        "end": end.loo_loss,
        "end probabilities": end.loo_probabilities,
    }


def kept(name: str, setting: Setting, seed: int, folder: Path) -> dict[str, Any]:
    """The scores and folds, computed where they are not on disk."""
    found = {}
    for part, made in (("scores", scores), ("folds", cross_validated)):
        path = folder / f"{name}-{seed}-{part}.pt"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(made(setting, seed), path)
        found[part] = torch.load(path, weights_only=True)
    folds: dict[str, Any] = found["folds"]
    whole: dict[str, Any] = found["scores"]
    whole["folds"], whole["seconds"]["folds"] = folds["probabilities"], folds["seconds"]
    return whole
