"""A verdict: how far to believe a result or one of its examples, why, and what to do about it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from textwrap import wrap

import torch
from torch import Tensor

from engram.core.storage.kinds import check_that, checked, positions

LEVELS = ("good", "caution", "unreliable")
GOOD, CAUTION, UNRELIABLE = range(3)


@dataclass(frozen=True)
class Reason:
    """A signal beyond its threshold, with what it means and what to do about it.

    Args:
        signal: its name.
        level: ``caution`` or ``unreliable``.
        value: of the signal.
        threshold: that it passed.
        text: what it means.
        remedy: what to do.
    """

    signal: str
    level: str
    value: float
    threshold: float
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.level}: {self.text} ({self.signal} {self.value:.2g}). {self.remedy}"


@dataclass(frozen=True)
class Rule:
    """Two thresholds on a signal that is worse the larger it is.

    Example:
        >>> rule = Rule("relative_gradient", 0.1, 0.5, "not at a minimum", "Train longer.")
        >>> rule.level(0.05), rule.level(0.2), rule.level(0.7), rule.level(float("nan"))
        (0, 1, 2, 0)
        >>> print(rule.reason(0.2))
        caution: not at a minimum (relative_gradient 0.2). Train longer.
    """

    signal: str
    caution: float
    unreliable: float
    text: str
    remedy: str

    def level(self, value: float) -> int:
        """Position in LEVELS; a signal that is not known says nothing."""
        return (
            GOOD if math.isnan(value) else int(value > self.caution) + int(value > self.unreliable)
        )

    def levels(self, values: Tensor) -> Tensor:
        """The same for every entry."""
        return (values > self.caution).to(torch.int8) + (values > self.unreliable).to(torch.int8)

    def reason(self, value: float) -> Reason | None:
        """Why this value speaks against a result; None where it does not."""
        level = self.level(value)
        if level == GOOD:
            return None
        threshold = self.unreliable if level == UNRELIABLE else self.caution
        return Reason(self.signal, LEVELS[level], value, threshold, self.text, self.remedy)


@dataclass(frozen=True, eq=False)
class Verdict:
    """How far to believe a result.

    Attributes:
        level: of the run: ``good``, ``caution`` or ``unreliable``, the worst of its reasons.
        reasons: the worst first; empty where nothing speaks against it.
        levels: of every example as a position in ``LEVELS``, [N]; never better than what the
            reasons about the whole run leave. Empty for a removal, which has one effect.
    """

    level: str
    reasons: tuple[Reason, ...]
    levels: Tensor

    @classmethod
    def of(
        cls,
        rules: Iterable[Rule],
        signals: Mapping[str, float],
        own_levels: Tensor,
        of_examples: Iterable[Reason] = (),
    ) -> Verdict:
        """Every rule applied to its signal, and what speaks against single examples."""
        found = [rule.reason(signals[rule.signal]) for rule in rules]
        return cls.from_reasons([reason for reason in found if reason], own_levels, of_examples)

    @classmethod
    def from_reasons(
        cls, reasons: Iterable[Reason], own_levels: Tensor, of_examples: Iterable[Reason] = ()
    ) -> Verdict:
        """The worst reason decides about the run, and an example is never better than its run.

        Args:
            reasons: about the run.
            own_levels: of the examples, by themselves, [N].
            of_examples: reasons why the run is no better that lie in single examples; the others
                stand as they are.
        """
        about_all = list(reasons)
        worst = max((LEVELS.index(reason.level) for reason in about_all), default=GOOD)
        ordered = sorted([*about_all, *of_examples], key=lambda r: -LEVELS.index(r.level))
        level = ordered[0].level if ordered else LEVELS[GOOD]
        return cls(level, tuple(ordered), own_levels.clamp(min=worst))

    @property
    def level_names(self) -> list[str]:
        """The level of every example in words."""
        return [LEVELS[level] for level in self.levels.tolist()]

    @property
    def counts(self) -> dict[str, int]:
        """How many examples are at each level."""
        return {name: int((self.levels == n).sum()) for n, name in enumerate(LEVELS)}

    def __repr__(self) -> str:
        examples = ", ".join(f"{count:,} {name}" for name, count in self.counts.items() if count)
        lines = [
            f"verdict               {self.level}" + (f"; examples: {examples}" * bool(examples))
        ]
        for reason in self.reasons:
            lines += wrap(str(reason), 79, initial_indent="  ", subsequent_indent="    ")
        return "\n".join(lines)


def _check(verdict: Verdict) -> None:
    """A verdict is the worst of its reasons, and none of them is good."""
    levels = [reason.level for reason in verdict.reasons]
    check_that(set(levels) <= set(LEVELS[1:]), f"reasons of {' or '.join(LEVELS[1:])}", f"{levels}")
    worst = LEVELS[max((LEVELS.index(level) for level in levels), default=GOOD)]
    check_that(
        verdict.level == worst, f"the level {worst!r}, as its reasons have it", verdict.level
    )


checked(Verdict, {"levels": positions("N", below=len(LEVELS), dtype=torch.int8)}, _check)
