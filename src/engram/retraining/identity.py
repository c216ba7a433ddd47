"""The fingerprint of a run: model, data and settings, so that a folder is only resumed by its own.

Everything that matters has a fingerprint, equal only for equal things; what cannot be compared
(code that cannot be read, data that differs each time) is named in ``unseen``.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from engram.core.data.batches import Batches, Data
from engram.core.identity.description import Description
from engram.core.identity.digests import joined, of_tensors
from engram.core.identity.references import referred
from engram.core.selection import spread
from engram.engine.prepare import training_layers
from engram.errors import RunFolderError
from engram.retraining.own_trainings import FromStart, Replay
from engram.retraining.prior import Prior
from engram.retraining.recipes import Recipe
from engram.retraining.selection import EXAMPLES_AT_ONCE, Task

MOST_NAMED = 5  # things that cannot be compared, in an error
SAMPLE = 256  # examples of a Dataset read to see whether it has changed: trust against time


@dataclass(frozen=True)
class Identity:
    """Settings of a run as plain values, with fingerprints of what is not plain.

    Args:
        settings: by name.
        unseen: what cannot be compared with an earlier run.
        trained_by: the recipe or function, in words.
        in_eval_mode: kinds of layers that a recipe trains in eval mode.
    """

    settings: dict[str, Any]
    unseen: tuple[str, ...]
    trained_by: str
    in_eval_mode: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """A digest of all settings."""
        return settings_fingerprint(self.settings)

    def check_seen(self, folder: str | Path | None, trusted: bool, processes: int) -> None:
        """RunFolderError where a folder would be resumed that may be of another run.

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
    """The identity of a run with these arguments, which are checked already."""
    described = Description()
    own = isinstance(train, Recipe)
    groups = {str(n): m for n, m in enumerate(task.selection.members)}
    evaluated = task.evaluate_on
    walked = isinstance(train, Replay)
    trained_by = repr(train) if own or walked else f"function {name_of(train)}"
    in_eval_mode = training_layers(model) if own else []
    settings = {
        "model": model_fingerprint(model, described),
        "data": data_fingerprint(data, described, "data"),
        "left_out": of_tensors(groups),
        "kind": task.selection.kind,
        "train": trained_by,
        "code": described.of(train.content if isinstance(train, Replay) else train, "train"),
        "likelihood": repr(task.likelihood),
        "loss": described.of(task.likelihood, "likelihood"),
        "evaluate_on": None
        if evaluated is None
        else data_fingerprint(evaluated, described, "evaluate_on"),
        "keep_models": task.keep_models,
        "refits": task.refits,
        "seed": task.seed,
        "in_eval_mode": in_eval_mode,
        "modes": None if own else modes_fingerprint(model),
        "default_dtype": None if own else str(torch.get_default_dtype()),
        "prior_precision": prior_precision if own else None,
        **_names_in(train, described),
        "unseen": list(described.unseen),
    }
    return Identity(settings, tuple(described.unseen), trained_by, tuple(in_eval_mode))


def _names_in(train: Any, described: Description) -> dict[str, str]:
    """What a training function refers to, one by one, so that an error can say what changed."""
    if not isinstance(train, FunctionType):
        return {}
    return {
        f"train.{name}": described.of(value, f"train.{name}")
        for name, value in referred(train).items()
    }


def model_fingerprint(model: nn.Module, described: Description) -> str:
    """A digest of the model's code, the settings of its layers, and all its weights and buffers."""
    tied = [name for name, _ in model.named_parameters()]  # a shared one has one name only
    return _of_text(json.dumps(tied) + described.of(model, "model"))


def modes_fingerprint(model: nn.Module) -> str:
    """A digest of which layers are in training mode."""
    return _of_text(json.dumps([module.training for module in model.modules()]))


def data_fingerprint(data: Data, described: Description, place: str) -> str:
    """A digest of every example, inputs and targets, and of how a loader makes batches of them."""
    if isinstance(data, DataLoader):
        parts = described.of((data.collate_fn, data.batch_size), f"{place}.collate_fn")
        return _of_text(data_fingerprint(data.dataset, described, place) + parts)
    whole = _tensors_of(data)
    if whole is not None:
        return of_tensors(whole)
    if not is_steady(data):
        described.unseen.append(f"{place} (examples that differ each time they are read)")
    return _of_examples(data, torch.arange(Batches(data, 1).num_data))


def sample_fingerprint(data: Data) -> str:
    """A digest of whole tensors; of a Dataset, of a sample of examples spread over it."""
    inner = data.dataset if isinstance(data, DataLoader) else data
    whole = None if isinstance(inner, Subset) else _tensors_of(inner)
    if whole is not None:
        return of_tensors(whole)
    return _of_examples(data, spread(Batches(data, 1).num_data, SAMPLE))


def is_steady(data: Data) -> bool:
    """Whether reading the data twice gives the same."""
    return sample_fingerprint(data) == sample_fingerprint(data)


def name_of(function: Any) -> str:
    """The name of a function or recipe for people to read."""
    if isinstance(function, FromStart):
        return f"{name_of(function.train)} from new first weights"
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def settings_fingerprint(settings: Mapping[str, Any]) -> str:
    """A digest of plain values by name."""
    return _of_text(json.dumps(settings, sort_keys=True))


def _tensors_of(data: Data) -> dict[str, Tensor] | None:
    """All data, where they are tensors in memory."""
    if isinstance(data, Mapping) and all(isinstance(v, Tensor) for v in data.values()):
        return dict(data)
    if isinstance(data, (tuple, list)) and all(isinstance(part, Tensor) for part in data):
        return {str(i): part for i, part in enumerate(data)}
    if type(data) is TensorDataset:
        return {str(i): part for i, part in enumerate(data.tensors)}
    if type(data) is Subset:
        inner = _tensors_of(data.dataset)
        rows = torch.as_tensor(data.indices)
        return None if inner is None else {k: v[rows.to(v.device)] for k, v in inner.items()}
    return None


def _of_examples(data: Data, chosen: Tensor) -> str:
    """A digest of some examples as they are read, with torch's random numbers from one seed."""
    batches, digests = Batches(data, EXAMPLES_AT_ONCE), []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for batch in batches.subset(chosen):
            named = batch.inputs if isinstance(batch.inputs, dict) else enumerate(batch.inputs)
            inputs = {str(k): v for k, v in dict(named).items()}
            digests.append(Description().of({**inputs, "targets": batch.targets}, "examples"))
    return joined(str(batches.num_data), *digests).hex()


def _of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
