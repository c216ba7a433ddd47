"""A verdict: how far to believe a result or one of its examples, why, and what to do about it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from textwrap import wrap

import torch
from torch import Tensor

from engram.core.storage.kinds import check_that, checked, positions
from engram.core.storage.values import ADDED_LATER
from engram.trust.aspects import (
    ASPECTS,
    CAUTION,
    EXAMPLES,
    GOOD,
    GROUP,
    LEVELS,
    MEAN,
    RANKING,
    SIZE,
    UNRELIABLE,
    Aspect,
    Expected,
)

__all__ = ["CAUTION", "GOOD", "LEVELS", "UNRELIABLE", "Reason", "Rule", "Verdict"]

UNKNOWN = Expected()
BY_ITSELF = "the example holds itself in place: its leverage is high, or a guard held"
AS_BEFORE = "The same helps."
ALONE = "Obtain it by engram.refine, or train without it."


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
        about: which of ranking, size and mean it speaks against.
    """

    signal: str
    level: str
    value: float
    threshold: float
    text: str
    remedy: str
    about: tuple[str, ...] = field(default=ASPECTS, metadata=ADDED_LATER)

    def __str__(self) -> str:
        return f"{self.level}: {self.text} ({self.signal} {self.value:.2g}). {self.remedy}".rstrip()


@dataclass(frozen=True)
class Rule:
    """Two thresholds on a signal that is worse the larger it is, and what it speaks against.

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
    about: tuple[str, ...] = ASPECTS

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
        return Reason(
            self.signal, LEVELS[level], value, threshold, self.text, self.remedy, self.about
        )


@dataclass(frozen=True, eq=False)
class Verdict:
    """How far to believe a result: its ranking, its sizes and its mean, each by itself.

    Attributes:
        level: of the run: ``good``, ``caution`` or ``unreliable``, the worst of its reasons.
        reasons: the worst first; empty where nothing speaks against it.
        levels: of every example as a position in ``LEVELS``, [N]; never better than what the
            reasons about the whole run leave. Empty for a removal, which has one effect.
        expected: numbers to expect, as far as the study knows them.
        subject: ``examples``, each left out by itself, or a ``group``.

    Example:
        >>> rule = Rule("leverage", 0.5, 1.0, "too unsure", "Refit.", about=("size",))
        >>> verdict = Verdict.of([rule], {"leverage": 0.7}, torch.tensor([0, 2]))
        >>> verdict.level, verdict.ranking.level, verdict.size.level
        ('caution', 'good', 'caution')
        >>> verdict.line
        'ranking good, sizes within 3 times, mean LOO within 20 %'
        >>> verdict.of_example(1).line
        'ranking good, sizes not to be used, mean LOO not to be used'
    """

    level: str
    reasons: tuple[Reason, ...]
    levels: Tensor
    expected: Expected = field(default=UNKNOWN, metadata=ADDED_LATER)
    subject: str = field(default=EXAMPLES, metadata=ADDED_LATER)

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
        cls,
        reasons: Iterable[Reason],
        own_levels: Tensor,
        of_examples: Iterable[Reason] = (),
        expected: Expected = UNKNOWN,
    ) -> Verdict:
        """The worst reason decides about the run, and an example is never better than its run.

        Args:
            reasons: about the run.
            own_levels: of the examples, by themselves, [N].
            of_examples: reasons why the run is no better that lie in single examples; the others
                stand as they are.
            expected: numbers to expect.
        """
        about_all = list(reasons)
        worst = max((LEVELS.index(reason.level) for reason in about_all), default=GOOD)
        ordered = sorted([*about_all, *of_examples], key=lambda r: -LEVELS.index(r.level))
        level = ordered[0].level if ordered else LEVELS[GOOD]
        return cls(level, tuple(ordered), own_levels.clamp(min=worst), expected)

    @property
    def ranking(self) -> Aspect:
        """Whether the order of the examples can be believed; of a removal, its sign."""
        return self._aspect(RANKING)

    @property
    def size(self) -> Aspect:
        """Whether the sizes of scores and increases can be; of a removal, of its effect."""
        return self._aspect(SIZE)

    @property
    def mean(self) -> Aspect:
        """Whether the mean leave-one-out loss can be, the estimate of the test loss."""
        return self._aspect(MEAN)

    def _aspect(self, name: str) -> Aspect:
        about = (LEVELS.index(reason.level) for reason in self.reasons if name in reason.about)
        worst = max(about, default=GOOD)
        if (
            self.subject == GROUP
        ):  # one step gives its sign and its size: what spoils one doubts all
            worst = max(worst, LEVELS.index(self.level) - 1)
        return Aspect(name, LEVELS[worst], getattr(self.expected, name), self.subject)

    @property
    def line(self) -> str:
        """All three in one line."""
        return ", ".join(aspect.text for aspect in (self.ranking, self.size, self.mean))

    def of_example(self, position: int) -> Verdict:
        """The verdict on one example, by its row in the result.

        Its reasons are those of the run that hold for it, and its own.
        """
        level = int(self.levels[position])
        reasons = [r for r in self.reasons if LEVELS.index(r.level) <= level]
        if level > max((LEVELS.index(r.level) for r in reasons), default=GOOD):
            own = Reason("example", LEVELS[level], 1.0, 0.0, BY_ITSELF, ALONE, (SIZE, MEAN))
            reasons = [own, *reasons]
        return Verdict(LEVELS[level], tuple(reasons), self.levels[position : position + 1])

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
            f"verdict               {self.level}" + (f"; examples: {examples}" * bool(examples)),
            f"  {self.line}",
        ]
        said = set[str]()
        for reason in self.reasons:
            once = replace(reason, remedy=AS_BEFORE) if reason.remedy in said else reason
            said.add(reason.remedy)
            lines += wrap(str(once), 79, initial_indent="  ", subsequent_indent="    ")
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
