"""Guards around ``ivon.IVON`` of the ivon-opt package, the iBLR optimizer.

Its ``sampled_params`` leaves the noise in the weights when something is raised inside it, or when a
parameter has no gradient; its state dict forgets the number of steps, by which it corrects its
momentum. These functions take an ``ivon.IVON`` as it is and do the same work safely.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from engram.errors import ArgumentError, PosteriorError

STEPS = "current_step"
COLLECTED = ("count", "avg_grad", "avg_nxg", "avg_gsq")  # what samples left before the step
_perturbed: WeakKeyDictionary[Optimizer, list[Tensor]] = WeakKeyDictionary()  # with the means


@contextmanager
def sampled(optimizer: Optimizer, *, train: bool = True) -> Iterator[None]:
    """The weights are a draw from IVON's posterior inside, and the mean again after, always.

    After an exception nothing of the draw is left, neither in the weights nor in what IVON
    collects for its next step. Parameters that got no gradient count as having a zero one.

    Args:
        optimizer: an ``ivon.IVON``.
        train: collect the gradients inside for ``optimizer.step()``.

    Example:
        >>> import ivon, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = ivon.IVON(model.parameters(), lr=0.1, ess=100)
        >>> with sampled(optimizer):
        ...     model(torch.ones(4, 2)).square().mean().backward()
        >>> _ = optimizer.step()
    """
    _check(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.data for p in parameters]
    collected = {key: optimizer.state[key] for key in COLLECTED}  # type: ignore[index]
    _perturbed[optimizer] = before
    try:
        with optimizer.sampled_params(train=train):  # type: ignore[attr-defined]
            yield
            missing = [p for p in parameters if train and p.grad is None]
            for parameter in missing:
                parameter.grad = torch.zeros_like(parameter)
        for parameter in missing:
            parameter.grad = None
    except BaseException:
        optimizer.state.update(collected)  # type: ignore[arg-type]
        raise
    finally:
        for parameter, value in zip(parameters, before, strict=True):
            parameter.data = value
        _perturbed.pop(optimizer, None)


@contextmanager
def at_mean(optimizer: Optimizer) -> Iterator[None]:
    """The mean inside, and the draw of :func:`sampled` again after; elsewhere nothing changes.

    Args:
        optimizer: of any kind; only an ``ivon.IVON`` inside of :func:`sampled` has a draw.
    """
    means = _perturbed.pop(optimizer, None)
    if means is None:
        yield
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    draw = [p.data for p in parameters]
    try:
        for parameter, value in zip(parameters, means, strict=True):
            parameter.data = value
        yield
    finally:
        for parameter, value in zip(parameters, draw, strict=True):
            parameter.data = value
        _perturbed[optimizer] = means


def state_dict(optimizer: Optimizer) -> dict[str, Any]:
    """What :func:`load_state_dict` needs to go on exactly as if training had not stopped.

    Args:
        optimizer: an ``ivon.IVON``.
    """
    _check_kind(optimizer)
    return optimizer.state_dict() | {STEPS: getattr(optimizer, STEPS)}


def load_state_dict(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Put back what :func:`state_dict` saved, on the device of the parameters.

    Args:
        optimizer: an ``ivon.IVON`` over the same parameters.
        saved: of :func:`state_dict`; one of IVON itself lacks the number of steps.
    """
    _check_kind(optimizer)
    if STEPS not in saved:
        raise ArgumentError(
            f"a state with {STEPS!r}, the number of steps",
            "one without, as ivon's own state_dict() gives it",
            "save with engram.optimizers.ivon.state_dict(optimizer)",
        )
    optimizer.load_state_dict({key: value for key, value in saved.items() if key != STEPS})
    for group in optimizer.param_groups:
        device = group["params"][0].device
        group.update({k: v.to(device) for k, v in group.items() if isinstance(v, Tensor)})
    setattr(optimizer, STEPS, saved[STEPS])


def check_restored(optimizer: Optimizer) -> None:
    """PosteriorError while the weights are a draw instead of the mean."""
    if optimizer in _perturbed:
        raise PosteriorError(
            "the weights at IVON's mean",
            "weights that are a draw from its posterior",
            "call it outside of the block in which the weights are sampled",
        )


def _check(optimizer: Optimizer) -> None:
    _check_kind(optimizer)
    if optimizer in _perturbed:
        raise ArgumentError(
            "one draw at a time",
            "a block inside another one",
            "leave the first block before the next draw",
        )
    frozen = [p for group in optimizer.param_groups for p in group["params"] if not p.requires_grad]
    if frozen:
        raise ArgumentError(
            "an IVON over parameters that require gradients",
            f"{len(frozen)} frozen ones, to which it would add noise and weight decay",
            "make it with (p for p in model.parameters() if p.requires_grad)",
        )


def _check_kind(optimizer: Optimizer) -> None:
    if not any(base.__name__ == "IVON" for base in type(optimizer).__mro__):
        raise ArgumentError(
            "an ivon.IVON", type(optimizer).__name__, "other optimizers need no guard"
        )
