"""Small grey images in the terminal."""

from __future__ import annotations

from rich.color import Color
from rich.style import Style
from rich.text import Text
from torch import Tensor
from torch.nn import functional

SHADES = " .:-=+*#%@"


def image(pixels: Tensor, colour: bool) -> Text:
    """An image [H, W] between 0 and 1 as text, H lines of 2 W characters.

    Args:
        pixels: the image.
        colour: whether the terminal has colours: then the image is enlarged, and one character
            shows two pixels, one above the other; otherwise two characters show one pixel.
    """
    if colour:
        enlarged = functional.interpolate(pixels[None, None], scale_factor=2, mode="bilinear")
        return _half_blocks(enlarged[0, 0])
    return _shades(pixels)


def _shades(pixels: Tensor) -> Text:
    deepest = len(SHADES) - 1
    lines = ("".join(2 * SHADES[round(v * deepest)] for v in row) for row in pixels.tolist())
    return Text("\n".join(lines))


def _half_blocks(pixels: Tensor) -> Text:
    text = Text()
    for upper, lower in zip(pixels[::2].tolist(), pixels[1::2].tolist(), strict=True):
        for above, below in zip(upper, lower, strict=True):
            text.append("▀", Style(color=_grey(above), bgcolor=_grey(below)))
        text.append("\n")
    text.rstrip()
    return text


def _grey(value: float) -> Color:
    level = round(255 * value)
    return Color.from_rgb(level, level, level)
