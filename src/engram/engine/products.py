r"""Inner products of per-example gradients in the posterior's covariance.

:math:`u_r' J S^{-1} J' u_s` for several output vectors per example gives the prediction variance
without a Jacobian: gradients are built for one group of sites and a few examples at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engram.core.parameters import Named
from engram.engine import rotated
from engram.engine.grouping import SiteGroup, group_sites
from engram.engine.rules.base import Call
from engram.engine.rules.convolution import Convolution
from engram.engine.rules.linear import Linear, MatrixRule
from engram.engine.sites import Site
from engram.engine.steps import (
    block_columns,
    chunks,
    is_rank_one,
    named_gradient,
    rows_of,
    vectors,
)
from engram.linalg.block import MatrixBlock
from engram.linalg.precision import Precision


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
            _long_products(group, sites, gradients, result)
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
    rows = torch.stack([vectors(site, g)[0] for g in present], dim=1)
    columns = site.call.input.reshape(site.call.num_examples, -1)
    result = rows.new_zeros(rows.shape[0], rows.shape[1], rows.shape[1])
    for block, seen in block_columns(site, columns, matrices):
        result += block.rank_one_products(rows, seen)
    return result


def _layer_products(
    group: SiteGroup, matrices: Sequence[MatrixBlock], site: Site, gradients: Sequence[Tensor]
) -> Tensor | None:
    """Those of a linear layer or a convolution; None where its blocks allow no shorter way."""
    if not matrices or not isinstance(site.rule, (Linear, Convolution)):
        return None
    # the patches, most of the memory, are there once for all vectors
    parts = chunks([site], matrices, copies=2)
    if rotated.applies(site, matrices):
        return rotated.inner_products(site, gradients, matrices[0], parts)
    if not all(set(b.names) <= set(site.names) for b in matrices):
        return None
    return torch.cat([_matrix_products(group, site, gradients, part) for part in parts])


def _matrix_products(
    group: SiteGroup, site: Site, gradients: Sequence[Tensor], part: slice
) -> Tensor:
    """Those of some examples of a layer, all its gradients from one product of matrices."""
    call = site.call.narrow(part.start, part.stop)
    stacked = _stacked(site, call, [rows_of(site.call, g, part) for g in gradients])
    found = [b.inner_products({n: stacked[n] for n in b.names}) for b in group.blocks]
    return torch.stack(found).sum(0)


def _stacked(site: Site, call: Call, gradients: Sequence[Tensor]) -> Named:
    """Gradients of one layer's weight and bias for R output gradients, [b, R, *shape]."""
    rule, shapes, count = site.rule, call.shapes, len(gradients)
    assert isinstance(rule, MatrixRule)
    rows = torch.stack([rule.rows(call, g) for g in gradients], dim=1)  # [b, R, groups, T, O]
    found: Named = {}
    if "weight" in shapes:
        wide = rows.permute(0, 2, 3, 1, 4).flatten(3)  # [b, groups, T, R * O]
        matrix = wide.mT @ rule.columns(call, gradients[0])
        matrix = matrix.unflatten(2, (count, -1)).transpose(1, 2)
        found[site.roles["weight"]] = matrix.reshape(len(rows), count, *shapes["weight"])
    if "bias" in shapes:
        found[site.roles["bias"]] = rows.sum(3).flatten(2)
    return found


def _long_products(
    group: SiteGroup,
    sites: Sequence[Site],
    gradients: Sequence[Sequence[Tensor | None]],
    result: Tensor,
) -> None:
    members = [sites[p] for p in group.positions]
    for part in chunks(members, group.blocks, copies=len(gradients)):
        calls = [site.call.narrow(part.start, part.stop) for site in members]
        stacks: list[Named] = []
        for per_site in gradients:
            given = [per_site[p] for p in group.positions]
            narrowed = [
                None if g is None else (call, rows_of(call, g, part))
                for call, g in zip(calls, given, strict=True)
            ]
            stacks.append(named_gradient(members, narrowed, group, part))
        for block in group.blocks:
            stacked = {n: torch.stack([s[n] for s in stacks], dim=1) for n in block.names}
            result[part] += block.inner_products(stacked)
