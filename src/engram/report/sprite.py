"""Thumbnails of many pictures in one image: a browser decodes it once, and the file stays small."""

from __future__ import annotations

import base64
import io
import math
from typing import Any

import numpy as np
from PIL import Image

from engram.errors import DataError
from engram.report.examples import Array

SIZES = (160, 128, 96, 80, 64, 48, 32)  # pixels of a side, the largest that fits is taken
SPRITE_BYTES = 2_400_000  # of the encoded sprite; with base64 a third more in the file
PIXELS = 16_000_000  # most that the browsers of all phones decode as one image
QUALITY = 78  # of WebP: above, files grow faster than one sees a difference
TRIED = 64  # thumbnails that the size of all is estimated from


def sprite(images: Any, positions: Array) -> dict[str, Any]:
    """Thumbnails of the pictures at some positions, side by side in one image of WebP.

    Args:
        images: pictures by position, see :class:`engram.report.page.Examples`.
        positions: of the pictures, [n].

    Returns:
        The image as base64; ``size``, the side of a thumbnail; ``columns`` of them in a row;
        ``positions`` in their order; ``small``, whether a pixel of theirs is one of the picture.
    """
    pictures = [_reduced(picture_of(images[int(place)])) for place in positions]
    largest = max(max(picture.size) for picture in pictures)
    size = _size(pictures, largest)
    thumbnails = [_thumbnail(picture, size) for picture in pictures]
    columns = math.ceil(math.sqrt(len(thumbnails)))
    return {
        "data": base64.b64encode(_encoded(thumbnails, size, columns)).decode(),
        "size": size,
        "columns": columns,
        "positions": [int(place) for place in positions],
        "small": size >= largest and size < SIZES[0],
    }


def picture_of(value: Any) -> Image.Image:
    """An array, a tensor or a picture of pillow as RGB.

    Example:
        >>> picture_of(np.zeros((3, 5, 8))).size, picture_of(np.ones((5, 8))).getpixel((0, 0))
        ((8, 5), (255, 255, 255))
    """
    if isinstance(value, Image.Image):
        return value.convert("RGB")  # a copy, which may be made smaller
    array = np.asarray(value)
    if array.ndim == 3 and array.shape[0] in (1, 3) and array.shape[2] not in (1, 3, 4):
        array = np.moveaxis(array, 0, 2)
    array = array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)):
        raise DataError(
            "pictures [H, W], [H, W, 3] or [3, H, W]",
            f"an array {list(np.shape(value))}",
            "give images= one such array for each example",
        )
    return Image.fromarray(_in_bytes(array)).convert("RGB")


def _in_bytes(array: Array) -> Array:
    """Bytes as they are; numbers between 0 and 1 times 255, others from their least to largest."""
    if array.dtype == np.uint8:
        return array
    values = array.astype(np.float64)
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    if low < 0 or high > 1:
        values = (values - low) / (high - low if high > low else 1.0)
    bytes_: Array = np.rint(255 * np.where(np.isfinite(values), values, 0)).astype(np.uint8)
    return bytes_


def _reduced(picture: Image.Image) -> Image.Image:
    """No larger than any thumbnail: thousands of photographs do not fit into memory."""
    picture.thumbnail((SIZES[0], SIZES[0]), Image.Resampling.LANCZOS)
    return picture


def _size(pictures: list[Image.Image], largest: int) -> int:
    """The largest size within the limits of pixels and bytes, judged by some of the pictures."""
    some = pictures[:: math.ceil(len(pictures) / TRIED)]
    for size in [largest, *(size for size in SIZES if size < largest)]:
        if len(pictures) * size * size > PIXELS:
            continue
        encoded = _encoded([_thumbnail(p, size) for p in some], size, len(some))
        if len(encoded) * len(pictures) / len(some) <= SPRITE_BYTES:
            return size
    return min(SIZES[-1], largest)


def _thumbnail(picture: Image.Image, size: int) -> Image.Image:
    """The whole picture in a square, in its middle."""
    small = picture.copy()
    small.thumbnail((size, size), Image.Resampling.LANCZOS)
    square = Image.new("RGB", (size, size))
    square.paste(small, ((size - small.width) // 2, (size - small.height) // 2))
    return square


def _encoded(thumbnails: list[Image.Image], size: int, columns: int) -> bytes:
    rows = math.ceil(len(thumbnails) / columns)
    whole = Image.new("RGB", (columns * size, rows * size))
    for number, thumbnail in enumerate(thumbnails):
        whole.paste(thumbnail, (size * (number % columns), size * (number // columns)))
    buffer = io.BytesIO()
    whole.save(buffer, "WEBP", quality=QUALITY, method=4)
    return buffer.getvalue()
