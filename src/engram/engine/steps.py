r"""From output gradients at the sites to what the precision makes of them.

Sites that share a block of the precision (or a tied weight) form a group and are solved together.
The question here is how each site's output moves, :math:`J S^{-1} J' e`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engram.core import equation
from engram.core.parameters import Named
from engram.engine import rotated, shifted
from engram.engine.gradient_accumulator import GradientSink
from engram.engine.grouping import SiteGroup, group_sites
from engram.engine.rules.base import Call
from engram.engine.rules.convolution import Convolution
from engram.engine.rules.embedding import Embedding
from engram.engine.rules.linear import Linear
from engram.engine.sites import Site, per_example_gradients
from engram.linalg.block import Block, MatrixBlock
from engram.linalg.precision import Precision

# Temporaries of this size stay in the processor's cache and are reused by the allocator; measured
# 2 to 3 times faster on convolutions than one buffer for the whole batch.
CHUNK_BYTES = 6 * 2**20
DENSE_CHUNK_BYTES = 256 * 2**20


class Moves:
    """How each site's output moves when every example takes its step S^-1 grad.

    A move is computed when it is asked for: pushed on at once, it is still in the cache.

    Args:
        sites: as recorded.
        gradients: gradient at each site's output, examples first.
        precision: gives S.
        total: the sum of all gradients is added to it, by name.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        gradients: Sequence[Tensor | None],
        precision: Precision,
        total: GradientSink,
    ) -> None:
        self.sites, self.gradients, self.total = sites, gradients, total
        groups = group_sites(sites, precision)
        self._group_of = {position: group for group in groups for position in group.positions}
        self._waiting: dict[int, Tensor | None] = {}

    def take(self, position: int) -> Tensor | None:
        """The move of one site, once; None for no move."""
        group = self._group_of.get(position)
        if group is None:
            return None
        if position not in self._waiting:
            self._waiting |= zip(group.positions, self._of_group(group), strict=True)
        return self._waiting.pop(position)

    def _of_group(self, group: SiteGroup) -> list[Tensor | None]:
        members = [(self.sites[p], self.gradients[p]) for p in group.positions]
        alive = [(site, g) for site, g in members if g is not None]
        if not alive:
            return [None] * len(members)
        if len(members) == 1:
            single = _single_move(alive[0][0], alive[0][1], group, self.total)
            if single is not None:
                return [single]
        return _long_moves(members, group, self.total)


def _add(total: Named, name: str, value: Tensor) -> None:
    total[name] = total[name] + value if name in total else value


def add_total(
    sites: Sequence[Site],
    gradients: Sequence[Tensor | None],
    precision: Precision,
    total: GradientSink,
) -> None:
    """Add the sum of all examples' gradients to ``total``, by name."""
    names = set(precision.block_of)
    for found in per_example_gradients(sites, gradients, names, CHUNK_BYTES):
        for name, value in found.items():
            total.add(name, value.sum(0))


def chunks(sites: Sequence[Site], blocks: Sequence[Block], copies: int = 1) -> Iterator[slice]:
    """Slices of the batch whose temporaries fit the budget."""
    dense = any(block.couples_all for block in blocks)
    budget = DENSE_CHUNK_BYTES if dense else CHUNK_BYTES
    per_example = copies * sum(site.rule.bytes_per_example(site.call) for site in sites)
    size = max(1, budget // max(per_example, 1))
    num_examples = sites[0].call.num_examples
    for start in range(0, num_examples, size):
        yield slice(start, min(start + size, num_examples))


def rows_of(call: Call, gradient: Tensor, part: slice) -> Tensor:
    return gradient[part.start * call.multiplicity : part.stop * call.multiplicity]


def _narrow(site: Site, gradient: Tensor, part: slice) -> tuple[Call, Tensor]:
    return site.call.narrow(part.start, part.stop), rows_of(site.call, gradient, part)


def _long_moves(
    members: Sequence[tuple[Site, Tensor | None]], group: SiteGroup, total: GradientSink
) -> list[Tensor | None]:
    """Per-example gradients are built, chunk by chunk, solved, and put through the layer again."""
    alive = [(site, g) for site, g in members if g is not None]
    parts: list[list[Tensor]] = [[] for _ in members]
    for part in chunks([site for site, _ in alive], group.blocks):
        calls = [None if g is None else _narrow(site, g, part) for site, g in members]
        gradient = named_gradient([site for site, _ in members], calls, group, part)
        for name, value in gradient.items() if total.wanted else ():
            total.add(name, value.sum(0))
        step = equation.mean_deviation(lambda g: _solve(group.blocks, g), gradient)
        for kept, (site, _), narrowed in zip(parts, members, calls, strict=True):
            call = narrowed[0] if narrowed else site.call.narrow(part.start, part.stop)
            direction = {role: step[name] for role, name in site.roles.items() if name in step}
            kept.append(site.rule.tangent(call, direction))
    return [kept[0] if len(kept) == 1 else torch.cat(kept) for kept in parts]


def named_gradient(
    sites: Sequence[Site],
    calls: Sequence[tuple[Call, Tensor] | None],
    group: SiteGroup,
    part: slice,
) -> Named:
    gradient: Named = {}
    for site, narrowed in zip(sites, calls, strict=True):
        if narrowed is None:
            continue
        for role, value in site.rule.gradient(*narrowed).items():
            _add(gradient, site.roles[role], value)
    reference = next(iter(gradient.values()))
    for block in group.blocks:
        for name, shape in zip(block.layout.names, block.layout.shapes, strict=True):
            if name not in gradient:  # used nowhere in this pass
                gradient[name] = reference.new_zeros(part.stop - part.start, *shape)
    return gradient


def _solve(blocks: Sequence[Block], gradient: Named) -> Named:
    step: Named = {}
    for block in blocks:
        step |= block.solve({name: gradient[name] for name in block.names})
    return step


def _single_move(
    site: Site, gradient: Tensor, group: SiteGroup, total: GradientSink
) -> Tensor | None:
    """Moves of a site by itself that have a shorter way than building every gradient."""
    matrices = group.matrices
    if not matrices:
        return None
    if isinstance(site.rule, Embedding) and len(matrices) == 1 and matrices[0].keeps_rows:
        return _table_move(site, site.rule, gradient, matrices[0], total)
    if is_rank_one(site, matrices):
        return _rank_one_move(site, gradient, matrices, total)
    if shifted.applies(site, matrices):
        return shifted.move(site, gradient, matrices, total)
    if rotated.applies(site, matrices):
        return rotated.move(site, gradient, matrices[0], chunks([site], matrices), total)
    return None


def _rank_one_move(
    site: Site, gradient: Tensor, blocks: Sequence[MatrixBlock], total: GradientSink
) -> Tensor:
    """One position: the gradient r c' is never built."""
    rows, columns = vectors(site, gradient)
    move: Tensor | None = None
    plain_gain: Tensor | None = None
    for block, seen in block_columns(site, columns, blocks):
        if block.keeps_rows:  # gains of weight and bias are added before they meet the rows
            gain = block.rank_one_gain(seen)
            plain_gain = gain if plain_gain is None else plain_gain + gain
            continue
        turned = block.rank_one_move(rows, seen)
        move = turned if move is None else move + turned
    if plain_gain is not None:
        move = rows * plain_gain if move is None else move + rows * plain_gain
    assert move is not None
    if "weight" in site.roles:
        total.add_outer(site.roles["weight"], site.call.shapes["weight"], rows, columns)
    if "bias" in site.roles:
        total.add(site.roles["bias"], rows.sum(0))
    return move.reshape(gradient.shape)


def is_rank_one(site: Site, blocks: Sequence[MatrixBlock]) -> bool:
    """Whether every example's gradient is one product r c', and the blocks cover it."""
    rule = site.rule
    if not blocks or not isinstance(rule, (Linear, Convolution)) or rule.groups(site.call) != 1:
        return False
    if sorted(n for b in blocks for n in b.names) != sorted(site.names):
        return False
    return num_positions(site) == 1


def num_positions(site: Site) -> int:
    """Positions at which the layer acts on one example; 2 stands for several."""
    call = site.call
    if isinstance(site.rule, Linear):
        return call.input.numel() // (call.input.shape[-1] * max(call.num_examples, 1))
    kernel, padding = call.settings["kernel"], call.settings["padding"]
    whole = tuple(call.input.shape[2:]) == kernel and padding in ("valid", (0,) * len(kernel))
    return call.multiplicity if whole else 2


def vectors(site: Site, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """r [B, O] and c [B, I] of a site with one position."""
    call = site.call
    return gradient.reshape(call.num_examples, -1), call.input.reshape(call.num_examples, -1)


def block_columns(
    site: Site, columns: Tensor, blocks: Sequence[MatrixBlock]
) -> Iterator[tuple[MatrixBlock, Tensor]]:
    """The columns that each block sees: inputs, or a constant 1 where it is the bias's alone."""
    one = columns.new_ones(1, 1)
    weight = site.roles.get("weight")
    for block in blocks:
        yield block, columns if block.names[0] == weight else one


def _table_move(
    site: Site, rule: Embedding, gradient: Tensor, block: MatrixBlock, total: GradientSink
) -> Tensor:
    """An embedding: an example's gradient is in the rows of its tokens alone."""
    tokens, picked = rule.tokens(site.call), rule.picked_gradient(site.call, gradient)
    if total.wanted:
        table = picked.new_zeros(site.call.shapes["weight"])
        table.index_add_(0, tokens.flatten(), picked.flatten(0, 1))
        total.add(site.roles["weight"], table)
    size = max(1, CHUNK_BYTES // (picked.element_size() * tokens.shape[1] ** 2))
    summed = torch.cat(
        [
            (some[:, :, None] == some[:, None, :]).to(picked.dtype) @ part
            for some, part in zip(tokens.split(size), picked.split(size), strict=True)
        ]
    )
    return block.solve_rows(tokens, summed).reshape(gradient.shape)
