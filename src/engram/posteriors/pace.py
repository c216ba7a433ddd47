r"""How fast an optimizer lets each weight move: its preconditioner, its rate and its decay.

With the learning rate as time, an optimizer follows

.. math:: \dot\theta = -M^{-1} \Big( \tfrac{1}{N} \sum_j \nabla \ell_j + u \theta \Big) - w \theta

with M the entries that it divides a gradient by (1 for SGD, :math:`\sqrt{\hat s} + \epsilon` for
Adam), u a coupled and w a decoupled weight decay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from engram.errors import PosteriorError
from engram.parameters import Named
from engram.posteriors.adapters import ADAPTERS, Reading

MOVING = ("SGD", "RMSprop", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad")


@dataclass(frozen=True)
class Pace:
    """The preconditioner M by entry, and the decays u and w, of the parameters with a step."""

    preconditioner: Named
    coupled: Mapping[str, float]
    decoupled: Mapping[str, float]


def check_moving(optimizer: Optimizer) -> None:
    """PosteriorError for an optimizer whose steps are not known entry by entry."""
    _kind(optimizer)


def pace_of(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> Pace:
    """The pace of every parameter that the optimizer has stepped, at this moment.

    Args:
        optimizer: one of SGD, RMSprop, Adagrad and the Adam family.
        parameters: the model's trainable ones, by name.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1, weight_decay=0.01)
        >>> pace = pace_of(optimizer, {"weight": weight})
        >>> pace.preconditioner["weight"], pace.coupled["weight"], pace.decoupled["weight"]
        (tensor([1., 1.]), 0.01, 0.0)
    """
    kind = _kind(optimizer)
    names = {id(p): name for name, p in parameters.items()}
    divided: Named = {}
    coupled, decoupled = {}, {}
    for group in optimizer.param_groups:
        decay = float(group.get("weight_decay", 0.0))
        apart = kind == "AdamW" or bool(group.get("decoupled_weight_decay"))
        for parameter in group["params"]:
            name, state = names.get(id(parameter)), optimizer.state.get(parameter, {})
            if name is None or (kind != "SGD" and not float(state.get("step", 0))):
                continue
            divided[name] = _entries(kind, parameter, group, state)
            coupled[name], decoupled[name] = (0.0, decay) if apart else (decay, 0.0)
    return Pace(divided, coupled, decoupled)


def rate_of(group: Mapping[str, Any]) -> float:
    """Learning rate of one step; SGD's momentum repeats each gradient 1 / (1 - momentum) times."""
    momentum = float(group.get("momentum", 0.0))
    return float(group["lr"]) * (1 - float(group.get("dampening", 0.0))) / (1 - momentum)


def _kind(optimizer: Optimizer) -> str:
    for base in type(optimizer).__mro__:
        if base.__name__ in MOVING:
            return base.__name__
    raise PosteriorError(
        f"an optimizer whose steps can be followed: {', '.join(MOVING)}",
        type(optimizer).__name__,
        "leave follow out; IVON and Newton hold a Hessian, which the posterior already uses",
    )


def _entries(
    kind: str, parameter: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]
) -> Tensor:
    """What a step divides the gradient by: the root that the precision is read from."""
    root = ADAPTERS[kind](Reading(parameter.detach(), group, state, 1.0, 0.0)).detach()
    if kind == "Adagrad":  # divides by the root of the sum, not of the mean
        root = root * math.sqrt(float(state["step"]))
    return root.clamp(min=torch.finfo(root.dtype).tiny)
