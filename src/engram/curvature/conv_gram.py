r"""The sum of outer products of a convolution's patches, without the patches.

A patch is made of its rows of pixels. With the input unfolded along its width alone, U_y for the
row y of the image, the block of the sum for rows a and b of the kernel is

.. math:: \sum_{y=a}^{a + H - 1} U_y U_{y + b - a}'

over the H rows of the output: it depends on a only through where the sum begins. So each row of
the image meets the rows after it once, and not each row of each patch every other row: for a
kernel of k rows, k products in place of k².
"""

from __future__ import annotations

import torch
from torch import Tensor

from engram.engine.rules.base import Call
from engram.engine.rules.convolution import Convolution, padded

CHUNK_BYTES = 8 * 2**20


def applies(rule: object, call: Call) -> bool:
    """Two dimensions, one group, several rows of a kernel that moves a row at a time."""
    if not isinstance(rule, Convolution):
        return False
    settings = call.settings
    kernel = settings["kernel"]
    return (
        len(kernel) == 2
        and kernel[0] > 1
        and settings["groups"] == 1
        and settings["stride"][0] == settings["dilation"][0] == 1
    )


def patch_squares(call: Call) -> tuple[Tensor, Tensor, int]:
    """The sum of outer products [I, I], the sum of the patches [I], and how many there are."""
    kernel = call.settings["kernel"]
    image = padded(call.input, kernel, call.settings)
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
    return max(1, CHUNK_BYTES // max(per_example, 1))


def _unfolded_rows(image: Tensor, call: Call) -> Tensor:
    """U, [rows, C * kernel width, B * positions in a row]; what lies below the image is zero."""
    width, stride, dilation = (call.settings[k][1] for k in ("kernel", "stride", "dilation"))
    view = image.unfold(3, dilation * (width - 1) + 1, stride)[..., ::dilation]
    view = view.permute(2, 1, 4, 0, 3)
    height, below = view.shape[0], call.settings["kernel"][0] - 1
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
