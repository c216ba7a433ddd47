r"""Examples that are there more than once, exactly or nearly; leave-one-out takes all copies out.

Leaving one of two copies out changes little: the other one still says what it said. So copies are
left out together. To first order the outputs at an input move by the sum of what each example that
is left out moves there, and copies are at the same input:

.. math:: d_{\text{all}} = \sum_{j \in \text{copies}} V e_j = \sum_{j \in \text{copies}} d_j

Each :math:`d_j` is the deviation of that copy alone, so that no further pass is needed.

Of texts the words decide, not what a model is given of them: that leaves out rare words, so that
"What is titanium?" and "What is a caldera?" are at one place.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engram.core.dtypes import SMALLEST_DIVISOR
from engram.sensitivity.result import Result

# A pair is near where it is much nearer than examples usually are to their nearest neighbour: by
# that measure copies that differ by compression, brightness or rounding are found, and neighbours
# in a dense part of the data are not (benchmarks.audit, docs/audit.md)
NEAR = 0.1  # of the median distance to the nearest neighbour that is no copy
DIRECTIONS = 64  # that distances are measured in
MOST_NEIGHBOURS = (
    60_000  # examples up to which neighbours are looked for; beyond, exact copies only
)
BLOCK = 2048  # rows of distances at a time
SAME_WORDS = 0.9  # of the words of two texts, from which they are copies: of short ones all


@dataclass(frozen=True, eq=False)
class Duplicates:
    """Which examples are copies of each other.

    Args:
        group: number of the set of copies that an example is of, [N]; -1 for one of a kind.
        nearest: the copy that is nearest to it, [N]; -1 likewise.
        exact: whether a copy is equal in every number, or word, [N].
    """

    group: Tensor
    nearest: Tensor
    exact: Tensor

    @property
    def count(self) -> int:
        """Examples that have a copy."""
        return int((self.group >= 0).sum())


def find_duplicates(inputs: Tensor, texts: Sequence[str] | None = None) -> Duplicates:
    """Copies among encoded inputs.

    Args:
        inputs: [N, ...], as the model takes them.
        texts: what they encode, [N], where that is texts.

    Example:
        >>> x = torch.tensor([[0.0, 1.0], [5.0, 2.0], [0.0, 1.0], [3.0, 9.0]])
        >>> find_duplicates(x).nearest
        tensor([ 2, -1,  0, -1])
        >>> find_duplicates(x, ["So it is.", "no", "so it is", "It is so?"]).nearest
        tensor([ 2, -1,  0, -1])
    """
    rows = inputs.reshape(len(inputs), -1)
    words = None if texts is None else [_WORD.findall(text.lower()) for text in texts]
    same = _equal_rows(rows) if words is None else _equal_words(words)
    first = torch.full((int(same.max()) + 1,), len(rows)).scatter_reduce(
        0, same, torch.arange(len(rows)), "amin"
    )
    kinds = rows[first]
    parent = torch.arange(len(kinds))
    near = torch.full((len(kinds),), -1)
    if 3 <= len(kinds) <= MOST_NEIGHBOURS:
        own = None if words is None else [Counter(words[i]) for i in first.tolist()]
        parent, near = _joined(kinds, own)
    merged = parent[same]
    sizes = torch.bincount(merged)
    group = torch.where(sizes[merged] > 1, merged, -1)
    copies = torch.bincount(same)[same] > 1
    nearest = torch.where(copies, _next_equal(same), torch.where(near >= 0, first[near], -1)[same])
    return Duplicates(_numbered(group), torch.where(group >= 0, nearest, -1), copies)


def _equal_rows(rows: Tensor) -> Tensor:
    """A number for every different row, [N]."""
    plain = np.ascontiguousarray(rows.numpy() + 0.0)  # no two zeros
    keys = plain.view(np.dtype((np.void, plain.dtype.itemsize * plain.shape[1])))[:, 0]
    return torch.from_numpy(np.unique(keys, return_inverse=True)[1].reshape(-1))


_WORD = re.compile(r"\w+")


def _equal_words(words: Sequence[Sequence[str]]) -> Tensor:
    """A number for every text of other words, or in another order, [N]."""
    numbers: dict[tuple[str, ...], int] = {}
    return torch.tensor([numbers.setdefault(tuple(one), len(numbers)) for one in words])


def _share_words(one: Counter[str], two: Counter[str]) -> bool:
    """Whether two texts have nearly all of their words in common."""
    return (one & two).total() >= SAME_WORDS * (one | two).total()


def _next_equal(same: Tensor) -> Tensor:
    """For every row another one with its number, itself where there is none."""
    order = same.argsort(stable=True)
    sorted_numbers = same[order]
    following = torch.roll(order, -1)
    last = sorted_numbers != torch.roll(sorted_numbers, -1)
    if len(same):
        last[-1] = True
    starts = torch.cat([torch.tensor([True]), ~(sorted_numbers[1:] == sorted_numbers[:-1])])
    begin = order[starts.nonzero()[:, 0]][starts.cumsum(0) - 1]
    found = torch.empty_like(same)
    found[order] = torch.where(last, begin, following)
    return found


def _joined(kinds: Tensor, words: Sequence[Counter[str]] | None) -> tuple[Tensor, Tensor]:
    """Sets of rows that are linked by near pairs, and the nearest neighbour of each such row."""
    distance, nearest = nearest_neighbours(_directions(kinds))
    linked = distance <= NEAR * float(distance.median())
    if words is not None:
        pairs = zip(words, nearest.tolist(), strict=True)
        linked = torch.tensor([_share_words(own, words[other]) for own, other in pairs])
    parent = list(range(len(kinds)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for i in linked.nonzero()[:, 0].tolist():
        parent[root(i)] = root(int(nearest[i]))
    roots = torch.tensor([root(i) for i in range(len(kinds))])
    near = torch.where(linked, nearest, -1)
    for i in linked.nonzero()[:, 0].tolist():
        other = int(nearest[i])
        if near[other] < 0:
            near[other] = i
    return roots, near


def nearest_neighbours(points: Tensor) -> tuple[Tensor, Tensor]:
    """Distance to the nearest other point, and which it is, [N] each."""
    squares = points.square().sum(1)
    found_distance, found = [], []
    for start in range(0, len(points), BLOCK):
        part = points[start : start + BLOCK]
        distances = squares[start : start + BLOCK, None] + squares - 2 * part @ points.T
        distances[torch.arange(len(part)), start + torch.arange(len(part))] = torch.inf
        place = distances.argmin(1)
        found_distance.append((part - points[place]).norm(dim=1))
        found.append(place)
    return torch.cat(found_distance), torch.cat(found)


def _directions(rows: Tensor) -> Tensor:
    """The main directions of the rows, where there are many rows and columns."""
    if min(rows.shape) <= DIRECTIONS:
        return rows
    from sklearn.decomposition import PCA

    fitted = PCA(DIRECTIONS, svd_solver="randomized", random_state=0)
    return torch.from_numpy(np.asarray(fitted.fit_transform(rows.numpy()), dtype=np.float32))


def _numbered(group: Tensor) -> Tensor:
    """The sets counted from 0."""
    found = torch.unique(group, return_inverse=True)[1]
    return found - 1 if bool((group < 0).any()) else found


def without_copies(result: Result, duplicates: Duplicates) -> Result:
    """The result with every example left out together with its copies."""
    some = (duplicates.group >= 0).nonzero()[:, 0]
    if len(some) == 0:
        return result
    group = duplicates.group[some]
    own = result.deviation[some]
    summed = torch.zeros(int(group.max()) + 1, own.shape[1], dtype=own.dtype)
    deviation = summed.index_add(0, group, own)[group]
    likelihood, outputs = result.basis.known_likelihood, result.outputs[some]
    targets = likelihood.prepare(outputs, result.targets[some])
    moved = likelihood.mean(outputs + deviation) - likelihood.mean(outputs)
    alone, together = (likelihood.loss(outputs + d, targets) for d in (own, deviation))
    loo_loss = corrected(result.loo_loss[some], alone, together)
    changed = {
        "deviation": deviation,
        "prediction_deviation": moved,
        "score": moved.abs().sum(1),
        "loo_loss": loo_loss,
    }
    columns = {name: getattr(result, name).clone() for name in changed}
    for name, values in changed.items():
        columns[name][some] = values.to(columns[name].dtype)
    return replace(result, **columns)


def corrected(loo_loss: Tensor, alone: Tensor, together: Tensor) -> Tensor:
    """Leave-one-out losses without the copies too, [N].

    They need not be those at the moved outputs: along a training they are means over its course. So
    what the copies add is added, and what they take away is taken by its share, which leaves no
    loss below 0.

    Args:
        loo_loss: without the example.
        alone, together: at the outputs moved by its own deviation, and by that of all copies.
    """
    more = loo_loss + (together - alone)
    less = loo_loss * together / alone.clamp(min=SMALLEST_DIVISOR)
    return torch.where(together >= alone, more, less)
