r"""SOAP and Shampoo: a root that is diagonal after rotating the rows and columns of a weight.

.. math:: P = (Q_r \otimes Q_c)\, \mathrm{diag}(p)\, (Q_r \otimes Q_c)'

Of a weight with more than two axes the first one is the rows, and the others together the columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from engram.core.dtypes import eigh
from engram.errors import TrainingError
from engram.training.step_rules import Step, with_eps


@dataclass(frozen=True)
class EigenRoot:
    """P of one parameter as a matrix [O, I].

    Args:
        values: p, [O, I].
        rows, columns: Q_r [O, O] and Q_c [I, I]; None stands for the identity.
    """

    values: Tensor
    rows: Tensor | None
    columns: Tensor | None

    def along_axes(self, shape: torch.Size) -> Tensor:
        """1 / diag(P^-1), entry by entry: what a time per entry can say of it."""
        inverse = self.values.reciprocal()
        if self.rows is not None:
            inverse = self.rows.square() @ inverse
        if self.columns is not None:
            inverse = inverse @ self.columns.square().mT
        return inverse.reciprocal_().reshape(shape)


def _together(bases: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor | None:
    """The Kronecker product of bases of several axes; None where all are the identity."""
    like = next((basis for basis in bases if basis is not None), None)
    if like is None:
        return None
    full = [torch.eye(n).to(like) if b is None else b for b, n in zip(bases, sizes, strict=True)]
    return reduce(torch.kron, full)


def root_of_soap(
    group: Mapping[str, Any], state: Mapping[str, Any], shape: torch.Size
) -> EigenRoot:
    """sqrt(v_hat) of the rotated gradients, in the basis that they were rotated to."""
    if group.get("merge_dims") or group.get("normalize_gradient"):
        raise TrainingError(
            "a SOAP with an axis of its preconditioner for every axis of a weight, and steps "
            "that are not normalised",
            "one with merge_dims or normalize_gradient",
            "train without these two",
        )
    square: Tensor = state["exp_avg_sq"]
    steps = max(1, int(group["step"]) - 1)  # the first makes the basis and moves nothing
    correction = 1 - float(group["betas"][1]) ** steps if group["correct_bias"] else 1.0
    bases = [q if isinstance(q, Tensor) and len(q) else None for q in state["Q"]]
    values = (square / correction).sqrt_().reshape(len(square), -1)
    return EigenRoot(values, bases[0], _together(bases[1:], shape[1:]))


def soap_root(step: Step) -> Tensor:
    """1 / diag(P^-1) with the roots plus eps; infinite before the first step that moves."""
    found = root_of_soap(step.group, step.state, step.parameter.shape)
    values = with_eps(found.values, step.group)
    return EigenRoot(values, found.rows, found.columns).along_axes(step.parameter.shape)


def soap_weight(step: Step, memory: float, share: float) -> tuple[float, float]:
    """m <- beta1 m + (1 - beta1) g, corrected unless SOAP is told not to."""
    beta = float(step.group["betas"][0])
    memory = beta * memory + (1 - beta) * share
    return memory, memory / (1 - beta**step.number) if step.group["correct_bias"] else memory


def root_of_shampoo(state: Mapping[str, Any], shape: torch.Size, steps: float) -> EigenRoot:
    """The product over the k axes of (sum of g g' / t)^(1 / 2k)."""
    power = 1 / (2 * len(shape))
    pairs = [eigh(state[f"pre_cond_{axis}"] / steps) for axis in range(len(shape))]
    roots = [values.clamp(min=0).pow(power) for values, _ in pairs]
    others = reduce(torch.kron, roots[1:], torch.ones(1).to(roots[0]))
    bases = [vectors for _, vectors in pairs]
    return EigenRoot(roots[0][:, None] * others, bases[0], _together(bases[1:], shape[1:]))


def shampoo_root(step: Step) -> Tensor:
    """1 / diag(P^-1), with sums as they are."""
    shape = step.parameter.shape
    return root_of_shampoo(step.state, shape, 1.0).along_axes(shape).to(step.parameter.dtype)


def shampoo_weight(step: Step, memory: float, share: float) -> tuple[float, float]:
    """1: its momentum divides what was divided before once more, which is no such step."""
    if float(step.group["momentum"]):
        raise TrainingError(
            "a Shampoo without momentum", f"momentum {step.group['momentum']}", "train without it"
        )
    return memory, share
