"""What decides what a run gives: by this a folder of an earlier run is known for the same one."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn

from engram.core.data.batches import Data
from engram.core.errors import RunFolderError
from engram.core.identity.description import Description
from engram.core.identity.digests import of_tensors
from engram.core.identity.references import referred
from engram.engine.prepare import training_layers
from engram.retraining import fingerprints
from engram.retraining.prior import Prior
from engram.retraining.recipe import Recipe
from engram.retraining.task import Task

MOST_NAMED = 5


@dataclass(frozen=True)
class Identity:
    """Settings of a run as plain values, with fingerprints of what is not plain.

    Args:
        settings: by name.
        unseen: what cannot be compared with an earlier run.
    """

    settings: dict[str, Any]
    unseen: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """Of all settings."""
        return fingerprints.of_settings(self.settings)

    def check_seen(self, folder: str | Path | None, trusted: bool, processes: int) -> None:
        """Raise where a folder would be gone on with that may be of another run.

        Several processes cannot tell an earlier run's folder from one that they share.
        """
        if folder is None or not self.unseen or trusted:
            return
        more = len(self.unseen) - MOST_NAMED
        named = "; ".join(self.unseen[:MOST_NAMED]) + (f"; {more} more" if more > 0 else "")
        begun = Path(folder).is_dir() and any(Path(folder).glob("*.safetensors"))
        if begun or processes > 1:
            raise RunFolderError(
                "a run of which everything that decides its result can be compared with the "
                f"run in {folder}",
                f"what cannot be seen: {named}",
                "pass trust_folder=True if you know that it is the same, or give another folder",
            )
        warnings.warn(
            f"this run can go on from {folder} only with trust_folder=True, since some of what "
            f"decides its result cannot be compared: {named}",
            stacklevel=3,
        )


def identify(
    model: nn.Module, data: Data, train: Any, task: Task, prior_precision: Prior
) -> Identity:
    """Of a run with these arguments, checked before."""
    described = Description()
    own = isinstance(train, Recipe)
    groups = {str(n): m for n, m in enumerate(task.selection.members)}
    evaluated = task.evaluate_on
    settings = {
        "model": fingerprints.of_model(model, described),
        "data": fingerprints.of_data(data, described, "data"),
        "left_out": of_tensors(groups),
        "kind": task.selection.kind,
        "train": repr(train) if own else f"function {fingerprints.name_of(train)}",
        "code": described.of(train, "train"),
        "likelihood": repr(task.likelihood),
        "loss": described.of(task.likelihood, "likelihood"),
        "evaluate_on": None
        if evaluated is None
        else fingerprints.of_data(evaluated, described, "evaluate_on"),
        "keep_models": task.keep_models,
        "refits": task.refits,
        "seed": task.seed,
        "in_eval_mode": training_layers(model) if own else [],
        "modes": None if own else fingerprints.of_modes(model),
        "default_dtype": None if own else str(torch.get_default_dtype()),
        "prior_precision": prior_precision if own else None,
        **_names_in(train, described),
        "unseen": list(described.unseen),
    }
    return Identity(settings, tuple(described.unseen))


def _names_in(train: Any, described: Description) -> dict[str, str]:
    """What a training function refers to, one by one, so that an error can say what changed."""
    if not isinstance(train, FunctionType):
        return {}
    return {
        f"train.{name}": described.of(value, f"train.{name}")
        for name, value in referred(train).items()
    }
