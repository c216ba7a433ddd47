"""Data that can only be read from its beginning to its end, written down once.

Whoever leaves an example out, goes on after a kill or shares the work has to ask for example 4711
again. A stream cannot give it. So it is read once, and its tensors are kept in files, of which the
system reads what is asked for: memory stays flat, and an example keeps its number and its name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from engram.core.arguments import path_of
from engram.core.data.inputs import Data, plain
from engram.core.progress import Bar
from engram.core.storage.files import check_file, read_bytes, write_text
from engram.errors import DataError, StorageError

MANIFEST = "spool.json"  # written last: without it the folder is of a reading that did not end
NAMES = "names.txt"  # of the examples, a JSON string a line
DTYPES = {
    str(kind): kind
    for kind in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
Name = Callable[[Any], object]
Kind = dict[str, Any]  # shape and type of a tensor, as the manifest has them


@dataclass(frozen=True)
class Spooled:
    """A stream that was written to a folder.

    Args:
        folder: with its files.
        count: examples in it.
        data: tensors with a row for each, in the form that an example had; read from the files as
            they are needed.
    """

    folder: Path
    count: int
    data: Data

    def __len__(self) -> int:
        return self.count

    @cached_property
    def names(self) -> list[str]:
        """The examples' names, in order; their numbers where they have none."""
        file = self.folder / NAMES
        if not file.exists():
            return [str(number) for number in range(self.count)]
        with file.open(encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]

    def __repr__(self) -> str:
        return f"Spooled({self.count:,} examples in {self.folder})"


def spool(
    source: Iterable[Any] | Callable[[], Iterable[Any]],
    folder: str | Path,
    *,
    name: Name | None = None,
    progress: bool = True,
) -> Spooled:
    """A stream of examples as data that every call takes, kept in a folder.

    Args:
        source: an ``IterableDataset``, a generator, or a function that makes one: of single
            examples (x, y), or dicts with labels, of tensors or numbers of the same shapes.
        folder: is made where it is missing. What is there already is opened, and the source is not
            read; a folder whose reading did not end is begun anew.
        name: gives an example's own name, which goes with it into ``names``; else its number.
        progress: show how many have been read when that takes longer than a few seconds.

    Example:
        >>> import tempfile
        >>> stream = ((torch.full((3,), float(n)), n % 2) for n in range(5))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     spooled = spool(stream, folder, name=lambda example: f"row {int(example[0][0])}")
        ...     print(len(spooled), spooled.data[1].tolist(), spooled.names[4])
        5 [0, 1, 0, 1, 0] row 4
    """
    path = path_of("folder", folder)
    if not (path / MANIFEST).exists():
        path.mkdir(parents=True, exist_ok=True)
        _write(source() if callable(source) else source, path, name, progress)
    return _opened(path)


def _write(source: Iterable[Any], path: Path, name: Name | None, progress: bool) -> None:
    """All examples, one after the other, each tensor to its own file."""
    try:
        stream = iter(source)
    except TypeError as error:
        raise DataError(
            "an iterable of examples, or a function that makes one",
            type(source).__name__,
            "pass an IterableDataset, a generator or a function that returns one",
        ) from error
    first = next(stream, None)
    if first is None:
        raise DataError("at least one example", "an empty stream", "check the source")
    form, kinds = _form(first), [_kind(tensor) for tensor in _tensors(first)]
    files = [(path / f"{place}.bin").open("wb") for place in range(len(kinds))]
    names = (path / NAMES).open("w", encoding="utf-8") if name is not None else None
    seen: set[str] = set()
    count = 0
    try:
        with Bar(None, "examples read", progress) as bar:
            for example in _chained(first, stream):
                _append(example, count, kinds, files)
                if names is not None and name is not None:
                    names.write(json.dumps(_new_name(str(name(example)), seen, count)) + "\n")
                count += 1
                bar.update()
    finally:
        for file in (*files, names) if names is not None else files:
            file.close()
    manifest = {"count": count, "form": form, "tensors": kinds}
    write_text(path / MANIFEST, json.dumps(manifest) + "\n")


def _chained(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest


def _tensors(example: Any) -> list[Tensor]:
    """The leaves of an example as tensors, in a fixed order."""
    return [torch.as_tensor(leaf).detach().cpu() for leaf in tree_leaves(plain(example))]


def _kind(tensor: Tensor) -> Kind:
    if str(tensor.dtype) not in DTYPES:
        raise DataError(
            "examples of real numbers, whole numbers or bools", f"{tensor.dtype}", "convert them"
        )
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype)}


def _append(
    example: Any, number: int, kinds: list[dict[str, Any]], files: Sequence[BinaryIO]
) -> None:
    tensors = _tensors(example)
    found = [_kind(tensor) for tensor in tensors]
    if found != kinds:
        pairs = zip(kinds, found, strict=False)
        other = next((pair for pair in pairs if pair[0] != pair[1]), (kinds, found))
        raise DataError(
            f"examples of one form, {other[0]} as in the first",
            f"{other[1]} in example {number}",
            "pad sequences to one length, and convert numbers to one type, in the source",
        )
    for tensor, file in zip(tensors, files, strict=True):
        file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())


def _new_name(name: str, seen: set[str], number: int) -> str:
    if name in seen:
        raise DataError(
            "a name of its own for every example",
            f"{name!r} once more, for example {number}",
            "name examples by what no two of them share",
        )
    seen.add(name)
    return name


def _form(example: Any) -> Any:
    """The nesting of an example, with the number of a tensor in place of each leaf."""
    leaves, tree = tree_flatten(plain(example))
    if not isinstance(plain(example), (dict, tuple, list)) or len(leaves) < 2:
        raise DataError(
            "examples (x, y), or dicts with labels",
            type(example).__name__,
            "have the source give inputs and target together",
        )
    numbered = tree_unflatten(list(range(len(leaves))), tree)
    return _listed(numbered)


def _listed(value: Any) -> Any:
    """Tuples as lists with a mark, so that JSON brings them back."""
    if isinstance(value, dict):
        return {"dict": [[key, _listed(part)] for key, part in value.items()]}
    if isinstance(value, (tuple, list)):
        return {"tuple": [_listed(part) for part in value]}
    return value


def _filled(form: Any, tensors: list[Tensor]) -> Any:
    if isinstance(form, dict) and "dict" in form:
        return {key: _filled(part, tensors) for key, part in form["dict"]}
    if isinstance(form, dict):
        return tuple(_filled(part, tensors) for part in form["tuple"])
    return tensors[form]


def _opened(path: Path) -> Spooled:
    """The files as tensors; StorageError where one is missing or has another size."""
    text = read_bytes(path / MANIFEST, "a folder written by engram.spool")
    try:
        manifest = json.loads(text)
        count, kinds, form = int(manifest["count"]), manifest["tensors"], manifest["form"]
        tensors = [_mapped(path / f"{n}.bin", kind, count) for n, kind in enumerate(kinds)]
        return Spooled(path, count, _filled(form, tensors))
    except (ValueError, KeyError, TypeError, IndexError, OSError) as error:
        raise StorageError(
            "an undamaged folder of engram.spool", f"{path}: {error}", "remove it, and spool again"
        ) from error


def _mapped(file: Path, kind: Kind, count: int) -> Tensor:
    dtype, shape = DTYPES[kind["dtype"]], [int(size) for size in kind["shape"]]
    size = count * math.prod(shape)
    check_file(file)
    if file.stat().st_size != size * dtype.itemsize:
        raise ValueError(f"{file.name} has {file.stat().st_size:,} bytes")
    return torch.from_file(str(file), shared=False, size=size, dtype=dtype).reshape(count, *shape)
