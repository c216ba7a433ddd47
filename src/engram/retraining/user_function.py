"""The user's training function: checks that it trains the copy it is given and nothing else.

What it returns, or has made of its copy, must be a model with the same parameters; the caller's
own model and the data must be as before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engram.core.identity.digests import bytes_of
from engram.core.state.copies import private_copy
from engram.errors import ArgumentError, ModelMismatchError, TrainingError
from engram.training.training import Training


def check_arguments(function: Callable[..., Any], form: str) -> None:
    """Raise where a function cannot be called with two arguments, as ``form`` shows."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise ArgumentError(
            f"a training function {form}", f"one with {signature}: {error}", "take both arguments"
        ) from error


def training_copies(
    function: Callable[..., Any], original: nn.Module, template: nn.Module
) -> Callable[..., Any]:
    """The function, watched: it must train what it is given and not the caller's own model.

    Args:
        function: of the user's.
        original: the caller's model; what a training changes in it is put back.
        template: a copy of it.
    """

    def train(model: nn.Module, second: Any) -> Any:
        try:
            returned = function(model, second)
        finally:
            touched = _put_back(original, template)
        if touched:
            raise TrainingError(
                "a training function that trains the model it is given",
                f"{touched[0]!r} changed in the model that the call was made with",
                "train the function's first argument, a copy",
            )
        return returned

    return train


def _put_back(original: nn.Module, template: nn.Module) -> list[str]:
    """Weights and buffers as they were; the names of those that were not."""
    before, now = _tensors(template), _tensors(original)
    touched = [n for n, v in before.items() if n in now and not _same(now[n], v)]
    for name in touched:
        if now[name].shape == before[name].shape:
            now[name].copy_(before[name])
    return touched


def _same(left: Tensor, right: Tensor) -> bool:
    """Equal bit by bit, NaN to NaN."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return bytes_of(left) == bytes_of(right)


def trained_model(returned: Any, given: nn.Module) -> nn.Module:
    """The model that was trained: the returned one, or the given one where none came back.

    A record or an optimizer, which a training for :func:`engram.audit` returns, is no model.
    """
    in_place = returned is None or isinstance(returned, Training | Optimizer)
    trained = given if in_place else returned
    if not isinstance(trained, nn.Module):
        raise TrainingError(
            "a training function that trains the model in place or returns a model",
            f"{type(trained).__name__}",
            "return the trained model, or nothing",
        )
    return trained


def check_same_parameters(trained: nn.Module, template: nn.Module) -> None:
    """Raise unless it has the parameters and buffers of the template, with other values."""
    expected, got = _tensors(template), _tensors(trained)
    kinds = {n: (tuple(t.shape), t.dtype) for n, t in expected.items()}
    found = {n: (tuple(t.shape), t.dtype) for n, t in got.items()}
    if kinds != found:
        name = next(n for n in kinds | found if kinds.get(n) != found.get(n))
        raise TrainingError(
            "a trained model with the same parameters as the one that was passed",
            f"a difference in {name!r}: {found.get(name, 'none')} in place of "
            f"{kinds.get(name, 'none')}",
            "train the model that is passed, or a copy of it, and unwrap what wraps it",
        )
    for name, tensor in got.items():
        if tensor.is_meta:
            raise TrainingError(
                "a trained model with its weights", f"{name!r} on the meta device", "keep them"
            )


def check_finite(trained: nn.Module, template: nn.Module) -> None:
    """Raise where a weight or buffer is NaN or infinite; a mask of infinities may stay as it is."""
    before = _tensors(template)
    for name, tensor in _tensors(trained).items():
        finite = not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
        if not finite and not torch.equal(tensor, before[name].to(tensor.device)):
            raise TrainingError(
                "finite weights after training",
                f"NaN or infinity in {name!r}",
                "lower the learning rate",
            )


def kept_state(trained: nn.Module, template: nn.Module) -> dict[str, Tensor]:
    """What makes the template the trained model: parameters, and buffers that hold numbers."""
    before, after = _tensors(template), _tensors(trained)
    shared = set(dict(template.named_parameters(remove_duplicate=False))) - set(
        dict(template.named_parameters())
    )
    return {
        name: after[name].detach()
        for name, tensor in before.items()
        if name not in shared and tensor.dtype != torch.bool and bool(torch.isfinite(tensor).all())
    }


def with_state(template: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the template with these parameters and buffers."""
    trained = private_copy(template)
    own = _tensors(trained)
    for name, value in state.items():
        if name not in own or own[name].shape != value.shape:
            found = tuple(own[name].shape) if name in own else "none"
            raise ModelMismatchError(
                f"a model with {name!r} of shape {tuple(value.shape)}",
                f"{found}",
                "pass the model that was retrained",
            )
        own[name].copy_(value)  # what a state dict holds shares the model's memory
    return trained


def has_moved(trained: nn.Module, template: nn.Module) -> bool:
    """Whether any weight or buffer is another than the template's."""
    before = _tensors(template)
    return any(not torch.equal(v, before[k].to(v.device)) for k, v in _tensors(trained).items())


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)}
