r"""Moves of a convolution with a diagonal precision, from shifted rows instead of patches.

The patches of a k x k kernel hold every pixel k^2 times. Shifting along the width alone holds it
k times; the shifts along the height are then views, and the gradient and the move are sums of k
products each, one for every row of the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from engram.core import equation
from engram.core.parameters import Named
from engram.engine.gradient_accumulator import GradientSink
from engram.engine.rules.convolution import Convolution
from engram.engine.sites import Site
from engram.linalg.block import Block

CHUNK_BYTES = 2 * 2**20  # shifted rows that stay in the cache through all products


def applies(site: Site, blocks: Sequence[Block]) -> bool:
    """A plain two-dimensional convolution, its weight and bias in diagonal blocks."""
    if not isinstance(site.rule, Convolution) or "weight" not in site.roles:
        return False
    call, settings = site.call, site.call.settings
    plain = all(block.entrywise_covariance() is not None for block in blocks)
    own = sorted(name for block in blocks for name in block.names) == sorted(site.names)
    whole = call.multiplicity == 1 and settings["groups"] == 1 and call.input.dim() == 4
    steps = settings["stride"] == (1, 1) and settings["dilation"] == (1, 1)
    return plain and own and whole and steps and not isinstance(settings["padding"], str)


def move(site: Site, gradient: Tensor, blocks: Sequence[Block], total: GradientSink) -> Tensor:
    """How the site's output moves when every example takes its step; sums go to ``total``."""
    call = site.call
    covariance = _covariances(blocks)
    rows, channels = call.shapes["weight"][:2]
    height, width = call.settings["kernel"]
    # [O, C, kh, kw] -> for each row of the kernel [O, C * kw], as the shifted rows are laid out
    per_row = covariance[site.roles["weight"]].reshape(rows, channels, height, width)
    scales = per_row.permute(2, 0, 1, 3).reshape(height, rows, channels * width).unbind(0)
    moved = gradient.new_empty(gradient.shape)
    summed = [gradient.new_zeros(rows, channels * width) for _ in scales if total.wanted]
    per_example = channels * width * (call.input.shape[2] + height) * gradient.shape[3]
    size = max(1, CHUNK_BYTES // (per_example * gradient.element_size()))
    for start in range(0, call.num_examples, size):
        part = slice(start, start + size)
        fields = _shifted(call.input[part], call.settings, gradient.shape[3])
        _add_products(fields, gradient[part], scales, moved[part], summed)
    if total.wanted:
        weight = torch.stack(summed).reshape(height, rows, channels, width).permute(1, 2, 0, 3)
        total.add(site.roles["weight"], weight)
    if "bias" in site.roles:
        own = gradient.sum((2, 3))
        step = equation.mean_deviation(
            lambda g: {"bias": g["bias"] * covariance[site.roles["bias"]].flatten()}, {"bias": own}
        )
        moved += step["bias"][:, :, None, None]
        total.add(site.roles["bias"], own.sum(0))
    return moved


def _covariances(blocks: Sequence[Block]) -> Named:
    found: Named = {}
    for block in blocks:
        found |= block.entrywise_covariance() or {}
    return found


def _shifted(input: Tensor, settings: dict[str, tuple[int, int]], width: int) -> Tensor:
    """Every shift along the width, [B, C * kw, padded height * output width]."""
    above, beside = settings["padding"]
    shifts = settings["kernel"][1]
    if above or beside:
        input = functional.pad(input, (beside, beside, above, above))
    fields = input.unfold(3, width, 1).transpose(2, 3)  # [B, C, kw, padded height, width]
    return fields.reshape(len(input), input.shape[1] * shifts, -1)


def _add_products(
    fields: Tensor, gradient: Tensor, scales: Sequence[Tensor], moved: Tensor, summed: list[Tensor]
) -> None:
    """Write the moves of a few examples in place, and add their gradients to ``summed``."""
    height, width = gradient.shape[2:]
    rows, out = gradient.flatten(2), moved.flatten(2)
    for number, scale in enumerate(scales):
        columns = fields[:, :, number * width : (number + height) * width]
        matrix = _products(rows, columns)
        if summed:
            summed[number] += matrix.sum(0)
        matrix *= scale
        if number == 0:
            torch.bmm(matrix, columns, out=out)
        else:
            out.baddbmm_(matrix, columns)


def _products(rows: Tensor, columns: Tensor) -> Tensor:
    """rows columns' of every example, [B, O, I]: the longer side first, which is quicker."""
    if rows.shape[1] > columns.shape[1]:
        return torch.bmm(rows, columns.mT)
    return torch.bmm(columns, rows.mT).mT
