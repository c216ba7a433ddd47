"""Images: a small convolutional net with batch normalisation, trained on shifts and flips."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engram.auditing.examples import Examples, Inputs, Pictures
from engram.auditing.stock.base import Estimate, Recipe, Stock

WIDTHS = (16, 32, 64)  # channels of the stages
SMALLEST_DEEP = 16  # side from which all stages are there; smaller images have nothing left to pool
DROPOUT = 0.25  # before the head: without it few images are learned by heart
LARGEST_SIDE = 32  # pixels; larger images are made smaller: the net looks at no more
# By the head's matrix alone: a pass in place of five, and nearer to the truth, as the walk along
# the training takes every view of an image for another image (docs/decisions.md)
HEAD = Estimate("last_layer", "linear", most_outputs=None)
SHIFT = 2  # pixels by which a view may be moved, at this side; smaller images by less
SMALLEST_SHIFTED = 12  # side from which images are shifted at all


def small_cnn(examples: Examples) -> Stock:
    """Stages of convolution, batch normalisation and pooling, and a linear head."""
    assert isinstance(examples.inputs, Pictures)
    encoder = PictureEncoder(examples.inputs)
    inputs = encoder(examples.inputs)
    channels, side = inputs.shape[1], min(inputs.shape[2:])
    layers: list[nn.Module] = []
    before = channels
    widths = WIDTHS if side >= SMALLEST_DEEP else WIDTHS[:-1]
    for width in widths:
        layers += [nn.Conv2d(before, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)]
        layers += [nn.ReLU()]
        if side >= 4:
            layers += [nn.MaxPool2d(2)]
            side //= 2
        before = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(DROPOUT)]
    layers += [nn.Linear(before, examples.task.num_outputs)]
    smaller = len(examples) < 4000
    augment = partial(shifted_and_flipped, flips=channels == 3)
    recipe = Recipe(
        30 if smaller else 12, 32 if smaller else 64, 3e-3, 1e-2, augment=augment, estimate=HEAD
    )
    name = f"CNN with BatchNorm, {'-'.join(map(str, widths))} channels"
    return Stock(nn.Sequential(*layers), encoder, inputs, recipe, name)


class PictureEncoder:
    """Pixels between 0 and 1 at a moderate size, standardised by the training data's channels.

    Args:
        pictures: the training data's.
    """

    def __init__(self, pictures: Pictures) -> None:
        height, width = pictures.pixels.shape[1:3]
        scale = min(1.0, LARGEST_SIDE / max(height, width))
        self.size = (max(1, round(height * scale)), max(1, round(width * scale)))
        self.mean, self.scale = torch.zeros(1), torch.ones(1)
        plain = self(pictures)
        self.mean = plain.mean((0, 2, 3), keepdim=True)
        self.scale = plain.std((0, 2, 3), keepdim=True).clamp(min=1e-3)

    def __call__(self, inputs: Inputs) -> Tensor:
        """[N, C, H, W]."""
        assert isinstance(inputs, Pictures)
        pixels = torch.from_numpy(inputs.pixels.copy()).permute(0, 3, 1, 2)
        parts = [self._sized(part.float() / 255) for part in pixels.split(1024)]
        return (torch.cat(parts) - self.mean) / self.scale

    def _sized(self, images: Tensor) -> Tensor:
        if tuple(images.shape[2:]) == self.size:
            return images
        return F.interpolate(images, self.size, mode="bilinear", antialias=True)


def shifted_and_flipped(images: Tensor, flips: bool) -> Tensor:
    """A random view of each image of a batch, [B, C, H, W].

    Each is moved by up to two pixels (fewer for small images), the border repeated. Colour
    photographs are also mirrored; grey images, which are often characters or scans, are not.
    """
    side = min(images.shape[2:])
    reach = round(SHIFT * side / LARGEST_SIDE) if side >= SMALLEST_SHIFTED else 0
    if reach:
        padded = F.pad(images, (reach,) * 4, mode="replicate")
        across, down = torch.randint(0, 2 * reach + 1, (2, len(images)))
        rows = down[:, None] + torch.arange(images.shape[2])
        columns = across[:, None] + torch.arange(images.shape[3])
        number = torch.arange(len(images))[:, None, None]
        channels_last = padded.permute(0, 2, 3, 1)
        images = channels_last[number, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2)
    if flips:
        mirrored = torch.rand(len(images)) < 0.5
        images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
    return images
