"""Which examples a page shows with their picture, text or row: those somebody will look at."""

from __future__ import annotations

import numpy as np

from engram.report.examples import Array, Examples, Neighbours

SHOWN = 2000  # examples; each costs about a kilobyte of the file
SEED = 0  # of the sample that stands for the others


def shown_positions(examples: Examples, count: int = SHOWN) -> Array:
    """Positions of at most ``count`` examples, the most telling first.

    Flagged ones by their leave-one-out loss, then in turn the highest leave-one-out losses, the
    highest scores, a random sample, and the neighbours of those before them.

    Example:
        >>> few = Examples(["a", "b", "c"], [0, 0, 0], [0.1, 2.0, 0.3], score=[1.0, 0.2, 0.3])
        >>> shown_positions(few, 2).tolist()
        [1, 0]
    """
    if len(examples) <= count:
        count = len(examples)
    by_loss = _falling(examples.loo_loss)
    flagged = np.zeros(len(examples), dtype=bool)
    for flag in examples.flags.values():
        flagged |= flag
    sample = np.random.default_rng(SEED).permutation(len(examples))
    turns = [by_loss, by_loss if examples.score is None else _falling(examples.score), sample]
    first = by_loss[flagged[by_loss]][: count // 2]
    rest = np.stack(turns, axis=1).ravel()
    found = _distinct(np.concatenate([first, rest]), count)
    if examples.neighbours is None:
        return found
    near = _neighbours_of(examples.neighbours, found[: count // 2])
    return _distinct(np.concatenate([found[: count // 2], near, found]), count)


def _falling(column: Array) -> Array:
    """Positions by falling value; what is not known comes last."""
    order: Array = np.argsort(-np.where(np.isnan(column), -np.inf, column), kind="stable")
    return order


def _distinct(positions: Array, count: int) -> Array:
    """The first ``count`` of them, each once, in their order."""
    _, first = np.unique(positions, return_index=True)
    distinct: Array = positions[np.sort(first)][:count]
    return distinct


def _neighbours_of(neighbours: Neighbours, positions: Array) -> Array:
    wanted = np.isin(np.asarray(neighbours.of), positions)
    near = [np.asarray(side)[wanted].ravel() for side in (neighbours.helpful, neighbours.harmful)]
    found: Array = np.concatenate(near).astype(np.int64)
    return found[found >= 0]
