"""What is saved is read whole, whoever writes beside, and anything else is refused."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engram.core.storage import files
from engram.core.storage.json_folder import read_folder, write_folder
from engram.core.storage.values import taken_apart
from engram.errors import ArgumentError, StorageError
from saved_folders import files_of

SOURCE = Path(__file__).parents[3] / "src"


@dataclass
class Thing:
    number: float
    column: torch.Tensor


def thing(number: float = 1.0) -> dict[str, Any]:
    return {"number": number, "column": torch.full((5,), number), "nested": [{"x": torch.ones(0)}]}


def test_every_value_comes_back(tmp_path: Path) -> None:
    content = {
        "whole": 3,
        "numpy": [np.int64(4), np.float32(0.5), np.bool_(True), np.str_("word")],
        "unusual": [math.inf, -math.inf, 0.1, -0.0],
        "nothing": None,
        "dataclass": Thing(2.5, torch.arange(3)),
        "tensors": {
            "a/b": torch.ones(2, dtype=torch.bfloat16).t(),
            "a": {"b": torch.zeros((), dtype=torch.bool)},
        },
        "shared": [torch.eye(3), torch.eye(3).t()[1:]],
        "surrogate": "\ud800",
        7: "a key that is a number",
    }
    found = read_folder(write_folder(tmp_path, "thing", 1, content), "thing", 1)
    assert found["numpy"] == [4, 0.5, True, "word"]
    assert [type(v) for v in found["numpy"]] == [int, float, bool, str]
    assert found["unusual"] == [math.inf, -math.inf, 0.1, 0.0]
    assert found["dataclass"]["column"].equal(torch.arange(3))
    assert found["tensors"]["a/b"].dtype == torch.bfloat16
    assert found["tensors"]["a"]["b"].equal(torch.zeros((), dtype=torch.bool))
    assert found["shared"][1].equal(torch.eye(3)[1:])
    assert found["surrogate"] == "\ud800"
    assert found["7"] == "a key that is a number"
    json.loads((tmp_path / "thing.json").read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize(
    "bad",
    [
        *(object(), {1: 0, "1": 0}, {"tensor": "x"}, {"float": 1}, b"bytes", {None: 1}, 2**9999),
        *(torch.ones(3).to_sparse(), torch.ones(3, device="meta"), np.ones(3), {1.5: 2}),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_cannot_be_saved_leaves_what_was_there(tmp_path: Path, bad: Any) -> None:
    write_folder(tmp_path, "thing", 1, thing())
    before = files_of(tmp_path)
    with pytest.raises(StorageError):
        write_folder(tmp_path, "thing", 1, thing(2.0) | {"bad": bad})
    assert files_of(tmp_path) == before


def test_a_value_that_holds_itself_is_refused(tmp_path: Path) -> None:
    loop: dict[str, Any] = {}
    loop["again"] = loop
    with pytest.raises(StorageError, match="in each other"):
        write_folder(tmp_path, "thing", 1, loop)


def test_old_tensors_go_when_new_ones_are_in_place(tmp_path: Path) -> None:
    (tmp_path / "thing-mine.safetensors").write_bytes(b"of the user")
    for number in range(3):
        write_folder(tmp_path, "thing", 1, thing(number))
        write_folder(tmp_path, "other", 1, thing(number))
    assert len(list(tmp_path.glob("thing-*.safetensors"))) == 2
    assert len(list(tmp_path.iterdir())) == 5
    assert (tmp_path / "thing-mine.safetensors").read_bytes() == b"of the user"


def test_leftovers_of_a_kill_are_removed_later(tmp_path: Path) -> None:
    old = [f"thing-{'a' * 16}.safetensors", f".thing.json.{'b' * 32}.part"]
    old.append(f".thing-{'c' * 16}.safetensors.{'d' * 32}.part")
    for name in (*old, f"thing-{'e' * 16}.safetensors", "thing-mine.safetensors"):
        (tmp_path / name).write_bytes(b"half")
    old.append(f".thing-{'f' * 16}.safetensors.{'a' * 32}.part")
    (tmp_path / old[-1]).mkdir()
    (tmp_path / old[-1] / "half").write_bytes(b"half")
    for name in old:
        os.utime(tmp_path / name, (0, 0))
    os.utime(tmp_path / "thing-mine.safetensors", (0, 0))
    write_folder(tmp_path, "thing", 1, thing())
    left = {file.name for file in tmp_path.iterdir()}
    assert not left & set(old)
    assert {f"thing-{'e' * 16}.safetensors", "thing-mine.safetensors"} <= left


def test_files_of_two_saves_are_not_mixed(tmp_path: Path) -> None:
    first = write_folder(tmp_path / "first", "thing", 1, thing(1.0))
    second = write_folder(tmp_path / "second", "thing", 1, thing(2.0))
    tensors = next(second.glob("*.safetensors"))
    next(first.glob("*.safetensors")).write_bytes(tensors.read_bytes())
    with pytest.raises(StorageError, match="differs from its checksum"):
        read_folder(first, "thing", 1)
    (first / "thing.json").write_bytes((second / "thing.json").read_bytes())
    with pytest.raises(StorageError, match="No such file"):
        read_folder(first, "thing", 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"{", "undamaged"),
        (b"[]", "list"),
        (b"\xff\xfe", "undamaged"),
        (b"[" * 100_000, "undamaged"),
        (b'{"engram": "thing", "format": 1}', "the keys"),
        (b'{"format": 1, "units": {}}', "the keys"),
        (b'{"engram": "thing", "format": 7}', "format 7.*version of engram that wrote it"),
        (b'{"engram": "other", "format": 1}', "'other'"),
        (b'{"format": true}', "format True"),
        (b'{"format": NaN}', "undamaged"),
        (b'{"format": 1e999}', "undamaged"),
        (b"1" * 10_000, "undamaged"),
        (b"", "undamaged"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_damaged_descriptions_are_refused(tmp_path: Path, text: bytes, words: str) -> None:
    write_folder(tmp_path, "thing", 1, thing())
    (tmp_path / "thing.json").write_bytes(text)
    with pytest.raises(StorageError, match=words):
        read_folder(tmp_path, "thing", 1)


def test_deep_nesting_behind_a_right_start_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, "thing", 1, thing())
    document = json.loads((tmp_path / "thing.json").read_text())
    for depth in (60, 300, 900, 990, 5000):
        text = json.dumps(document | {"content": 0}).replace('"content": 0', '"content": %s')
        (tmp_path / "thing.json").write_text(text % ("[" * depth + "]" * depth))
        with pytest.raises(StorageError):
            read_folder(tmp_path, "thing", 1)


def test_a_changed_number_is_noticed(tmp_path: Path) -> None:
    write_folder(tmp_path, "thing", 1, thing())
    text = (tmp_path / "thing.json").read_text()
    (tmp_path / "thing.json").write_text(text.replace("1.0", "1.5"))
    with pytest.raises(StorageError, match="its own checksum"):
        read_folder(tmp_path, "thing", 1)
    (tmp_path / "thing.json").write_text(json.dumps(json.loads(text)))  # another layout
    assert read_folder(tmp_path, "thing", 1)["number"] == 1.0


@pytest.mark.parametrize("place", ["thing.json", "tensors"])
@pytest.mark.parametrize("what", ["folder", "pipe", "loop", "nothing"])
def test_no_file_in_place_of_a_file_is_refused(tmp_path: Path, place: str, what: str) -> None:
    write_folder(tmp_path, "thing", 1, thing())
    path = next(tmp_path.glob("*.safetensors")) if place == "tensors" else tmp_path / place
    path.unlink()
    if what == "folder":
        path.mkdir()
    if what == "pipe":
        os.mkfifo(path)
    if what == "loop":
        path.symlink_to(path)
    with pytest.raises(StorageError):
        read_folder(tmp_path, "thing", 1)


def test_links_are_not_written_through(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_text("not ours")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thing.json").symlink_to(theirs)
    with pytest.raises(StorageError, match="symbolic link"):
        write_folder(tmp_path / "folder", "thing", 1, thing())
    assert theirs.read_text() == "not ours"
    assert [file.name for file in (tmp_path / "folder").iterdir()] == ["thing.json"]


def test_a_folder_that_is_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    write_folder(tmp_path / "link", "thing", 1, thing())
    assert read_folder(tmp_path / "there", "thing", 1)["number"] == 1.0
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StorageError):
        write_folder(tmp_path / "dangling", "thing", 1, thing())


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StorageError):
            write_folder(path, "thing", 1, thing())
        with pytest.raises(StorageError):
            read_folder(path, "thing", 1)


@pytest.mark.parametrize("bad", [None, 3, b"run", "a\0b", ["run"], ""])
def test_what_is_no_path_is_refused(bad: Any) -> None:
    for call in (
        lambda: write_folder(bad, "thing", 1, thing()),
        lambda: read_folder(bad, "thing", 1),
        lambda: files.write_text(bad, "text"),
    ):
        with pytest.raises(ArgumentError, match="the name of a"):
            call()


def test_a_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    for call in (
        lambda: write_folder(tmp_path / ("x" * 300), "thing", 1, thing()),
        lambda: read_folder(tmp_path / ("x" * 300), "thing", 1),
    ):
        with pytest.raises(StorageError, match="too long"):
            call()


def test_others_may_read_what_they_may_usually_read(tmp_path: Path) -> None:
    write_folder(tmp_path, "thing", 1, thing())
    (tmp_path / "usual").write_text("")
    rights = {file.stat().st_mode for file in tmp_path.iterdir()}
    assert len(rights) == 1


def test_names_of_tensors_do_not_collide() -> None:
    plain, tensors = taken_apart({"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}})
    assert len(tensors) == 2
    assert plain["a/b"] != plain["a"]["b"]
