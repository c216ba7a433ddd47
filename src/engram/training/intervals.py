"""Sums over the visits of every example, kept apart for intervals of steps; small however long.

A row is what one visit says about its example. Rows are added up within an interval, which ends
with a checkpoint of the weights; where checkpoints are dropped, or sums take too much memory,
neighbouring intervals are merged.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from engram.errors import MemoryLimitError

# More intervals say more exactly what a segment of the training saw; there are at most 25
MAX_BYTES = 2**29  # of all sums; where they would take more, neighbouring intervals are merged
FEWEST = 2  # intervals; columns that can be done without are given up for the second one
ROOM = 1.5  # factor by which tables grow where the number of examples is not known


@dataclass
class Interval:
    """Sums over the visits in consecutive steps.

    Args:
        start: the step before its first.
        end: its last step.
        sums: [N, columns]; None where nothing was visited.
    """

    start: int
    end: int
    sums: Tensor | None = field(default=None, repr=False)

    def take(self, other: Interval) -> None:
        """Make the next interval part of it."""
        self.end = other.end
        if self.sums is None:
            self.sums = other.sums
        elif other.sums is not None:
            self.sums += other.sums


@dataclass
class IntervalSums:
    """Rows of numbers by example, summed within intervals, and those of first and last visits.

    Args:
        num_data: N, examples that there are as far as is known.
        intervals: in order; the last is being added to.
        first, last: the row of every example's first and last visit, [N, columns].
        max_bytes: that all of them may take.
    """

    num_data: int = 0
    intervals: tuple[Interval, ...] = (Interval(0, 0),)
    first: Tensor | None = field(default=None, repr=False)
    last: Tensor | None = field(default=None, repr=False)
    max_bytes: int = MAX_BYTES
    _seen: Tensor = field(default_factory=lambda: torch.zeros(0).bool(), init=False, repr=False)
    _unseen: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        self.intervals = tuple(Interval(i.start, i.end, i.sums) for i in self.intervals)
        if self.first is not None:
            self._look(self.first[:, 0] > 0)

    def add(self, indices: Tensor, rows: Tensor) -> None:
        """Add rows, of which the first column is 1: it counts the visits."""
        self.num_data = max(self.num_data, int(indices.max()) + 1)
        self._make_room(rows)
        now = self.intervals[-1]
        assert self.first is not None
        assert self.last is not None
        if now.sums is None:
            now.sums = torch.zeros_like(self.first)
        now.sums.index_add_(0, indices, rows)
        self.last[indices] = rows
        if self._unseen:
            new = ~self._seen[indices]
            self.first[indices[new].flip(0)] = rows[new].flip(0)  # of several the earliest
            self._seen[indices] = True
            self._unseen = len(self._seen) - int(self._seen.sum())

    def _make_room(self, like: Tensor) -> None:
        """Tables of N rows at least."""
        have = 0 if self.first is None else len(self.first)
        if have >= self.num_data:
            return
        size = max(self.num_data, int(ROOM * have))

        def grown(old: Tensor | None) -> Tensor:
            new = like.new_zeros(size, like.shape[1])
            if old is not None:
                new[: len(old)] = old
            return new

        self.first, self.last = grown(self.first), grown(self.last)
        for interval in self.intervals:
            interval.sums = None if interval.sums is None else grown(interval.sums)
        seen = torch.zeros(size, dtype=torch.bool)
        seen[: len(self._seen)] = self._seen
        self._look(seen)

    def _look(self, seen: Tensor) -> None:
        self._seen, self._unseen = seen, len(seen) - int(seen.sum())

    def fits(self, rows: int, like: Tensor) -> bool:
        """Whether the fewest intervals over so many examples, in rows like these, fit."""
        return (FEWEST + 2) * self._bytes_of(max(rows, self.num_data), like) <= self.max_bytes

    def check(self, rows: int, like: Tensor) -> None:
        """MemoryLimitError where not even one interval fits."""
        size = max(rows, self.num_data)
        needed = 3 * self._bytes_of(size, like)
        if needed > self.max_bytes:
            raise MemoryLimitError(
                f"sums over the visits of {size:,} examples in {self.max_bytes / 2**30:.3g} GB",
                f"{like.shape[1]} numbers each, {needed / 2**30:.3g} GB",
                "name the targets too: training.visit(indices, outputs, targets) keeps losses "
                "only; or record without a loader",
            )

    @staticmethod
    def _bytes_of(size: int, like: Tensor) -> int:
        return size * like.shape[1] * like.element_size()

    def drop(self, columns: slice) -> None:
        """Give columns up."""
        for interval in self.intervals:
            interval.sums = _without(interval.sums, columns)
        self.first, self.last = _without(self.first, columns), _without(self.last, columns)

    def advance(self, step: int) -> None:
        """A step was taken: what comes next belongs to the one after."""
        self.intervals[-1].end = step

    def cut(self, kept: Collection[int]) -> None:
        """Begin a new interval at the present step; only boundaries at these steps stay."""
        step = self.intervals[-1].end
        self.intervals = (*self.intervals, Interval(step, step))
        while (place := self._to_merge(kept)) is not None:
            one, two = self.intervals[place : place + 2]
            one.take(two)
            self.intervals = (*self.intervals[: place + 1], *self.intervals[place + 2 :])

    def _to_merge(self, kept: Collection[int]) -> int | None:
        """Where two neighbours become one: no boundary, or too many; then the shortest pair."""
        pairs = list(enumerate(pairwise(self.intervals)))
        gone = next((n for n, (one, _) in pairs if one.end not in kept), None)
        if gone is not None or self.first is None or len(pairs) < 2:
            return gone
        most = self.max_bytes // max(1, self._bytes_of(len(self.first), self.first)) - 2
        if len(self.intervals) <= max(FEWEST, most):
            return None
        return min(pairs[:-1], key=lambda pair: pair[1][1].end - pair[1][0].start)[0]

    def total(
        self, start: int = 0, end: int | None = None, indices: Tensor | None = None
    ) -> Tensor:
        """Sums over the intervals that lie within these steps for the most part, [N, columns].

        Where none does, those of the one interval that holds most of them.

        Args:
            start, end: steps; to the last one where no end is given.
            indices: of some examples; all, if not given.
        """
        assert self.first is not None, "no visits"
        found = _within(self.intervals, start, end)
        rows = slice(self.num_data) if indices is None else indices
        whole = torch.zeros_like(self.first[rows])
        for interval in found:
            if interval.sums is not None:
                whole += interval.sums[rows]
        return whole

    def copied(self) -> IntervalSums:
        """The same in memory of its own, as long as there are examples."""
        parts = tuple(Interval(i.start, i.end, self._cut(i.sums)) for i in self.intervals)
        ends = (self._cut(self.first), self._cut(self.last))
        return IntervalSums(self.num_data, parts, *ends, self.max_bytes)

    def _cut(self, table: Tensor | None) -> Tensor | None:
        return None if table is None else table[: self.num_data].clone()


def _without(table: Tensor | None, columns: slice) -> Tensor | None:
    if table is None:
        return None
    keep = torch.ones(table.shape[1], dtype=torch.bool)
    keep[columns] = False
    return table[:, keep].contiguous()


def _within(intervals: Sequence[Interval], start: int, end: int | None) -> list[Interval]:
    if end is None:
        return [i for i in intervals if start <= (i.start + i.end) / 2]
    inside = [i for i in intervals if start <= (i.start + i.end) / 2 <= end and i.end > i.start]
    return inside or [max(intervals, key=lambda i: min(i.end, end) - max(i.start, start))]
