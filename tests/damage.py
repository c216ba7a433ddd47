"""Ways in which a saved folder can be damaged, as hypothesis draws them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load, save

from engram.core.storage import json_folder as storage
from engram.core.storage.files import digest_of

Files = dict[str, bytes]


@dataclass(frozen=True)
class Damage:
    """From the files of a save, and those of another one, to damaged files."""

    what: str
    apply: Callable[[Files, Files], Files] = field(repr=False)

    def __call__(self, files: Files, other: Files) -> Files:
        return self.apply(files, other) if files else files


VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 2.5, 1e308, 10**30, "", "x", "\x1b[2J\ud800", [], {}, [[]]),
    *({"tensor": "x"}, {"tensor": 3}, {"float": "nan"}, {"float": "inf"}, {"float": 3}),
    *([1, 2, 3], {"a": {"b": []}}, [None] * 3),
]
whole = st.integers(0, 2**20)


def _chosen(files: Files, number: int) -> str:
    return sorted(files)[number % len(files)]


@st.composite
def bytes_changed(draw: st.DrawFn) -> Damage:
    """Some bytes replaced, put in, taken away, or the end cut off."""
    which, place, count = draw(whole), draw(whole), draw(st.integers(0, 40))
    new = draw(
        st.one_of(st.binary(max_size=12), st.sampled_from([b"0", b"}", b'"', b"\x00", b"9"]))
    )
    ending = draw(st.booleans())

    def damage(files: Files, other: Files) -> Files:
        name = _chosen(files, which)
        content = files[name]
        at = place % (len(content) + 1)
        rest = b"" if ending else content[at + count :]
        return files | {name: content[:at] + new + rest}

    return Damage(f"bytes {which} {place} {count} {new!r} {ending}", damage)


@st.composite
def files_mixed(draw: st.DrawFn) -> Damage:
    """A file of another save under its own name or that of ours, or a file that is gone."""
    which, way = draw(whole), draw(st.sampled_from(["gone", "replaced", "added", "named"]))

    def damage(files: Files, other: Files) -> Files:
        name = _chosen(files, which)
        same = sorted(other)[sorted(files).index(name) % len(other)]
        if way == "gone":
            return {key: value for key, value in files.items() if key != name}
        if way == "added":
            return files | {same: other[same]}
        if way == "named":
            return {same if key == name else key: value for key, value in files.items()}
        return files | {name: other[same]}

    return Damage(f"file {which} {way}", damage)


def _places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Ways to everything in a nested value."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    found = [way] if way else []
    for key in keys:
        found += _places(value[key], (*way, key))
    return found


def _holder(value: Any, way: tuple[Any, ...]) -> Any:
    for key in way[:-1]:
        value = value[key]
    return value


@st.composite
def json_changed(draw: st.DrawFn) -> Damage:
    """A key or an entry gone, of another type, swapped with another, or under another name."""
    first, second, value = draw(whole), draw(whole), draw(st.sampled_from(VALUES))
    way = draw(st.sampled_from(["gone", "other", "swapped", "renamed", "deep"]))

    def damage(files: Files, other: Files) -> Files:
        name = next((name for name in files if name.endswith(".json")), "")
        try:
            document = json.loads(files.get(name, b""))
        except (ValueError, RecursionError):
            return files
        places = _places(document)
        if not places:
            return files
        one, two = places[first % len(places)], places[second % len(places)]
        holder, key = _holder(document, one), one[-1]
        if way == "gone":
            del holder[key]
        elif way == "swapped":
            there = _holder(document, two)
            if two[: len(one)] != one and one[: len(two)] != two:
                holder[key], there[two[-1]] = there[two[-1]], holder[key]
        elif way == "renamed" and isinstance(holder, dict):
            holder[f"{key}x"] = holder.pop(key)
        else:
            holder[key] = value
        text = json.dumps(document)
        if way == "deep":
            text = text.replace(json.dumps(value), "[" * 2000 + "]" * 2000, 1)
        return files | {name: text.encode()}

    return Damage(f"json {first} {second} {way} {value!r}", damage)


TENSORS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda t: torch.full_like(t, math.nan) if t.is_floating_point() else t.long() + 1,
    lambda t: torch.full_like(t, -math.inf) if t.is_floating_point() else t.long() - 100,
    lambda t: t * 0,
    lambda t: -t if t.dtype != torch.bool else ~t,
    lambda t: t[:-1] if t.dim() else t[None],
    lambda t: t[None],
    lambda t: t.mT if t.dim() > 1 else t,
    lambda t: t.to(torch.int32),
    lambda t: t.to(torch.float64),
    lambda t: t.to(torch.bool),
    lambda t: t[:0] if t.dim() else t,
    lambda t: t.flip(0) if t.dim() else t,
]


@st.composite
def tensors_changed(draw: st.DrawFn) -> Damage:
    """A tensor gone, beside the others, or with other numbers, shape or type."""
    which, change = draw(whole), draw(st.sampled_from([None, "more", *TENSORS]))

    def damage(files: Files, other: Files) -> Files:
        names = [name for name in files if name.endswith(".safetensors")]
        if not names:
            return files
        name = names[which % len(names)]
        try:
            tensors = load(files[name])
        except (SafetensorError, ValueError):
            return files
        if not tensors:
            return files
        chosen = sorted(tensors)[which % len(tensors)]
        if change is None:
            del tensors[chosen]
        elif change == "more":
            tensors["more"] = torch.ones(2)
        else:
            tensors[chosen] = change(tensors[chosen]).contiguous().clone()
        return files | {name: save(tensors)}

    return Damage(f"tensor {which} {change}", damage)


def written(folder: Path, files: Files) -> Path:
    """The folder with these files and no others."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def signed(folder: Path) -> None:
    """Checksums as one who knows the format would put them, as far as there is anything to sign."""
    for file in folder.glob("*.json"):
        try:
            document = json.loads(file.read_text())
            if isinstance(document["tensors"], dict):
                place = folder / document["tensors"]["file"]
                document["tensors"]["sha256"] = digest_of(place)
            document["sha256"] = storage._digest(document)
        except (ValueError, RecursionError, KeyError, TypeError, OSError):
            continue
        file.write_text(json.dumps(document))
