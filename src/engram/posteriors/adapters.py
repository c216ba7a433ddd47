r"""The precision of one parameter from its optimizer's state, one short function a rule.

==========================  =======================================  ==========================
optimizer                   state used                               precision S
==========================  =======================================  ==========================
SGD                         none                                     identity
RMSprop                     ``square_avg`` (minus ``grad_avg`` ^ 2   N sqrt(s) + delta
                            where centered)
Adam, AdamW, NAdam, RAdam   ``exp_avg_sq`` (``max_exp_avg_sq`` with  N sqrt(s_hat) + delta,
                            AMSGrad)                                 s_hat = s / (1 - beta2^t)
Adamax                      ``exp_inf``                              N u + delta
Adagrad                     ``sum``                                  N sqrt(sum / t) + delta
DiagonalOnlineNewton,       ``precision``                            s
DiagonalVON
==========================  =======================================  ==========================

A root is taken to be no smaller than the optimizer's own ``eps``, which bounds its steps as well:
an entry that never had a gradient and has no weight decay would otherwise have a precision of zero.

The paper's row for RMSprop and Adam is N sqrt(s) with s as the optimizer keeps it; its authors add
delta. Adam's s starts at zero, so at step t that is sqrt(1 - beta2^t) of the root above: a
fourteenth at step 5 with beta2 = 0.999. ``Reading.as_kept`` asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Reading:
    """What an adapter sees of one parameter: its group's settings, its state, scale and delta."""

    parameter: Tensor
    group: Mapping[str, Any]
    state: Mapping[str, Any]
    scale: float  # N for a loss averaged over the batch, N / batch size for a sum
    prior_precision: float
    as_kept: bool = False  # a running average as it stands: no correction of its start, no floor

    def scaled(self, root: Tensor) -> Tensor:
        """N root + delta, for gradients of the mean loss."""
        return self.scale * root + self.prior_precision

    def floored(self, root: Tensor, share: float = 1.0) -> Tensor:
        """No smaller than the group's eps, or a share of it, where it has one."""
        if self.as_kept:
            return root
        return root.clamp(min=share * float(self.group.get("eps", 0.0)))


Adapter = Callable[[Reading], Tensor]


def identity(reading: Reading) -> Tensor:
    """1: the step is the gradient; needs no state."""
    return torch.ones_like(reading.parameter)


def _steps(reading: Reading) -> float:
    return float(reading.state["step"])


def _rmsprop(reading: Reading) -> Tensor:
    square = reading.state["square_avg"]
    if reading.group.get("centered"):
        square = (square - reading.state["grad_avg"] ** 2).clamp(min=0)
    return reading.scaled(reading.floored(square.sqrt()))


def _adam(reading: Reading) -> Tensor:
    name = "max_exp_avg_sq" if reading.group.get("amsgrad") else "exp_avg_sq"
    correction = 1.0 if reading.as_kept else 1 - float(reading.group["betas"][1]) ** _steps(reading)
    return reading.scaled(reading.floored((reading.state[name] / correction).sqrt()))


def _adamax(reading: Reading) -> Tensor:
    return reading.scaled(reading.state["exp_inf"])


def _adagrad(reading: Reading) -> Tensor:
    steps = _steps(reading)
    root = (reading.state["sum"] / steps).sqrt()
    return reading.scaled(reading.floored(root, share=steps**-0.5))


def _own(reading: Reading) -> Tensor:
    return reading.state["precision"]


ADAPTERS: dict[str, Adapter] = {
    "SGD": identity,
    "RMSprop": _rmsprop,
    "Adam": _adam,
    "AdamW": _adam,
    "NAdam": _adam,
    "RAdam": _adam,
    "Adamax": _adamax,
    "Adagrad": _adagrad,
    "DiagonalOnlineNewton": _own,
    "DiagonalVON": _own,
}

IN_PAPER = {"RMSprop", "Adam", "AdamW", "NAdam", "RAdam"}  # running averages of squared gradients
SQUARED = IN_PAPER | {"Adagrad"}


def register(name: str, adapter: Adapter) -> None:
    """Teach :func:`engram.posterior_of` another optimizer, by the name of its class.

    Args:
        name: of the class; subclasses are read in the same way.
        adapter: from a :class:`Reading` of one parameter to the precision of each of its entries.

    Example:
        >>> register("MyAdam", lambda reading: reading.scaled(reading.state["v"].sqrt()))
        >>> _ = ADAPTERS.pop("MyAdam")
    """
    ADAPTERS[name] = adapter
