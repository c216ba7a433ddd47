"""Short names for everything that decides what a run gives: equal only for equal ones.

What cannot be compared is named in ``unseen``, beside the fingerprints.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from engram.core.data.batches import Batches, Data
from engram.core.identity.description import Description
from engram.core.identity.digests import joined, of_tensors
from engram.core.selection import spread

SAMPLE = 256  # examples of a Dataset that are read to see whether it has changed
AT_ONCE = 256


def of_model(model: nn.Module, described: Description) -> str:
    """Of its code, the settings of its layers, and all its weights and buffers."""
    tied = [name for name, _ in model.named_parameters()]  # a shared one has one name only
    return _of_text(json.dumps(tied) + described.of(model, "model"))


def of_modes(model: nn.Module) -> str:
    """Of which layers are in training mode."""
    return _of_text(json.dumps([module.training for module in model.modules()]))


def of_data(data: Data, described: Description, place: str) -> str:
    """Of every example, inputs and targets, and of how a loader makes batches of them."""
    if isinstance(data, DataLoader):
        parts = described.of((data.collate_fn, data.batch_size), f"{place}.collate_fn")
        return _of_text(of_data(data.dataset, described, place) + parts)
    whole = _tensors_of(data)
    if whole is not None:
        return of_tensors(whole)
    if not is_steady(data):
        described.unseen.append(f"{place} (examples that differ each time they are read)")
    return _of_examples(data, torch.arange(Batches(data, 1).num_data))


def of_sample(data: Data) -> str:
    """Of tensors whole; of a Dataset from examples spread over it."""
    inner = data.dataset if isinstance(data, DataLoader) else data
    whole = None if isinstance(inner, Subset) else _tensors_of(inner)
    if whole is not None:
        return of_tensors(whole)
    return _of_examples(data, spread(Batches(data, 1).num_data, SAMPLE))


def is_steady(data: Data) -> bool:
    """Whether reading the data twice gives the same."""
    return of_sample(data) == of_sample(data)


def name_of(function: Any) -> str:
    """What a person calls it."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def of_settings(settings: Mapping[str, Any]) -> str:
    """Of plain values by name."""
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
    """Of some examples as they are read, with torch's random numbers from one seed."""
    batches, digests = Batches(data, AT_ONCE), []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for batch in batches.subset(chosen):
            named = batch.inputs if isinstance(batch.inputs, dict) else enumerate(batch.inputs)
            inputs = {str(k): v for k, v in dict(named).items()}
            digests.append(Description().of({**inputs, "targets": batch.targets}, "examples"))
    return joined(str(batches.num_data), *digests).hex()


def _of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
