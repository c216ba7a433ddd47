"""Moves of a weight matrix at several positions, in the eigenbasis of its Kronecker factors.

The layer gives rows and columns at its positions, the block what S^-1 makes of them, and here the
batch is gone through in parts that stay in the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from engram.engine.gradient_accumulator import GradientSink
from engram.engine.rules.base import Call
from engram.engine.rules.convolution import Convolution
from engram.engine.rules.linear import Linear
from engram.engine.sites import Site
from engram.linalg.block import MatrixBlock


def applies(site: Site, blocks: Sequence[MatrixBlock]) -> bool:
    """One block with rotations, over the weight, or weight and bias, of one matrix layer."""
    if len(blocks) != 1 or not isinstance(site.rule, (Linear, Convolution)):
        return False
    return blocks[0].turns_positions and set(blocks[0].names) == set(site.names)


def move(
    site: Site, gradient: Tensor, block: MatrixBlock, parts: Iterable[slice], total: GradientSink
) -> Tensor:
    """How the site's output moves when every example takes its step; sums go to ``total``."""
    moved = []
    m = site.call.multiplicity
    for part in parts:
        call, own = (
            site.call.narrow(part.start, part.stop),
            gradient[part.start * m : part.stop * m],
        )
        rows, columns = _rows(site, call, own), _columns(site, call, own)
        moved.append(_placed(site, call, block.position_moves(rows, columns, total), own))
    return moved[0] if len(moved) == 1 else torch.cat(moved)


def inner_products(
    site: Site, gradients: Sequence[Tensor], block: MatrixBlock, parts: Iterable[slice]
) -> Tensor:
    """<J' u_r, S^-1 J' u_s>, [B, R, R]."""
    found = []
    m = site.call.multiplicity
    for part in parts:
        call = site.call.narrow(part.start, part.stop)
        own = [g[part.start * m : part.stop * m] for g in gradients]
        rows = torch.stack([_rows(site, call, g) for g in own], dim=1)
        found.append(block.position_products(rows, _columns(site, call, own[0])))
    return torch.cat(found)


def _rows(site: Site, call: Call, gradient: Tensor) -> Tensor:
    """[b, T, O]; there is one group."""
    assert isinstance(site.rule, (Linear, Convolution))
    return site.rule.rows(call, gradient)[:, 0]


def _columns(site: Site, call: Call, gradient: Tensor) -> Tensor:
    """[b, T, I]."""
    assert isinstance(site.rule, (Linear, Convolution))
    return site.rule.columns(call, gradient)[:, 0]


def _placed(site: Site, call: Call, moved: Tensor, gradient: Tensor) -> Tensor:
    """[b, T, O] in the layout of the output, examples first."""
    if isinstance(site.rule, Linear):
        return moved.reshape(gradient.shape)
    return moved.unflatten(1, (call.multiplicity, -1)).mT.reshape(gradient.shape)
