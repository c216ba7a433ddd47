"""A file is written beside its place and renamed: at any moment it is the old one or the new one.

Texts, and tensors by name in the format of safetensors; never pickle.

Nothing is written through a symbolic link: a link where a file should be is refused, and what is
written beside it is in a folder of its own, new and of a name that nobody can foresee. A *folder*
that is a link was made by the user to put things elsewhere, and is followed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engram.core.arguments import path_of
from engram.errors import StorageError

LARGEST_JSON = 2**28  # bytes of a description in JSON; more is damage, and is not read into memory
PART = ".part"  # ending of what is not in its place yet
PIECE_BYTES = 2**20  # bytes of a file that are read at once for its checksum
STALE_SECONDS = 3600.0  # age at which a temporary file counts as left by a killed process


@contextmanager
def replacing(target: str | Path) -> Iterator[Path]:
    """A path to write to, which takes the target's place when the block ends well.

    Folders are made. The content is on the disk before the name is, so that after a crash of the
    machine too there is no name with half a file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with replacing(Path(folder) / "page.html") as path:
        ...         _ = path.write_text("whole")
        ...     print((Path(folder) / "page.html").read_text())
        whole
    """
    target = path_of("file", target)
    check_free(target)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}{PART}")
    file = temporary / target.name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir(mode=0o700)  # nobody else puts a link into it
        mode = _made(file)
        yield file
        with suppress(PermissionError):  # not every file system has rights
            os.chmod(file, mode)  # safetensors makes files that only their owner may read
        _to_disk(file)
        os.replace(file, target)
    except OSError as error:
        raise _unwritable(target, error) from error
    finally:
        with suppress(OSError):  # not rmtree: where Ctrl-C comes in it, another error comes out
            for left in temporary.iterdir():
                left.unlink()
            temporary.rmdir()
    with suppress(OSError):  # not every system can do this for a folder
        _to_disk(target.parent)


def write_text(target: str | Path, text: str) -> Path:
    """Write a text file atomically."""
    with replacing(target) as path:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    return Path(target)


def read_bytes(path: Path, meant: str) -> bytes:
    """A file of moderate size; StorageError where there is none.

    Args:
        path: of the file.
        meant: what it should be, for the error.
    """
    try:
        check_file(path)
        with path.open("rb") as file:
            content = file.read(LARGEST_JSON + 1)
    except OSError as error:
        raise StorageError(meant, f"{path}: {reason_of(error)}", "check the path") from error
    if len(content) > LARGEST_JSON:
        raise StorageError(
            meant, f"{path} with more than {LARGEST_JSON:,} bytes", "save it again: it is damaged"
        )
    return content


def check_file(path: Path) -> None:
    """OSError for what is no plain file: a pipe would be waited for, a device has no end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a file")


def remove_stale(newest: Path, names: str, keep: Collection[str | None]) -> None:
    """Remove what killed processes left: files, in their place or not, that nobody names.

    Args:
        newest: a file of the folder that was just written, or written before; ages are counted from
            it, because the clock of the disk may be another one than ours.
        names: a pattern of the names of such files, in their place.
        keep: names that are in use.
    """
    stale = re.compile(rf"({names})|\.({names})\.[0-9a-f]{{32}}\{PART}")
    with suppress(OSError):  # of a folder that may not be looked into, or a file that is gone
        oldest = newest.stat().st_mtime - STALE_SECONDS
        for file in newest.parent.iterdir():
            old = stale.fullmatch(file.name) and file.name not in keep
            if old and file.lstat().st_mtime < oldest:
                _remove(file)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def check_free(target: Path) -> None:
    """StorageError where there is something else than a file: the rename would take its place.

    What a link stands for would stay old without a word, and a device would be gone.
    """
    try:
        mode = target.lstat().st_mode
    except OSError:  # nothing there, or nothing that can be written to, as will be seen
        return
    if not stat.S_ISREG(mode):
        kind = {stat.S_IFLNK: "symbolic link", stat.S_IFDIR: "folder"}.get(stat.S_IFMT(mode))
        raise StorageError(
            f"a file, or nothing yet, at {target}",
            f"a {kind or 'device'}, which is not written through",
            "remove it, or save elsewhere",
        )


def _made(path: Path) -> int:
    """Make an empty file; its rights, as the user wants them."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        return stat.S_IMODE(os.fstat(handle).st_mode)
    finally:
        os.close(handle)


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _unwritable(target: Path, error: OSError) -> StorageError:
    return StorageError(
        f"a place to write {target.name} to",
        f"{target.parent}: {reason_of(error)}",
        "check the path, its rights and the free space; what was there before is as it was",
    )


def reason_of(error: OSError) -> str:
    """The reason of an OSError in a few words."""
    return error.strerror or type(error).__name__


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str] | None = None
) -> str:
    """Write them, with words about them in the header; SHA-256 of the file."""
    own = {name: _own(value) for name, value in tensors.items()}
    with replacing(path) as temporary:
        try:
            save_file(own, temporary, None if header is None else dict(header))
        except (ValueError, SafetensorError) as error:
            raise StorageError(
                "tensors that safetensors can hold, and room for them",
                str(error),
                "make them dense, and check the free space",
            ) from error
        return digest_of(temporary)


def read_tensors(path: Path, device: str = "cpu") -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and the header of a file.

    FileNotFoundError where there is none, StorageError where it cannot be read.
    """
    try:
        check_file(path)
        with safe_open(path, "pt", device=device) as opened:
            header = opened.metadata() or {}
            # copies: what is mapped from a file changes, or ends the process, when the file does
            return {name: opened.get_tensor(name).clone() for name in opened.keys()}, header  # noqa: SIM118
    except FileNotFoundError:
        raise
    except Exception as error:  # whatever the reader of another library makes of a damaged file
        path.stat()  # or of one that was removed while it read
        raise StorageError(
            "an undamaged file of tensors", f"{path}: {error}", "save it again"
        ) from error


def _own(tensor: Tensor) -> Tensor:
    """A contiguous copy: safetensors does not save views that share memory."""
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().clone()


def digest_of(path: Path) -> str:
    """SHA-256 of a file."""
    check_file(path)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()
