"""The folder of a retraining run: what is finished, and the processes that share the work.

A part is one safetensors file with a checksum inside, written beside its place and renamed, so that
a file is either whole or not there. A file that was damaged later is noticed, set aside as
``*.damaged``, and trained again. Processes that ``torchrun`` or SLURM starts divide the copies
among them, and find each other's parts in the folder; those that do not run at the same time, as
the tasks of an array, do their share and wait for nobody.
"""

from __future__ import annotations

import os
import re
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from engram.core.arguments import AUTO, path_of
from engram.core.identity.digests import joined, of_tensors
from engram.core.processes.shares import Share
from engram.core.progress import Bar
from engram.core.storage.files import (
    read_tensors,
    reason_of,
    remove_stale,
    write_tensors,
    write_text,
)
from engram.core.storage.json_folder import read_folder, write_folder
from engram.core.storage.values import objects, taken_apart
from engram.errors import ArgumentError, FormatError, RunFolderError, StorageError

FORMAT = 2  # version of the manifest's layout; a folder of another one is refused
# Waiting for other processes: longer is safer for slow copies, and hides a dead process for longer
PAUSE_SECONDS = 0.2  # between two looks into the folder
PATIENCE_SECONDS = 1800.0  # without anything new from processes that have joined
JOIN_SECONDS = 300.0  # without a sign of a process that is waited for
BEAT_SECONDS = 5.0  # between two times that a process at work makes its sign new
SILENT_SECONDS = 120.0  # without that after which it counts as gone; network folders are slow

MANIFEST = "manifest"
NEEDED = {  # tensors without which a part of this kind counts as damaged
    "refits": {"baseline", "refit_outputs", "gradient_norm", "wanted_norm"},
    "copies": {"number", "outputs_without", "gradient_norm", "wanted_norm"},
    "subsets": {"number", "outputs", "seconds"},
}
NAME = re.compile(rf"({'|'.join(NEEDED)})-[0-9a-f]{{32}}\.safetensors")
Part = dict[str, Tensor]


def check_folder(folder: Any) -> None:
    """Raise unless it can be the name of a folder, or None."""
    if folder is not None:
        path_of("folder", folder)


class RunFolder:
    """Parts of a run, each with the kind of thing it holds.

    Args:
        path: the folder; None keeps the parts in memory only.
        fingerprint: of model, data and settings; a folder of another run is refused.
        settings: what the fingerprint was made from, for the reader.
    """

    def __init__(self, path: str | Path | None, fingerprint: str, settings: dict[str, Any]) -> None:
        self.path = None if path is None else Path(path)
        self.fingerprint = fingerprint
        self.parts: dict[str, tuple[str, Part]] = {}
        if self.path is not None:
            try:
                self._check_manifest(self.path, settings)
                self.refresh()
            except OSError as error:
                raise StorageError(
                    "a folder that can be read and written",
                    f"{path}: {reason_of(error)}",
                    "change its permissions, or give another folder",
                ) from error

    def of_kind(self, kind: str) -> list[Part]:
        """The parts of one kind, in a fixed order."""
        return [part for _, (found, part) in sorted(self.parts.items()) if found == kind]

    def write(self, kind: str, part: Part) -> None:
        """Add a part; on disk it is there whole or not at all."""
        part = {name: part[name].detach().cpu().contiguous() for name in sorted(part)}
        name = f"{kind}-{uuid.uuid4().hex}.safetensors"
        if self.path is not None:
            header = {"kind": kind, "fingerprint": self.fingerprint}
            header["checksum"] = _checksum(header, part)
            write_tensors(self.path / name, part, header)
        self.parts[name] = (kind, part)

    def refresh(self) -> int:
        """Read what other processes, or an earlier run, have added; how many parts are new."""
        if self.path is None:
            return 0
        before = len(self.parts)
        for file in _files(self.path):
            if file.name not in self.parts:
                found = self._read(file)
                if found is not None:
                    self.parts[file.name] = found
        return len(self.parts) - before

    def _read(self, file: Path) -> tuple[str, Part] | None:
        try:
            kind, fingerprint, part = _read_part(file)
        except FileNotFoundError:  # another process has set it aside
            return None
        except StorageError as error:
            self._set_aside(file, error.got)
            return None
        if fingerprint != self.fingerprint:
            self._set_aside(file, "it belongs to another run")
            return None
        return kind, part

    def _set_aside(self, file: Path, reason: str) -> None:
        warnings.warn(
            f"{file} is damaged ({reason}); it is kept as {file.name}.damaged and its copies are "
            "trained again",
            stacklevel=2,
        )
        with suppress(FileNotFoundError):
            file.replace(file.with_name(f"{file.name}.damaged"))

    def _check_manifest(self, path: Path, settings: dict[str, Any]) -> None:
        wanted, _ = taken_apart({"fingerprint": self.fingerprint, "settings": settings})
        found: dict[str, Any] = {}
        if (path / f"{MANIFEST}.json").is_file():
            found = self._read_manifest(path)
        if found and found["fingerprint"] != self.fingerprint:
            theirs = found["settings"] if isinstance(found["settings"], dict) else {}
            mine = wanted["settings"]
            raise _another_run(path, [key for key in mine if mine[key] != theirs.get(key)])
        if found != wanted:
            write_folder(path, MANIFEST, FORMAT, wanted)
        remove_stale(path / f"{MANIFEST}.json", NAME.pattern, {file.name for file in _files(path)})

    def _read_manifest(self, path: Path) -> dict[str, Any]:
        """The manifest; where it is damaged, it is made again from the parts' own word."""
        try:
            content = read_folder(path, MANIFEST, FORMAT)
            return objects(content, f"{MANIFEST}.json", ("fingerprint", "settings"))
        except FormatError:
            raise
        except StorageError as error:
            for file in _files(path):
                with suppress(StorageError, FileNotFoundError):
                    if _read_part(file)[1] != self.fingerprint:
                        raise _another_run(path, []) from error
            warnings.warn(
                f"{path / MANIFEST}.json is damaged ({error.got}) and written again", stacklevel=2
            )
            return {}


def _files(path: Path) -> Iterator[Path]:
    """Parts of a run, and no file of anything else that is saved there."""
    return (file for file in sorted(path.iterdir()) if NAME.fullmatch(file.name))


def _read_part(file: Path) -> tuple[str, str, Part]:
    """Kind, fingerprint and tensors of a part; StorageError where they do not belong together."""
    tensors, header = read_tensors(file)
    part = {name: tensors[name] for name in sorted(tensors)}
    kind = header.get("kind", "")
    if header.get("checksum") != _checksum(header, part):
        raise StorageError("an undamaged part of a run", "its checksum differs", "train it again")
    if kind not in NEEDED or not NEEDED[kind] <= set(part):
        raise StorageError(
            "refits, copies or subsets", f"{kind!r} with {sorted(part)}", "train it again"
        )
    return kind, header.get("fingerprint", ""), part


def _checksum(header: dict[str, str], part: Part) -> str:
    words = [header.get(name, "") for name in ("kind", "fingerprint")]
    return joined("part of a run", *words, of_tensors(part)).hex()


def _another_run(path: Path, differing: list[str]) -> RunFolderError:
    names = differing or ["the fingerprint"]
    return RunFolderError(
        "an empty folder, or one of a run with the same model, data and settings",
        f"{path}, where {', '.join(names)} differ" + ("s" if len(names) == 1 else ""),
        "give another folder, or delete this one",
    )


@dataclass(frozen=True)
class Ranks:
    """Which of the processes of a run this is, and whether the others run at the same time."""

    rank: int
    world_size: int
    at_once: bool = True

    @classmethod
    def of(cls, share: tuple[int, int] | str = AUTO) -> Ranks:
        """The share that is given, or that of torchrun or SLURM; alone where there is none."""
        found = Share.chosen(share)
        return cls(found.number, found.count, found.at_once)

    def check_folder(self, folder: object) -> None:
        """ArgumentError where several processes have no folder to find each other's copies in."""
        if self.world_size > 1 and folder is None:
            raise ArgumentError(
                "folder=, which all processes can read and write",
                f"none in a run of {self.world_size} processes",
                "name a folder that they share",
            )

    def share(self, numbers: Sequence[int]) -> list[int]:
        """This process's part of the work, whatever of it the others have already seen done."""
        return [number for number in numbers if number % self.world_size == self.rank]

    def owners(self, numbers: Sequence[int]) -> list[int]:
        """The processes that have these copies to train."""
        return sorted({number % self.world_size for number in numbers})

    @contextmanager
    def taking_part(self, run: RunFolder) -> Iterator[None]:
        """A marker file while this process is at work, so that the others wait longer for it."""
        if self.world_size == 1 or run.path is None:
            yield
            return
        sign, ended = run.path / self._sign(self.rank), threading.Event()
        write_text(sign, "")
        beat = threading.Thread(target=_keep_fresh, args=(sign, ended), daemon=True)
        beat.start()
        try:
            yield
        finally:
            ended.set()
            beat.join()
            sign.unlink(missing_ok=True)

    def absent(self, run: RunFolder, ranks: Sequence[int]) -> list[int]:
        """The ranks that have not joined, or have stopped without taking their sign away."""
        if run.path is None:
            return []
        now = _age(run.path / self._sign(self.rank)) or time.time()  # by the folder's own clock
        ages = {rank: _age(run.path / self._sign(rank)) for rank in ranks}
        return [rank for rank, age in ages.items() if age is None or now - age > SILENT_SECONDS]

    def _sign(self, rank: int) -> str:
        return f"process-{rank}-of-{self.world_size}"


@dataclass(frozen=True)
class Patience:
    """Seconds to wait for other processes: until they join, and between two of their results."""

    join: float = JOIN_SECONDS
    silence: float = PATIENCE_SECONDS


def _keep_fresh(sign: Path, ended: threading.Event) -> None:
    while not ended.wait(BEAT_SECONDS):
        with suppress(OSError):  # a network folder that is away for a moment
            os.utime(sign)


def _age(sign: Path) -> float | None:
    """When a sign was last made new; None where there is none."""
    try:
        return sign.stat().st_mtime
    except OSError:
        return None


def wait_until_done(
    missing: Callable[[], Sequence[int]],
    run: RunFolder,
    ranks: Ranks,
    progress: bool,
    patience: Patience | None = None,
) -> None:
    """Wait for the other processes' parts; an error where nothing new comes for long.

    Args:
        missing: numbers of the copies that are not there yet.
        run: where they are looked for.
        ranks: which of the processes have to train them.
        progress: show what is waited for, and for whom.
    """
    limits, last, before = patience or Patience(), time.monotonic(), missing()
    if before and not ranks.at_once:
        raise RunFolderError(
            "all copies of the run",
            f"{len(before)} that {_processes(ranks.owners(before))} of {ranks.world_size} "
            f"have not trained yet in {run.path}",
            "this share is done; once the others are, the same call without share= has the result",
        )
    with Bar(len(before), "waiting", progress) as bar:
        while left := missing():
            owners = ranks.owners(left)
            bar.describe(f"waiting for {_processes(owners)}")
            if run.refresh():
                last = time.monotonic()
            silent = time.monotonic() - last
            if silent > limits.join and (absent := ranks.absent(run, owners)):
                raise _missing(run, absent, f"no sign of {_processes(absent)}", silent, len(left))
            if silent > limits.silence:
                raise _missing(run, owners, "nothing new", silent, len(left))
            bar.update(len(before) - len(left) - bar.count)
            time.sleep(PAUSE_SECONDS)


def _missing(
    run: RunFolder, owners: Sequence[int], what: str, seconds: float, copies: int
) -> RunFolderError:
    return RunFolderError(
        f"{_processes(owners)} to write their parts of the run",
        f"{what} in {run.path} for {seconds / 60:.0f} minutes, with {copies} missing",
        "see that all processes run with the same folder and settings, and start again: the run "
        "goes on with what is missing",
    )


def _processes(ranks: Sequence[int]) -> str:
    plural = "es" if len(ranks) > 1 else ""
    return f"process{plural} {', '.join(map(str, ranks))}"
