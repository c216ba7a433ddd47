r"""What the precision makes of the gradients at the sites: perturbations and inner products.

When every example takes its step :math:`S^{-1} \nabla \ell`, the output of each site is perturbed:
that is its part of :math:`J S^{-1} J' e`. For several output vectors u per example the inner
products :math:`u_r' J S^{-1} J' u_s` give the prediction variance, without a Jacobian. Both have
shorter ways where a layer's gradient is a sum of products r c'; elsewhere gradients are built, for
one group of sites and a few examples at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from engram.core import equation
from engram.core.parameters import Named
from engram.engine.gradient_accumulator import GradientSink
from engram.engine.rules.base import Call
from engram.engine.rules.matrix import MatrixRule
from engram.engine.sites import (
    Site,
    SiteGroup,
    chunks,
    group_sites,
    is_rank_one,
    per_example_gradients,
    together,
)
from engram.linalg.block import Block, MatrixBlock
from engram.linalg.precision import Precision


class Perturbations:
    """How each site's output changes when every example takes its step S^-1 grad.

    A perturbation is computed when it is asked for: pushed on at once, it is still in the cache.

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
        """The perturbation of one site's output, once; None for none."""
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
            short = _short_perturbation(alive[0][0], alive[0][1], group.matrices, self.total)
            if short is not None:
                return [short]
        return _by_gradients(members, group, self.total)


def add_total(
    sites: Sequence[Site],
    gradients: Sequence[Tensor | None],
    precision: Precision,
    total: GradientSink,
) -> None:
    """Add the sum of all examples' gradients to ``total``, by name."""
    names = set(precision.block_of)
    left: list[Tensor | None] = list(gradients)
    for place, site in enumerate(sites):
        gradient = gradients[place]
        summed = None if gradient is None else site.rule.summed_gradient(site.call, gradient)
        if summed is not None:
            left[place] = None
            for role, value in summed.items():
                if site.roles[role] in names:
                    total.add(site.roles[role], value)
    for found in per_example_gradients(sites, left, names):
        for name, value in found.items():
            total.add(name, value.sum(0))


def _by_gradients(
    members: Sequence[tuple[Site, Tensor | None]], group: SiteGroup, total: GradientSink
) -> list[Tensor | None]:
    """Per-example gradients are built, chunk by chunk, solved, and put through the layer again."""
    given = [g for _, g in members]
    found = [(t, t.gradient(given)) for t in together([site for site, _ in members])]
    alive = [(t, g) for t, g in found if g is not None]
    sites, arrived = [t.site for t, _ in alive], [g for _, g in alive]
    parts: list[list[Tensor]] = [[] for _ in alive]
    for part in chunks(sites, group.blocks):
        calls = [site.narrow(part, g) for site, g in zip(sites, arrived, strict=True)]
        gradient = _named_gradient(sites, calls, group, part)
        for name, value in gradient.items() if total.wanted else ():
            total.add(name, value.sum(0))
        step = equation.mean_deviation(lambda g: _solve(group.blocks, g), gradient)
        for kept, site, (call, _) in zip(parts, sites, calls, strict=True):
            direction = {role: step[name] for role, name in site.roles.items() if name in step}
            kept.append(site.rule.tangent(call, direction))
    result: list[Tensor | None] = [None] * len(members)
    for (t, _), kept in zip(alive, parts, strict=True):
        whole = kept[0] if len(kept) == 1 else torch.cat(kept)
        for place, own in zip(t.members, t.parts(whole, given), strict=True):
            result[place] = own
    return result


def _named_gradient(
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
            name = site.roles[role]
            gradient[name] = gradient[name] + value if name in gradient else value
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


def _short_perturbation(
    site: Site, gradient: Tensor, blocks: Sequence[MatrixBlock], total: GradientSink
) -> Tensor | None:
    """That of a site by itself, where there is a shorter way than building every gradient."""
    if not blocks:
        return None
    if is_rank_one(site, blocks):
        return _rank_one(site, gradient, blocks, total)
    found = site.rule.perturbation(site.call, gradient, site.roles, blocks, total)
    rule = in_eigenbasis(site, blocks)
    if found is not None or rule is None:
        return found
    return by_positions(site, rule, gradient, blocks[0], chunks([site], blocks), total)


def _rank_one(
    site: Site, gradient: Tensor, blocks: Sequence[MatrixBlock], total: GradientSink
) -> Tensor:
    """One position: the gradient r c' is never built."""
    count = site.call.num_examples
    rows, columns = gradient.reshape(count, -1), site.call.input.reshape(count, -1)
    move: Tensor | None = None
    plain_gain: Tensor | None = None
    for block, seen in _block_columns(site, columns, blocks):
        if block.keeps_rows:  # gains of weight and bias are added before they meet the rows
            gain = block.rank_one_gain(seen)
            plain_gain = gain if plain_gain is None else plain_gain + gain
            continue
        turned = block.rank_one_perturbation(rows, seen)
        move = turned if move is None else move + turned
    if plain_gain is not None:
        move = rows * plain_gain if move is None else move + rows * plain_gain
    assert move is not None
    if "weight" in site.roles:
        total.add_outer(site.roles["weight"], site.call.shapes["weight"], rows, columns)
    if "bias" in site.roles:
        total.add(site.roles["bias"], rows.sum(0))
    return move.reshape(gradient.shape)


def _block_columns(
    site: Site, columns: Tensor, blocks: Sequence[MatrixBlock]
) -> Iterator[tuple[MatrixBlock, Tensor]]:
    """The columns that each block sees: inputs, or a constant 1 where it is the bias's alone."""
    one = columns.new_ones(1, 1)
    weight = site.roles.get("weight")
    for block in blocks:
        yield block, columns if block.names[0] == weight else one


def in_eigenbasis(site: Site, blocks: Sequence[MatrixBlock]) -> MatrixRule | None:
    """The site's rule where one block with rotations covers its matrix; a bias may be fixed."""
    if len(blocks) != 1 or not blocks[0].turns_positions:
        return None
    names = blocks[0].names
    covers = site.roles.get("weight") == names[0] and set(names) <= set(site.names)
    return site.rule.as_matrix if covers else None


def by_positions(
    site: Site,
    rule: MatrixRule,
    gradient: Tensor,
    block: MatrixBlock,
    parts: Iterable[slice],
    total: GradientSink,
) -> Tensor:
    """The perturbation of a matrix at several positions, in the eigenbasis of its factors.

    The layer gives rows and columns at its positions, the block what S^-1 makes of them; the batch
    is gone through in parts that stay in the cache.
    """
    moved = []
    for part in parts:
        call, own = site.narrow(part, gradient)
        rows, columns = rule.rows(call, own)[:, 0], rule.input_columns(call)[:, 0]
        found = block.position_perturbations(rows, columns, total)
        moved.append(rule.in_output_shape(call, found, own.shape))
    return moved[0] if len(moved) == 1 else torch.cat(moved)


def inner_products(
    sites: Sequence[Site], gradients: Sequence[Sequence[Tensor | None]], precision: Precision
) -> Tensor:
    """<J' u_r, S^-1 J' u_s> for R output vectors per example, [B, R, R].

    Args:
        sites: as recorded.
        gradients: for each of the R vectors, the gradient at each site's output, examples first.
        precision: gives S.
    """
    count = len(gradients)
    call = sites[0].call
    result = next(g for g in gradients[0] if g is not None).new_zeros(
        call.num_examples, count, count
    )
    for group in group_sites(sites, precision):
        if all(gradients[0][p] is None for p in group.positions):
            continue
        short = None
        if len(group.positions) == 1:
            short = _short_products(group, sites, gradients)
        if short is not None:
            result += short
        else:
            _products_of_gradients(group, sites, gradients, result)
    return result


def _short_products(
    group: SiteGroup, sites: Sequence[Site], gradients: Sequence[Sequence[Tensor | None]]
) -> Tensor | None:
    position = group.positions[0]
    site = sites[position]
    given = [g[position] for g in gradients]
    present = [g for g in given if g is not None]
    matrices = group.matrices
    if not is_rank_one(site, matrices):
        return _layer_products(group, matrices, site, present)
    rows = torch.stack([g.reshape(site.call.num_examples, -1) for g in present], dim=1)
    columns = site.call.input.reshape(site.call.num_examples, -1)
    result = rows.new_zeros(rows.shape[0], rows.shape[1], rows.shape[1])
    for block, seen in _block_columns(site, columns, matrices):
        result += block.rank_one_products(rows, seen)
    return result


def _layer_products(
    group: SiteGroup, matrices: Sequence[MatrixBlock], site: Site, gradients: Sequence[Tensor]
) -> Tensor | None:
    """Those of a matrix on columns of its input; None where its blocks allow no shorter way."""
    rule = site.rule.as_matrix
    if not matrices or rule is None:
        return None
    # the patches, most of the memory, are there once for all vectors
    parts = chunks([site], matrices, copies=2)
    if in_eigenbasis(site, matrices) is not None:
        return products_by_positions(site, rule, gradients, matrices[0], parts)
    if not all(set(b.names) <= set(site.names) for b in matrices):
        return None
    found = []
    for part in parts:
        stacked = _stacked(site, rule, gradients, part)
        products = [b.inner_products({n: stacked[n] for n in b.names}) for b in group.blocks]
        found.append(torch.stack(products).sum(0))
    return torch.cat(found)


def products_by_positions(
    site: Site,
    rule: MatrixRule,
    gradients: Sequence[Tensor],
    block: MatrixBlock,
    parts: Iterable[slice],
) -> Tensor:
    """Those of a matrix at several positions, in the eigenbasis of its factors."""
    found = []
    for part in parts:
        call = site.call.narrow(part.start, part.stop)
        own = [rule.rows(call, site.rows_of(part, g))[:, 0] for g in gradients]
        columns = rule.input_columns(call)[:, 0]
        found.append(block.position_products(torch.stack(own, dim=1), columns))
    return torch.cat(found)


def _stacked(site: Site, rule: MatrixRule, gradients: Sequence[Tensor], part: slice) -> Named:
    """Gradients of some examples for R output gradients, [b, R, *shape], by one product."""
    call, count = site.call.narrow(part.start, part.stop), len(gradients)
    own = [rule.rows(call, site.rows_of(part, g)) for g in gradients]
    rows = torch.stack(own, dim=1)  # [b, R, groups, T, O]
    found: Named = {}
    if "weight" in call.shapes:
        wide = rows.permute(0, 2, 3, 1, 4).flatten(3)  # [b, groups, T, R * O]
        matrix = wide.mT @ rule.input_columns(call)
        matrix = matrix.unflatten(2, (count, -1)).transpose(1, 2)
        found[site.roles["weight"]] = matrix.reshape(len(rows), count, *call.shapes["weight"])
    if "bias" in call.shapes:
        bias = rows.sum(3).reshape(len(rows), count, *call.shapes["bias"])
        found[site.roles["bias"]] = bias
    return found


def _products_of_gradients(
    group: SiteGroup,
    sites: Sequence[Site],
    gradients: Sequence[Sequence[Tensor | None]],
    result: Tensor,
) -> None:
    """Gradients are built, chunk by chunk; the products are added to ``result``."""
    joined = together([sites[p] for p in group.positions])
    members = [t.site for t in joined]
    arrived = [[t.gradient([g[p] for p in group.positions]) for t in joined] for g in gradients]
    for part in chunks(members, group.blocks, copies=len(gradients)):
        calls = [site.call.narrow(part.start, part.stop) for site in members]
        stacks: list[Named] = []
        for given in arrived:
            narrowed = [
                None if g is None else (call, site.rows_of(part, g))
                for site, call, g in zip(members, calls, given, strict=True)
            ]
            stacks.append(_named_gradient(members, narrowed, group, part))
        for block in group.blocks:
            stacked = {n: torch.stack([s[n] for s in stacks], dim=1) for n in block.names}
            result[part] += block.inner_products(stacked)
