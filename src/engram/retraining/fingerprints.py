"""Short names for a model, for data and for a training function: equal only for equal ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engram.batches import Batches, Data

SAMPLE = 256  # examples of a Dataset that are read; tensors are read whole


def of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def of_model(model: nn.Module) -> str:
    """Of its class and all its weights and buffers."""
    kinds = [type(module).__name__ for module in model.modules()]
    return _of_text(json.dumps(kinds) + of_tensors(model.state_dict()))


def of_data(data: Data) -> str:
    """Of tensors whole; of a Dataset from examples spread over it."""
    if isinstance(data, Mapping):
        return of_tensors({k: v for k, v in data.items() if isinstance(v, Tensor)})
    if isinstance(data, (tuple, list)) and all(isinstance(part, Tensor) for part in data):
        return of_tensors({str(i): part for i, part in enumerate(data)})
    batches = Batches(data, 1)
    count = min(SAMPLE, batches.num_data)
    spread = torch.linspace(0, batches.num_data - 1, count).long().unique()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        batch = batches.take(spread)
    inputs = batch.inputs if isinstance(batch.inputs, dict) else dict(enumerate(batch.inputs))
    tensors = {str(k): v for k, v in inputs.items() if isinstance(v, Tensor)}
    return _of_text(of_tensors({**tensors, "targets": batch.targets}) + str(batches.num_data))


def of_function(function: Any) -> str:
    """Of a function's name and code; what it closes over is not seen."""
    code = getattr(function, "__code__", None)
    body = "" if code is None else code.co_code.hex() + " ".join(code.co_names)
    return _of_text(f"{getattr(function, '__module__', '')}.{name_of(function)} {body}")


def name_of(function: Any) -> str:
    """What a person calls it."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def of_settings(settings: Mapping[str, Any]) -> str:
    """Of plain values by name."""
    return _of_text(json.dumps(settings, sort_keys=True))


def _of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
