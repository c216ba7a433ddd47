"""The truth about a setting, and what cross-validation and the losses over epochs say of it.

What is found is kept: ``NAME/truth`` and ``NAME/folds`` are :class:`engram.SubsetTruth`,
``NAME/epochs.safetensors`` has the losses after each epoch [seeds, epochs, N], the outputs at the
end [seeds, N, K] and those on the test set, and the seconds of each training.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from sklearn.model_selection import StratifiedKFold
from torch import Tensor, nn
from torch.nn import functional

import engram
from benchmarks.practical.data import Split
from benchmarks.practical.loop import Setting, Watcher
from benchmarks.practical.settings import SETTINGS

FOLDER = Path(__file__).resolve().parent.parent.parent / "build" / "practical"
KEEP = 0.85  # share of the examples that each training sees
FOLDS = 5
SEEDS = 3  # full trainings whose losses are kept after each epoch


def truth(name: str, folder: Path = FOLDER) -> engram.SubsetTruth:
    """Trainings on random subsets; read where they are there."""
    return _trained(name, folder / name / "truth", SETTINGS[name].subsets)


def folds(name: str, folder: Path = FOLDER) -> engram.SubsetTruth:
    """Trainings on the folds of a cross-validation, each with the classes in proportion."""
    labels = SETTINGS[name].split().given
    kept = torch.ones(FOLDS, len(labels), dtype=torch.bool)
    parts = StratifiedKFold(FOLDS, shuffle=True, random_state=0).split(labels, labels)
    for number, (_, left_out) in enumerate(parts):
        kept[number, left_out] = False
    return _trained(name, folder / name / "folds", kept)


def _trained(name: str, folder: Path, subsets: int | Tensor) -> engram.SubsetTruth:
    if (folder / "subset_truth.json").is_file():
        found: engram.SubsetTruth = engram.load(folder)
        return found
    setting = SETTINGS[name]
    split = setting.split()
    found = engram.retrain(
        setting.net,
        split.data,
        train=setting.fit,
        subsets=subsets,
        keep=KEEP,
        evaluate_on=split.test,
        folder=folder / "run",
    )
    found.save(folder)
    return found


class Losses(Watcher):
    """Losses of all examples after each epoch, in eval mode."""

    def __init__(self, split: Split) -> None:
        self.split, self.losses = split, list[Tensor]()

    def epoch_ended(self, epoch: int, model: nn.Module) -> None:
        outputs = evaluated(model, self.split.inputs)
        self.losses.append(functional.cross_entropy(outputs, self.split.given, reduction="none"))


def evaluated(model: nn.Module, inputs: Tensor) -> Tensor:
    """Outputs in eval mode."""
    model.eval()
    with torch.no_grad():
        return torch.cat([model(part) for part in inputs.split(500)])


def epochs(name: str, folder: Path = FOLDER) -> dict[str, Tensor]:
    """Full trainings with a few seeds, watched; read where they are there."""
    file = folder / name / "epochs.safetensors"
    if file.is_file():
        return load_file(file)
    setting, rows = SETTINGS[name], list[dict[str, Tensor]]()
    for seed in range(SEEDS):
        rows.append(_watched(setting, seed))
    found = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(found, file)
    return found


def _watched(setting: Setting, seed: int) -> dict[str, Tensor]:
    split = setting.split()
    watcher, began = Losses(split), time.perf_counter()
    model = setting.train(seed, watcher)
    return {
        "seconds": torch.tensor(time.perf_counter() - began),
        "losses": torch.stack(watcher.losses),
        "outputs": evaluated(model, split.inputs),
        "test_outputs": evaluated(model, split.test_inputs),
    }
