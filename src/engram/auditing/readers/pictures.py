"""Images: a folder with a folder for each class, or files that a table names."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engram.auditing.columns import Wanted, checked, class_targets
from engram.auditing.examples import Examples, Pictures
from engram.core.progress import progress_over
from engram.errors import DataError, brief

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
SIDE = 64  # pixels that images are kept at, where they are larger or of several sizes
SHOWN_FROM = 5000  # images from which reading them has a bar


def read_picture_folder(path: Path, wanted: Wanted) -> Examples:
    """A folder of folders, each named by its class."""
    files = sorted(_files(path))
    if not files:
        raise DataError(
            f"a folder for each class in {path}, with images in it",
            "none",
            f"put images into {path.name}/CLASS/, as {', '.join(ENDINGS[:3])}",
        )
    if wanted.sample is not None and wanted.sample < len(files):
        generator = np.random.default_rng(wanted.seed)
        chosen = np.sort(generator.choice(len(files), wanted.sample, replace=False))
        files = [files[i] for i in chosen]
    names = [str(file.relative_to(path)) for file in files]
    pictures, kept, skipped = read_pictures(names, path)
    task, targets = class_targets([files[i].relative_to(path).parts[0] for i in kept])
    ids = tuple(names[i] for i in kept)
    return checked(Examples(pictures, task, targets, ids, None, skipped, (), path.name))


def _files(path: Path) -> Iterator[Path]:
    for folder in path.iterdir():
        if folder.is_dir() and not folder.name.startswith("."):
            for file in folder.rglob("*"):
                if file.suffix.lower() in ENDINGS and not file.name.startswith("."):
                    yield file


def read_pictures(
    sources: Sequence[Any], root: Path | None
) -> tuple[Pictures, np.ndarray, tuple[str, ...]]:
    """Images of files, all of one size; those that cannot be read are left out.

    Args:
        sources: their paths, or the bytes of their files.
        root: folder that paths start from.

    Returns:
        The images, the positions of those that could be read, and the others with the reason.
    """
    found: list[np.ndarray] = []
    kept, skipped = [], []
    shown = len(sources) >= SHOWN_FROM
    for number, source in enumerate(progress_over(sources, "reading images", shown)):
        try:
            found.append(_pixels(source, root))
            kept.append(number)
        except Exception as error:  # whatever a damaged file makes of the reader
            name = f"image {number}" if isinstance(source, bytes) else str(source)
            skipped.append(f"{name}: {brief(error)}")
    if not found:
        raise DataError("images that can be read", f"none; {skipped[0]}", "check the files")
    names = tuple(f"image {i}" if isinstance(sources[i], bytes) else str(sources[i]) for i in kept)
    return Pictures(_stacked(found), names), np.array(kept), tuple(skipped)


def _pixels(source: Any, root: Path | None) -> np.ndarray:
    """[H, W, 3], or [H, W, 1] where it is grey, no larger than it is looked at."""
    from PIL import Image

    path = io.BytesIO(source) if isinstance(source, bytes) else (root or Path()) / str(source)
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        with Image.open(path) as image:
            grey = image.mode in ("1", "L", "I", "I;16", "F", "LA")
            image.draft("L" if grey else "RGB", (SIDE, SIDE))
            plain = image.convert("L" if grey else "RGB")
            if max(plain.size) > SIDE:
                plain = plain.resize(_within(plain.size), Image.Resampling.BOX)
            array = np.asarray(plain, dtype=np.uint8)
    return array[..., None] if array.ndim == 2 else array


def _within(size: tuple[int, int]) -> tuple[int, int]:
    scale = SIDE / max(size)
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def _stacked(images: list[np.ndarray]) -> np.ndarray:
    """All at one size, the most common one; colour where one of them has it."""
    from PIL import Image

    colour = any(image.shape[2] == 3 for image in images)
    sizes = [image.shape[:2] for image in images]
    height, width = max(set(sizes), key=sizes.count)
    found = np.empty((len(images), height, width, 3 if colour else 1), np.uint8)
    for number, image in enumerate(images):
        if image.shape[:2] != (height, width):
            plain = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)
            resized = np.asarray(plain.resize((width, height), Image.Resampling.BILINEAR))
            image = resized if resized.ndim == 3 else resized[..., None]
        found[number] = image
    return found
