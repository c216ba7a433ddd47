r"""What an optimizer's weight decay says about the prior precision delta.

A *coupled* decay w adds w theta to the gradient of the batch's loss: delta is N w for a mean over
the batch and (N / batch size) w for a sum. A *decoupled* one shrinks the weights whatever the scale
of the loss, so that delta is N w for either. IVON has its own N, the effective sample size; our own
optimizers take delta itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from engram.core.arguments import is_auto
from engram.core.errors import ArgumentError
from engram.core.parameters import count
from engram.posteriors.adapters import kind_of
from engram.posteriors.gaussian import check_prior_precision


@dataclass(frozen=True)
class Prior:
    """delta of every parameter that the optimizer trains, and where it comes from."""

    by_name: Mapping[str, float]
    source: str

    @property
    def differs(self) -> bool:
        """Whether parameters have different ones."""
        return len(set(self.by_name.values())) > 1

    def mean(self, parameters: Mapping[str, Tensor]) -> float:
        """delta; where it differs, its mean over the parameters' entries."""
        if not self.differs:
            return next(iter(self.by_name.values()))
        total = sum(value * parameters[name].numel() for name, value in self.by_name.items())
        return total / count(parameters[name] for name in self.by_name)


def prior_of(
    optimizer: Optimizer,
    parameters: Mapping[str, Tensor],
    given: float | str,
    scale: float,
    num_data: int,
    needed: bool = True,
) -> Prior:
    """The prior that is given, or else the one that the groups' weight decays stand for.

    Args:
        optimizer: whose groups are read.
        parameters: the model's trainable ones.
        given: delta for all of them, or ``"auto"``.
        scale: N for a loss averaged over the batch, N / batch size for a sum.
        num_data: N.
        needed: whether the precision would be nothing without one.
    """
    names = {id(p): name for name, p in parameters.items()}
    found: dict[str, float] = {}
    kinds: set[str] = set()
    for group in optimizer.param_groups:
        value, kind = _of_group(optimizer, group, scale, num_data)
        mine = [names[id(p)] for p in group["params"] if id(p) in names]
        found |= dict.fromkeys(mine, value)
        kinds |= {kind} if mine else set()
    source = " and ".join(sorted(kinds))
    if not is_auto(given):
        return _replaced(found, source, check_prior_precision(given))
    if (needed and not max(found.values()) > 0) or min(found.values()) < 0:
        raise ArgumentError(
            "a prior_precision, or a positive weight decay to take it from",
            f"prior precisions {sorted(set(found.values()))} from the weight decays",
            "pass prior_precision (num_data times the weight decay of the mean loss)",
        )
    return Prior(found, source)


def _of_group(
    optimizer: Optimizer, group: Mapping[str, Any], scale: float, num_data: int
) -> tuple[float, str]:
    if "prior_precision" in group:
        return float(group["prior_precision"]), "optimizer"
    decay = float(group.get("weight_decay", 0.0))
    if "ess" in group:
        return float(group["ess"]) * decay, "ess times weight decay"
    if kind_of(optimizer).decoupled or group.get("decoupled_weight_decay"):
        return num_data * decay, "decoupled weight decay"
    return scale * decay, "weight decay"


def _replaced(found: Mapping[str, float], source: str, given: float) -> Prior:
    """The argument instead; our own optimizers have delta in their precision already."""
    values = found.values()
    if source == "optimizer" and not all(math.isclose(v, given, rel_tol=1e-6) for v in values):
        raise ArgumentError(
            f"the prior_precision that the optimizer was made with, {sorted(set(values))}",
            repr(given),
            "leave prior_precision out: the precision in the state contains it",
        )
    return Prior(dict.fromkeys(found, given), "argument")
