"""Pairs of steps and gradient changes, against BFGS updates of a dense inverse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engram.linalg.lbfgs import LBFGSMemory

COPIES, SIZE, DEPTH = 3, 7, 4


def definite(seed: int) -> Tensor:
    torch.manual_seed(seed)
    root = torch.randn(SIZE, SIZE, dtype=torch.float64)
    return root @ root.mT + torch.eye(SIZE, dtype=torch.float64)


def updated(inverse: Tensor, step: Tensor, change: Tensor) -> Tensor:
    """The BFGS update of an inverse."""
    weight = 1.0 / (step @ change)
    turn = torch.eye(SIZE, dtype=torch.float64) - weight * torch.outer(step, change)
    return turn @ inverse @ turn.mT + weight * torch.outer(step, step)


class Recorded:
    """Pairs of all copies, and the same in lists."""

    def __init__(self) -> None:
        self.base, self.hessian = definite(0), [definite(1 + copy) for copy in range(COPIES)]
        self.pairs = LBFGSMemory(torch.zeros(COPIES, SIZE, dtype=torch.float64), DEPTH)
        self.places: list[dict[int, tuple[Tensor, Tensor]]] = []

    def add(self, copies: list[int], sign: float = 1.0) -> None:
        """Exact pairs of some copies; with ``sign`` -1, of negative curvature."""
        step = torch.randn(len(copies), SIZE, dtype=torch.float64)
        change = torch.stack(
            [sign * self.hessian[c] @ s for c, s in zip(copies, step, strict=True)]
        )
        self.pairs.add(torch.tensor(copies), step, change, change @ self.base)
        good = zip(copies, zip(step, change, strict=True), strict=True) if sign > 0 else ()
        self.places.append(dict(good))

    def of(self, copy: int) -> list[tuple[Tensor, Tensor]]:
        """Pairs of a copy that are kept, the oldest first."""
        return [place[copy] for place in self.places[-DEPTH:] if copy in place]

    def dense(self, copy: int, scale: float) -> Tensor:
        inverse = scale * self.base
        for step, change in self.of(copy):
            inverse = updated(inverse, step, change)
        return inverse


@pytest.fixture
def recorded() -> Recorded:
    """More pairs than are kept, some of them of some copies only, one of negative curvature."""
    found = Recorded()
    for copies, sign in (([0, 1, 2], 1), ([0, 2], 1), ([0, 1, 2], -1), ([1, 2], 1), ([0, 2], 1)):
        found.add(copies, sign)
    return found


@pytest.mark.parametrize("rows", [[0, 1, 2], [0, 2], [1]])
def test_compact_form_is_the_dense_update(recorded: Recorded, rows: list[int]) -> None:
    vectors = torch.randn(len(rows), SIZE, dtype=torch.float64)
    scale = torch.tensor([0.3, 1.0, 2.0], dtype=torch.float64)[rows]
    found = recorded.pairs.apply(torch.tensor(rows), vectors, vectors @ recorded.base, scale)
    for copy, vector, size, row in zip(rows, vectors, scale.tolist(), found, strict=True):
        torch.testing.assert_close(row, recorded.dense(copy, size) @ vector)


def test_last_pair_is_met_exactly(recorded: Recorded) -> None:
    step, change = recorded.of(0)[-1]
    one = torch.ones(1, dtype=torch.float64)
    found = recorded.pairs.apply(
        torch.tensor([0]), change[None], (change @ recorded.base)[None], one
    )
    torch.testing.assert_close(found[0], step)


def test_without_pairs_the_base_stays() -> None:
    pairs = LBFGSMemory(torch.zeros(COPIES, SIZE, dtype=torch.float64), DEPTH)
    vectors = torch.randn(COPIES, SIZE, dtype=torch.float64)
    rows, scale = torch.arange(COPIES), torch.full((COPIES,), 0.5, dtype=torch.float64)
    solved = vectors @ definite(0)
    torch.testing.assert_close(pairs.apply(rows, vectors, solved, scale), 0.5 * solved)
    assert torch.equal(pairs.scale(rows, 3, scale), scale)


@pytest.mark.parametrize("memory", [1, 2, 20])
def test_scale_is_the_mean_over_the_last_good_pairs(recorded: Recorded, memory: int) -> None:
    otherwise = torch.full((COPIES,), 7.0, dtype=torch.float64)
    found = recorded.pairs.scale(torch.arange(COPIES), memory, otherwise)
    for copy in range(COPIES):
        logs = [
            torch.log((step @ change) / (change @ recorded.base @ change))
            for step, change in recorded.of(copy)[-memory:]
        ]
        torch.testing.assert_close(found[copy], torch.stack(logs).mean().exp())
