"""Products of patches without patches, against the patches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engram.engine.rules.base import Call
from engram.engine.rules.convolution import Convolution
from engram.engine.rules.patches import has_row_products, patch_squares


def call_of(layer: nn.Conv2d, image: torch.Tensor) -> Call:
    options = {
        "kernel": layer.kernel_size,
        "stride": layer.stride,
        "padding": layer.padding,
        "dilation": layer.dilation,
        "groups": layer.groups,
    }
    return Call(image, {"weight": layer.weight.shape}, options)


LAYERS = {
    "plain": nn.Conv2d(3, 4, 3),
    "padded": nn.Conv2d(2, 4, 5, padding=2),
    "same": nn.Conv2d(2, 4, (2, 3), padding="same"),
    "uneven": nn.Conv2d(3, 4, (4, 2), padding=(1, 0)),
    "one column": nn.Conv2d(3, 4, (3, 1)),
    "strided along the width": nn.Conv2d(2, 4, (3, 3), stride=(1, 2), dilation=(1, 2)),
    "as high as the image": nn.Conv2d(2, 4, (9, 2)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_equal_to_the_patches(name: str) -> None:
    layer = LAYERS[name]
    torch.manual_seed(0)
    image = torch.randn(5, layer.in_channels, 9, 8, dtype=torch.float64)
    call = call_of(layer, image)
    assert has_row_products(call)
    patches = Convolution().input_columns(call)[:, 0].flatten(0, 1)
    square, total, count = patch_squares(call)
    assert count == len(patches)
    torch.testing.assert_close(square, patches.mT @ patches, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(total, patches.sum(0), rtol=1e-12, atol=1e-12)


def test_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, image = LAYERS["padded"], torch.randn(7, 2, 9, 8, dtype=torch.float64)
    whole = patch_squares(call_of(layer, image))
    monkeypatch.setattr("engram.engine.rules.patches.ROWS_BYTES", 20_000)
    for part, expected in zip(patch_squares(call_of(layer, image)), whole, strict=True):
        torch.testing.assert_close(torch.as_tensor(part), torch.as_tensor(expected))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(4, 4, 3, stride=2),
        nn.Conv2d(4, 4, 3, dilation=2),
        nn.Conv2d(4, 4, 1),
    ],
)
def test_where_it_does_not_apply(layer: nn.Conv2d) -> None:
    assert not has_row_products(call_of(layer, torch.randn(2, 4, 9, 9)))
