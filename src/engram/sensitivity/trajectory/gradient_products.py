r"""Products of the gradients of some examples, each entry times the root of its training time.

Held-out examples meet the seen ones and not each other. Where the gradient of a layer is one
product :math:`r c'` it is never built whole: with one training time for all entries its products
are :math:`r_i' r_j \, c_i' c_j`, and with a table of them, T, rows are gone through a few at a
time. Of a wide layer, rows are added up in groups before that, each with a random sign s,

.. math:: z = c \circ \sum_{o} s_o \, r_o \sqrt{T_o},

whose products are the same in expectation. The error of a product falls with the number of groups
times inputs; that of what is made of hundreds of them is far below what their choice among the
examples brings with it (docs/decisions.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engram.engine.passes import Trace
from engram.engine.sites import Site, per_example_gradients
from engram.sensitivity.trajectory.gradient_sketch import SKETCH_SEED, Sketch, sketches

Gradients = tuple[Trace, list[list[Tensor | None]]]

SKETCH_ENTRIES = 2**15  # of a layer's sketch, groups of rows times inputs: smaller ones are whole
BLOCK_BYTES = 4 * 2**20  # of a layer's gradients made at a time, which stay in the cache


@dataclass(frozen=True)
class Products:
    """Of M seen and H held-out examples with R roots each.

    Args:
        seen: of the seen ones with each other, [M, R, M, R].
        cross: of the held-out ones with them, [H, R, M, R].
        energy: the mean over the held-out ones of their squared lengths, all roots added.
    """

    seen: Tensor
    cross: Tensor
    energy: float


class _Sums:
    """The products of one layer after another, added up in double precision.

    Args:
        out: how many rows come first that are held out.
        count: rows in all.
    """

    def __init__(self, out: int, count: int) -> None:
        self.out = out
        self.energy = 0.0
        self.products = torch.zeros(count, count - out, dtype=torch.float64)

    def add(self, parts: Iterable[Tensor]) -> None:
        """Add the products of rows [count, entries], of some entries after others."""
        found: Tensor | None = None
        for rows in parts:
            if found is None:
                found = rows.new_zeros(self.products.shape)
            found.addmm_(rows, rows[self.out :].mT)
            self.energy += float(rows[: self.out].square().sum())
        if found is not None:
            self.products += found.cpu().double()

    def add_separable(self, rows: Tensor, columns: Tensor, time: float) -> None:
        """Add those of gradients r c' whose entries have one training time."""
        found = (rows @ rows[self.out :].mT) * (columns @ columns[self.out :].mT)
        self.products += time * found.cpu().double()
        lengths = rows[: self.out].square().sum(1) * columns[: self.out].square().sum(1)
        self.energy += time * float(lengths.sum())

    def split(self, roots: int) -> Products:
        """All of them, with the roots of an example side by side in the rows."""
        out, most = self.out // roots, self.products.shape[1] // roots
        found = self.products.reshape(out + most, roots, most, roots)
        return Products(found[out:], found[:out], self.energy / out)


def gradient_products(
    batches: Iterable[Gradients],
    out: int,
    count: int,
    times: Mapping[str, Tensor],
    size: int = 1,
) -> Products:
    """Products of the gradients of examples in some batches with R roots each.

    Args:
        batches: of examples; every batch has the same sites.
        out: how many of the examples, the first ones, are held out.
        count: of all examples.
        times: training time by name, of every entry or one number for all of them.
        size: rows of a weight that are added up where its gradients are kept.
    """
    kept, short, roots = _Kept(count, {}), dict[int, _RankOne](), 1
    for trace, gradients in batches:
        if not kept.filled:
            short = _rank_one_sites(trace.sites, times)
            found = {name for one in short.values() for name in one.site.names}
            shapes = {
                n: s for n, s in _shapes(trace.sites).items() if n in times and n not in found
            }
            kept.sketches = sketches(shapes, times, size, trace.outputs)
        for position, one in short.items():
            one.update(trace.sites[position], [given[position] for given in gradients])
        kept.update(trace, gradients)
        roots = len(gradients)
    sums = _Sums(out * roots, count * roots)
    for one in short.values():
        one.add_to(sums, times)
    for rows in kept.rows.values():
        sums.add([rows.flatten(0, 1)])
    return sums.split(roots)


@dataclass
class _RankOne:
    """Rows and columns of a site whose gradients are single products r c'."""

    site: Site
    rows: list[Tensor] = field(default_factory=list)
    columns: list[Tensor] = field(default_factory=list)

    def update(self, site: Site, gradients: Sequence[Tensor | None]) -> None:
        """Add those of a batch, where a gradient arrives."""
        count = site.call.num_examples
        present = [g.reshape(count, -1) for g in gradients if g is not None]
        if present:
            self.rows.append(torch.stack(present, 1).flatten(0, 1))
            columns = site.call.input.reshape(count, -1)
            self.columns.append(columns.repeat_interleave(len(present), 0))

    def add_to(self, sums: _Sums, times: Mapping[str, Tensor]) -> None:
        """Add their products."""
        if not self.rows:
            return
        rows, columns = torch.cat(self.rows), torch.cat(self.columns)
        time = times[self.site.roles["weight"]]
        if time.numel() == 1:
            sums.add_separable(rows, columns, float(time))
        else:
            root = time.reshape(rows.shape[1], columns.shape[1]).sqrt().to(rows)
            sums.add(_sketched(rows, columns, root))
        bias = self.site.roles.get("bias", "")
        if bias in times:
            sums.add([rows * times[bias].flatten().sqrt().to(rows)])


@dataclass
class _Kept:
    """Gradients of the other parameters, [M, R, entries] by name; zeros where none arrives."""

    count: int
    sketches: dict[str, Sketch]
    filled: int = 0
    rows: dict[str, Tensor] = field(default_factory=dict)

    def update(self, trace: Trace, gradients: Sequence[Sequence[Tensor | None]]) -> None:
        """Add those of a batch."""
        for r, one in enumerate(gradients):
            self._add_picked(trace.sites, one, r, len(gradients))
            built = [
                None if site.rule.picked_rows(site.call) is not None else g
                for site, g in zip(trace.sites, one, strict=True)
            ]
            for names in _by_site(trace.sites, set(self.sketches)):
                first = self.filled
                for chunk in per_example_gradients(trace.sites, built, names):
                    lead = len(next(iter(chunk.values())))
                    for name, value in chunk.items():
                        kept = self._of(name, value, len(gradients))[first : first + lead, r]
                        kept += self.sketches[name].of(value.detach())
                    first += lead
        self.filled += len(trace.outputs)

    def _add_picked(
        self, sites: Sequence[Site], gradients: Sequence[Tensor | None], r: int, roots: int
    ) -> None:
        """Of embeddings: an example has a gradient in the rows of its tokens alone."""
        for site, gradient in zip(sites, gradients, strict=True):
            picked, name = site.rule.picked_rows(site.call), site.roles.get("weight", "")
            if picked is None or gradient is None or name not in self.sketches:
                continue
            own = site.rule.picked_gradient(site.call, gradient)
            kept = self._of(name, own, roots)[self.filled : self.filled + len(own), r]
            kept += self.sketches[name].of_rows(picked, own.detach())

    def _of(self, name: str, like: Tensor, roots: int) -> Tensor:
        if name not in self.rows:
            self.rows[name] = like.new_zeros(self.count, roots, self.sketches[name].entries)
        return self.rows[name]


def _by_site(sites: Sequence[Site], names: set[str]) -> Iterator[set[str]]:
    """Names in groups whose gradients are made together, one site after the other."""
    done: set[str] = set()
    for site in sites:
        own = (names & set(site.names)) - done
        done |= own
        if own:
            yield own


def _shapes(sites: Sequence[Site]) -> dict[str, torch.Size]:
    """Of all parameters, by name."""
    return {
        name: site.call.shapes[role]
        for site in sites
        for role, name in site.roles.items()
        if role in site.call.shapes
    }


def _rank_one_sites(sites: Sequence[Site], times: Mapping[str, Tensor]) -> dict[int, _RankOne]:
    """Sites whose gradients are single products of a row and a column, by their places."""
    uses = Counter(name for site in sites for name in site.names)
    found = {}
    for position, site in enumerate(sites):
        rule = site.rule.as_matrix
        alone = all(uses[name] == 1 for name in site.names) and site.roles.get("weight") in times
        if alone and rule is not None and rule.is_rank_one(site.call):
            found[position] = _RankOne(site)
    return found


def _sketched(rows: Tensor, columns: Tensor, root: Tensor) -> Iterator[Tensor]:
    """Gradients r c' times a table of roots [O, I], their rows in groups where there are many.

    Yields:
        [M, I] of one group after the other; a last one of fewer rows where they do not go up.
    """
    outputs, inputs = root.shape
    size = max(1, outputs * inputs // SKETCH_ENTRIES)
    if size > 1:
        generator = torch.Generator().manual_seed(SKETCH_SEED)
        order = torch.randperm(outputs, generator=generator).to(rows.device)
        signs = (2 * torch.randint(2, (outputs,), generator=generator) - 1).to(rows)
        rows, root = (rows * signs)[:, order], root[order]
    whole = outputs // size * size
    width = size * max(1, BLOCK_BYTES // (len(rows) * inputs * rows.element_size()))
    for start in range(0, whole, width):
        own = slice(start, min(start + width, whole))
        yield from _grouped(rows[:, own], columns, root[own], size)
    if whole < outputs:
        yield from _grouped(rows[:, whole:], columns, root[whole:], outputs - whole)


def _grouped(rows: Tensor, columns: Tensor, root: Tensor, size: int) -> Tensor:
    """Those of whole groups of rows, [groups, M, I]."""
    parts = rows.unflatten(1, (-1, size)).transpose(0, 1)  # [groups, M, size]
    return torch.bmm(parts, root.unflatten(0, (-1, size))).mul_(columns)
