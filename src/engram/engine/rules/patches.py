r"""The patches of a convolution, and what can be had of them without building them.

**Sums of outer products.** A patch is made of its rows of pixels. With the input unfolded along its
width alone, U_y for the row y of the image, the block of the sum for rows a and b of the kernel is

.. math:: \sum_{y=a}^{a + H - 1} U_y U_{y + b - a}'

over the H rows of the output: it depends on a only through where the sum begins. So each row of
the image meets the rows after it once, and not each row of each patch every other row: for a
kernel of k rows, k products in place of k².

**Perturbations with a diagonal precision.** The patches of a k x k kernel hold every pixel k²
times. Shifting along the width alone holds it k times; the shifts along the height are then views,
and the gradient and the perturbation are sums of k products each, one for every row of the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engram.core import equation
from engram.engine.rules.base import Call, Roles

# Bytes of unfolded rows made at a time, which stay in the processor's cache through all products
ROWS_BYTES = 8 * 2**20  # of the sums of outer products
SHIFTED_BYTES = 2 * 2**20  # of perturbations, with gradients and perturbations beside them


def per_dimension(value: int | tuple[int, ...] | list[int], dims: int) -> tuple[int, ...]:
    """One number for every dimension of the kernel."""
    return (value,) * dims if isinstance(value, int) else tuple(value) * (dims // len(value))


def borders(options: Mapping[str, Any], kernel: tuple[int, ...]) -> list[tuple[int, int]]:
    """Zeros before and after the input, in every dimension."""
    padding, dilation = options["padding"], options["dilation"]
    if padding == "valid":
        return [(0, 0)] * len(kernel)
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return [(t // 2, t - t // 2) for t in total]
    return [(p, p) for p in padding]


def padded(input: Tensor, kernel: tuple[int, ...], options: Mapping[str, Any]) -> Tensor:
    """The input with the border of zeros that a convolution sees."""
    pads = borders(options, kernel)
    if not any(p for pad in pads for p in pad):
        return input
    return functional.pad(input, [p for pad in reversed(pads) for p in pad])


def patches(input: Tensor, kernel: tuple[int, ...], options: Mapping[str, Any]) -> Tensor:
    """Receptive fields as [N, C, *kernel, *positions], copied from a strided view."""
    view = padded(input, kernel, options)
    for axis, (size, stride, dilation) in enumerate(
        zip(kernel, options["stride"], options["dilation"], strict=True)
    ):
        view = view.unfold(axis + 2, dilation * (size - 1) + 1, stride)[..., ::dilation]
    dims = len(kernel)
    order = [0, 1, *range(2 + dims, 2 + 2 * dims), *range(2, 2 + dims)]
    return view.permute(order).contiguous()


def has_row_products(call: Call) -> bool:
    """Two dimensions, one group, several rows of a kernel that moves a row at a time."""
    options = call.options
    kernel = options["kernel"]
    return (
        len(kernel) == 2
        and kernel[0] > 1
        and options["groups"] == 1
        and options["stride"][0] == options["dilation"][0] == 1
    )


def patch_squares(call: Call) -> tuple[Tensor, Tensor, int]:
    """The sum of outer products [I, I], the sum of the patches [I], and how many there are."""
    kernel = call.options["kernel"]
    image = padded(call.input, kernel, call.options)
    height = image.shape[2] - kernel[0] + 1
    products: Tensor | None = None
    sums: Tensor | None = None
    num_patches = 0
    for part in image.split(_chunk(image, kernel)):
        rows = _unfolded_rows(part, call)
        found, total = _row_products(rows, kernel[0]), rows[: image.shape[2]].sum(2)
        products = found if products is None else products + found
        sums = total if sums is None else sums + total
        num_patches += height * rows.shape[2]
    assert products is not None
    assert sums is not None
    square = _assembled(products, kernel[0], height, image.shape[1])
    starts = torch.stack([sums[a : a + height].sum(0) for a in range(kernel[0])])
    return square, _by_channel(starts, image.shape[1]), num_patches


def _chunk(image: Tensor, kernel: tuple[int, int]) -> int:
    """Examples whose unfolded rows stay in the processor's cache."""
    per_example = image[0].numel() * kernel[1] * image.element_size()
    return max(1, ROWS_BYTES // max(per_example, 1))


def _unfolded_rows(image: Tensor, call: Call) -> Tensor:
    """U, [rows, C * kernel width, B * positions in a row]; what lies below the image is zero."""
    width, stride, dilation = (call.options[k][1] for k in ("kernel", "stride", "dilation"))
    view = image.unfold(3, dilation * (width - 1) + 1, stride)[..., ::dilation]
    view = view.permute(2, 1, 4, 0, 3)
    height, below = view.shape[0], call.options["kernel"][0] - 1
    rows = image.new_empty(height + below, *view.shape[1:])
    rows[:height] = view
    rows[height:] = 0
    return rows.flatten(1, 2).flatten(2)


def _row_products(rows: Tensor, kernel_height: int) -> Tensor:
    """U_y times U_y to U_(y + k - 1), [rows of the image, W, k * W]."""
    below, width, inner = rows.shape
    count = below - kernel_height + 1
    windows = rows.as_strided((count, kernel_height * width, inner), (width * inner, inner, 1))
    return torch.bmm(rows[:count], windows.mT)


def _assembled(products: Tensor, kernel_height: int, height: int, channels: int) -> Tensor:
    """[I, I] with I = (channel, kernel row, kernel column), as patches are laid out."""
    width = products.shape[1]
    blocks = products.new_zeros(kernel_height, width, kernel_height, width)
    for first in range(kernel_height):
        summed = products[first : first + height].sum(0)
        for second in range(first, kernel_height):
            lag = second - first
            block = summed[:, lag * width : (lag + 1) * width]
            blocks[first, :, second] = block
            blocks[second, :, first] = block.mT
    split = blocks.unflatten(3, (channels, -1)).unflatten(1, (channels, -1))
    size = kernel_height * width
    return split.permute(1, 0, 2, 4, 3, 5).reshape(size, size)


def _by_channel(by_row: Tensor, channels: int) -> Tensor:
    """[k, C * kernel width] -> [C * k * kernel width]."""
    return by_row.unflatten(1, (channels, -1)).transpose(0, 1).flatten()


def has_shifted_rows(call: Call) -> bool:
    """A plain two-dimensional convolution that moves a pixel at a time."""
    options = call.options
    whole = call.multiplicity == 1 and options["groups"] == 1 and call.input.dim() == 4
    steps = options["stride"] == (1, 1) and options["dilation"] == (1, 1)
    return whole and steps and not isinstance(options["padding"], str)


def shifted_perturbation(
    call: Call, gradient: Tensor, covariance: Roles, wanted: bool
) -> tuple[Tensor, Roles]:
    """How the output changes when every example takes its step, and the sum of all gradients.

    Args:
        gradient: at the output, [B, O, H, W].
        covariance: S^-1 of weight and bias, entry by entry.
        wanted: whether products that serve the sum alone are to be made.
    """
    rows, channels = call.shapes["weight"][:2]
    height, width = call.options["kernel"]
    # [O, C, kh, kw] -> for each row of the kernel [O, C * kw], as the shifted rows are laid out
    per_row = covariance["weight"].reshape(rows, channels, height, width)
    scales = per_row.permute(2, 0, 1, 3).reshape(height, rows, channels * width).unbind(0)
    moved = gradient.new_empty(gradient.shape)
    summed = [gradient.new_zeros(rows, channels * width) for _ in scales if wanted]
    per_example = channels * width * (call.input.shape[2] + height) * gradient.shape[3]
    size = max(1, SHIFTED_BYTES // (per_example * gradient.element_size()))
    for start in range(0, call.num_examples, size):
        part = slice(start, start + size)
        fields = _shifted(call.input[part], call.options, gradient.shape[3])
        _add_products(fields, gradient[part], scales, moved[part], summed)
    total: Roles = {}
    if wanted:
        weight = torch.stack(summed).reshape(height, rows, channels, width).permute(1, 2, 0, 3)
        total["weight"] = weight
    if "bias" in covariance:
        own = gradient.sum((2, 3))
        step = equation.mean_deviation(
            lambda g: {"bias": g["bias"] * covariance["bias"].flatten()}, {"bias": own}
        )
        moved += step["bias"][:, :, None, None]
        total["bias"] = own.sum(0)
    return moved, total


def _shifted(input: Tensor, options: dict[str, tuple[int, int]], width: int) -> Tensor:
    """Every shift along the width, [B, C * kw, padded height * output width]."""
    above, beside = options["padding"]
    shifts = options["kernel"][1]
    if above or beside:
        input = functional.pad(input, (beside, beside, above, above))
    fields = input.unfold(3, width, 1).transpose(2, 3)  # [B, C, kw, padded height, width]
    return fields.reshape(len(input), input.shape[1] * shifts, -1)


def _add_products(
    fields: Tensor, gradient: Tensor, scales: Sequence[Tensor], moved: Tensor, summed: list[Tensor]
) -> None:
    """Write the perturbations of a few examples in place, and add their gradients to ``summed``."""
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
