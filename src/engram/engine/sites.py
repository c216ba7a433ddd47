"""A site: one place where parameters meet the data, as it was recorded.

What a pass needs to know of a layer is here: its rule, the input it saw, which parameters it holds
and where its output lies in the graph. All that is computed from per-example gradients goes from
sites and the gradients at their outputs. Sites that share a block of the precision, or a tied
weight, form a group: they are solved together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from engram.core.parameters import Named
from engram.engine.rules.base import CHUNK_BYTES, Call, Rule
from engram.errors import EngineError
from engram.linalg.block import Block, MatrixBlock
from engram.linalg.precision import Precision

# Bytes of gradients held at a time where a matrix couples all their entries: enough for one
# efficient product of matrices, which counts more there than the cache
DENSE_CHUNK_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Site:
    """One call of an operation with parameters of the model.

    Args:
        rule: how the operation differentiates by its parameters.
        call: its input, examples first, and its options.
        roles: what each parameter is to the rule ("weight"), and its name in the model.
        edge: the output's place in the graph, where gradients are asked for; None without one.
        dim: which dimension of the output counts examples.
        source, version: the input itself, to notice when it is changed in place later.
    """

    rule: Rule
    call: Call
    roles: dict[str, str]
    edge: GradientEdge | None
    dim: int
    source: Tensor
    version: int

    @property
    def names(self) -> tuple[str, ...]:
        """Parameters of the model at this site."""
        return tuple(self.roles.values())

    def without_graph(self) -> Site:
        """What was recorded, to be kept: nothing of the graph, nor what the rule has made of it."""
        call = replace(self.call, kept={})
        return replace(self, call=call, edge=None, source=call.input, version=call.input._version)

    def arrange(self, tensor: Tensor) -> Tensor:
        """From the layout of the operation's output to examples first."""
        return tensor.movedim(self.dim, 0)

    def restore(self, tensor: Tensor) -> Tensor:
        """Back to the layout of the operation's output."""
        return tensor.movedim(0, self.dim)

    def narrow(self, part: slice, gradient: Tensor) -> tuple[Call, Tensor]:
        """The call of some examples, and their rows of a gradient at the output."""
        return self.call.narrow(part.start, part.stop), self.rows_of(part, gradient)

    def rows_of(self, part: slice, gradient: Tensor) -> Tensor:
        """Rows of a gradient at the output that belong to some examples."""
        m = self.call.multiplicity
        return gradient[part.start * m : part.stop * m]

    def check_fresh(self) -> None:
        """The captured input must still be what the operation saw."""
        if self.source._version != self.version:
            raise EngineError(
                "layer inputs that stay as they are until the backward pass",
                f"an input of {', '.join(self.names)} that was changed in place afterwards",
                "write that operation out of place (x = x + y instead of x += y)",
            )


@dataclass(frozen=True)
class Together:
    """Sites of the same parameters as one, as those of a recurrent layer at all its times.

    One product of matrices then does what would be a sum of one for each of them.

    Args:
        site: all of them; its edge and source are those of the first.
        members: their places in the list that they were found in.
    """

    site: Site
    members: tuple[int, ...]

    def gradient(self, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """Of all sites of the list, examples first: at this one; None where none arrives."""
        own = [gradients[place] for place in self.members]
        if len(own) == 1:
            return own[0]
        like = next((g for g in own if g is not None), None)
        if like is None:
            return None
        count = len(like)
        filled = [torch.zeros_like(like) if g is None else g for g in own]
        return torch.cat([g.reshape(count, -1, g.shape[-1]) for g in filled], dim=1)

    def parts(self, output: Tensor, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """A change of its output as that of each member, in the shape of its gradient."""
        if len(self.members) == 1:
            return [output]
        own = [gradients[place] for place in self.members]
        each = output.split(output.shape[1] // len(own), dim=1)
        return [
            None if g is None else part.reshape(len(part), *g.shape[1:])
            for part, g in zip(each, own, strict=True)
        ]


def together(sites: Sequence[Site]) -> list[Together]:
    """The sites, those of the same parameters as one where their rule can."""
    places: dict[tuple[int, tuple[tuple[str, str], ...], int], list[int]] = {}
    for place, site in enumerate(sites):
        key = (id(site.rule), tuple(site.roles.items()), site.call.input[:1].numel())
        places.setdefault(key, []).append(place)
    found = []
    for members in places.values():
        first = sites[members[0]]
        several = [sites[place].call for place in members]
        call = first.rule.together(several) if len(members) > 1 else None
        if call is None:
            found += [Together(sites[place], (place,)) for place in members]
        else:
            found.append(Together(replace(first, call=call), tuple(members)))
    return found


def per_example_gradients(
    sites: Sequence[Site],
    gradients: Sequence[Tensor | None],
    names: set[str],
    chunk_bytes: int = CHUNK_BYTES,
) -> Iterator[Named]:
    """Gradients of these parameters for a few examples at a time, [b, *shape], all sites added."""
    own = [place for place, site in enumerate(sites) if names & set(site.names)]
    arrived = [place for place in own if gradients[place] is not None]
    if not arrived:
        return
    given = [gradients[place] for place in arrived]
    found_at = [(t.site, t.gradient(given)) for t in together([sites[p] for p in arrived])]
    alive = [(site, g) for site, g in found_at if g is not None]
    total = sum(site.rule.bytes_per_example(site.call) for site, _ in alive)
    size = max(1, chunk_bytes // max(total, 1))
    count = alive[0][0].call.num_examples
    for start in range(0, count, size):
        stop = min(start + size, count)
        result: Named = {}
        for site, gradient in alive:
            m = site.call.multiplicity
            # the whole call keeps what it has made of its input for the next gradient
            call = site.call if stop - start == count else site.call.narrow(start, stop)
            found = site.rule.gradient(call, gradient[start * m : stop * m])
            for role, value in found.items():
                name = site.roles[role]
                if name in names:
                    result[name] = result[name] + value if name in result else value
        yield result


@dataclass(frozen=True)
class SiteGroup:
    """Sites solved together, by their positions, and the blocks that cover them."""

    positions: tuple[int, ...]
    blocks: tuple[Block, ...]

    @property
    def matrices(self) -> list[MatrixBlock]:
        """The blocks where each of them is over one weight matrix; none where one is not."""
        return matrix_blocks(self.blocks)


def matrix_blocks(blocks: Sequence[Block]) -> list[MatrixBlock]:
    """All of them where each is over one weight matrix; none where one is not."""
    found = [block.as_matrix for block in blocks]
    known = [block for block in found if block is not None]
    return known if len(known) == len(found) else []


def group_sites(sites: Sequence[Site], precision: Precision) -> list[SiteGroup]:
    """Sites joined wherever they share a block or a parameter; sites with no block are left out."""
    groups: list[tuple[set[int], set[str], list[Block]]] = []
    for position, site in enumerate(sites):
        blocks = _blocks_of(site, precision)
        if not blocks:
            continue
        names = {name for block in blocks for name in block.names} | set(site.names)
        positions = {position}
        for other in [g for g in groups if g[1] & names]:
            groups.remove(other)
            positions |= other[0]
            names |= other[1]
            blocks += [b for b in other[2] if all(b is not mine for mine in blocks)]
        groups.append((positions, names, blocks))
    return [SiteGroup(tuple(sorted(p)), tuple(b)) for p, _, b in groups]


def _blocks_of(site: Site, precision: Precision) -> list[Block]:
    found: list[Block] = []
    for name in site.names:
        block = precision.block_of.get(name)
        if block is not None and all(block is not b for b in found):
            found.append(block)
    return found


def is_rank_one(site: Site, blocks: Sequence[MatrixBlock]) -> bool:
    """Whether every example's gradient is one product r c', of which the blocks cover a part."""
    rule = site.rule.as_matrix
    if not blocks or rule is None or not rule.is_rank_one(site.call):
        return False
    return {name for block in blocks for name in block.names} <= set(site.names)


def chunks(sites: Sequence[Site], blocks: Sequence[Block], copies: int = 1) -> Iterator[slice]:
    """Slices of the batch whose temporaries fit the budget."""
    dense = any(block.couples_all for block in blocks)
    budget = DENSE_CHUNK_BYTES if dense else CHUNK_BYTES
    per_example = copies * sum(site.rule.bytes_per_example(site.call) for site in sites)
    size = max(1, budget // max(per_example, 1))
    num_examples = sites[0].call.num_examples
    for start in range(0, num_examples, size):
        yield slice(start, min(start + size, num_examples))
