"""Limits that a result must keep, as continuous integration asks for them."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

from engram.core.arguments import is_number, one_of, shown
from engram.errors import ArgumentError
from engram.sensitivity.label_issues import label_issues
from engram.sensitivity.result import Result, check_result
from engram.trust.verdict import LEVELS


@dataclass(frozen=True)
class Limit:
    """One limit, and whether a result keeps it.

    Attributes:
        name: of what is limited.
        allowed: the limit, in words.
        found: what the result has, in words.
        kept: whether it is within.
    """

    name: str
    allowed: str
    found: str
    kept: bool

    def __str__(self) -> str:
        return f"{'ok' if self.kept else 'FAIL':4}  {self.name}: {self.found} ({self.allowed})"


def limits(
    result: Result,
    *,
    max_label_issues: float | None = None,
    max_loo_loss: float | None = None,
    min_verdict: str | None = None,
    label_issue_count: int | None = None,
) -> list[Limit]:
    """Hold a result against limits.

    Args:
        result: of :func:`engram.sensitivities`.
        max_label_issues: of labels that are likely wrong, the largest number (a whole number) or
            share (a float).
        max_loo_loss: largest mean leave-one-out loss, per example.
        min_verdict: ``good``, ``caution`` or ``unreliable``: the worst that is allowed.
        label_issue_count: how many labels are likely wrong, where that is known better than by
            the labels that leave-one-out contradicts.

    Returns:
        One for each limit that is given.

    Example:
        >>> import torch
        >>> import engram
        >>> model, data = torch.nn.Linear(3, 2), (torch.randn(20, 3), torch.arange(20) % 2)
        >>> fitted = engram.laplace(model, data, prior_precision=1.0)
        >>> result = engram.sensitivities(model, data, fitted)
        >>> [limit.kept for limit in limits(result, max_loo_loss=1e9)]
        [True]
    """
    check_result(result)
    found = []
    if max_label_issues is not None:
        found.append(_label_issues(result, max_label_issues, label_issue_count))
    if max_loo_loss is not None:
        if not is_number(max_loo_loss):
            raise ArgumentError("a number as max_loo_loss", shown(max_loo_loss), "use 0.4")
        allowed = f"at most {max_loo_loss:g} {result.basis.loss_unit} per example"
        kept = result.loo_nll <= max_loo_loss  # NaN is not
        found.append(Limit("leave-one-out loss", allowed, f"{result.loo_nll:.4f}", kept))
    if min_verdict is not None:
        lowest = one_of("min_verdict", min_verdict, LEVELS, 'use "caution"')
        level = result.verdict.level
        kept = LEVELS.index(level) <= LEVELS.index(lowest)
        found.append(Limit("verdict", f"at least {lowest}", level, kept))
    return found


def _label_issues(result: Result, most: float, count: int | None) -> Limit:
    if not is_number(most) or not most >= 0:
        raise ArgumentError("a number or share of labels of at least 0", shown(most), "use 0.01")
    name = "labels that are likely wrong"
    if count is None:
        count = int(label_issues(result)["contradicted"].sum())
        name = "labels that leave-one-out contradicts"
    share, counted = count / result.num_data, isinstance(most, Integral)
    kept = count <= most if counted else share <= most
    allowed = f"at most {most:,}" if counted else f"at most {most:.3%}"
    return Limit(name, allowed, f"{count:,} of {result.num_data:,}, {share:.3%}", kept)
