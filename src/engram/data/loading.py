"""Find a data set in the user's folders and the system's, or fetch it; the same bytes always."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engram.core.arguments import path_of
from engram.core.progress import announce
from engram.data.arrays import Arrays, Images
from engram.data.catalogue import Entry, Part, known
from engram.data.checks import check_arrays, check_digests, fetch_again
from engram.data.fetching import fetch, where_to_put
from engram.data.layouts import LAYOUTS, Layout, npz
from engram.errors import DataError, brief

VARIABLE = "ENGRAM_DATA"  # of the environment: the folder of the user's data sets


@dataclass(frozen=True)
class Place:
    """Where a data set is, and in what form."""

    path: Path
    layout: Layout


def load(
    name: str,
    folder: str | Path | None = None,
    *,
    download: bool = True,
    mirror: str | None = None,
    progress: bool = True,
) -> Images:
    """MNIST, Fashion-MNIST, CIFAR-10 or USPS, from where it is, or else from public sources.

    It is looked for in ``folder``, or else in the folder that ``ENGRAM_DATA`` names; in what was
    fetched before; and in what the system and other libraries keep. The files may be ``NAME.npz``,
    idx files, torchvision's or those of a Hugging Face dataset. Whatever they are, the bytes are
    checked, so that everyone has the same data.

    Args:
        name: ``mnist``, ``fmnist``, ``cifar10``, ``usps``; ``cifar10_10k``, the first 1,000 and
            200 of each class; ``usps_3v5``, with the labels 0 and 1.
        folder: of data sets; what is fetched is kept in it.
        download: whether to fetch what is nowhere.
        mirror: an address with the files, asked before the public ones.
        progress: whether downloads are shown.

    Returns:
        ``train`` and ``test`` as tensors (images [N, C, H, W] from 0 to 1, labels [N]), the bytes
        in ``arrays``, ``classes`` and ``source``.

    Raises:
        DataError: where the data set is nowhere, or what is there is damaged.
    """
    entry = known(name)
    if isinstance(entry, Part):
        return _load_part(entry, folder, download, mirror, progress)
    place = locate(name, folder)
    if place is not None:
        return Images(entry.name, _read(place, entry), entry.classes, str(place.path))
    if not download:
        raise DataError(
            f"{entry.title} in {' or '.join(str(path) for path in searched(entry, folder))}",
            "none",
            f"engram data get {entry.name}, or {where_to_put(entry)}",
        )
    arrays, source = fetch(entry, mirror, progress)
    kept = _keep(arrays, entry, folder)
    announce(f"{entry.title} from {source}, kept in {kept or 'no file'}", progress)
    return Images(entry.name, arrays, entry.classes, str(kept or source))


def _keep(arrays: Arrays, entry: Entry, folder: str | Path | None) -> Path | None:
    """Write what was fetched where it is found again; None where nothing can be written."""
    for path in own_folders(folder):
        try:
            return npz.write(arrays, path, entry.name)
        except OSError:  # a folder of others, or a full disk: the data are there all the same
            continue
    return None


def _load_part(
    part: Part, folder: str | Path | None, download: bool, mirror: str | None, progress: bool
) -> Images:
    own = _own_file(part, folder)
    if own is not None:
        with damage_named(part, own):
            arrays = npz.read(own, part)
        check_digests(arrays, part, str(own))
        return Images(part.name, arrays, part.classes, str(own))
    whole = load(part.whole.name, folder, download=download, mirror=mirror, progress=progress)
    return Images(part.name, part.chosen(whole.arrays), part.classes, whole.source)


def _own_file(part: Part, folder: str | Path | None) -> Path | None:
    """A file of the part alone, where there is a checksum to know it by."""
    roots = own_folders(folder) if part.digests else ()
    return next((path for root in roots if (path := npz.find(root, part))), None)


def locate(name: str, folder: str | Path | None = None) -> Place | None:
    """Where a data set is found, or None; nothing is fetched, and little is read.

    Args:
        name: as for :func:`load`.
        folder: as for :func:`load`.
    """
    entry = known(name)
    if isinstance(entry, Part):
        own = _own_file(entry, folder)
        return locate(entry.whole.name, folder) if own is None else Place(own, LAYOUTS[0])
    for root in searched(entry, folder):
        for layout in LAYOUTS:
            path = layout.find(root, entry) if root.is_dir() else None
            if path is not None:
                return Place(path, layout)
    return None


def kept_in(folder: str | Path | None = None) -> Path:
    """Where what is fetched is kept: the user's folder, or else the cache of the account."""
    given = folder or os.environ.get(VARIABLE) or None
    if given is not None:
        return path_of("folder", given).expanduser()
    return _cache()


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "engram"


def own_folders(folder: str | Path | None = None) -> Iterator[Path]:
    """The folder that was named, by the argument or else by the environment; then the cache."""
    named = kept_in(folder)
    yield named
    if _cache() != named:
        yield _cache()


def searched(entry: Entry, folder: str | Path | None = None) -> Iterator[Path]:
    """Every folder that the data set is looked for in, in this order."""
    yield from own_folders(folder)
    yield from (Path(name).expanduser() for name in entry.system)


def _read(place: Place, entry: Entry) -> Arrays:
    with damage_named(entry, place.path):
        arrays = place.layout.read(place.path, entry)
    check_arrays(arrays, entry, str(place.path))
    return arrays


@contextmanager
def damage_named(entry: Entry | Part, path: Path) -> Iterator[None]:
    """What a broken file makes numpy, zip and gzip raise is a DataError that names the file."""
    try:
        yield
    except DataError:
        raise
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{entry.title} in {path}", brief(error), fetch_again(entry)) from error
