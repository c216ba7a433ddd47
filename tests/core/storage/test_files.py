"""A single file is the old one or the new one, never a part, and never somewhere else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engram.core.storage.files import LARGEST_JSON, read_bytes, replacing, write_text
from engram.errors import StorageError


def write_half(target: Path) -> None:
    with replacing(target) as path:
        path.write_text("ne")
        raise KeyboardInterrupt


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = write_text(tmp_path / "new" / "page.html", "old")
    with pytest.raises(KeyboardInterrupt):
        write_half(target)
    assert target.read_text() == "old"
    assert [file.name for file in target.parent.iterdir()] == ["page.html"]


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    target = write_text(tmp_path / "page.html", "old")
    with pytest.raises(StorageError, match="No space left"), replacing(target):
        raise OSError(28, "No space left on device")
    assert target.read_text() == "old"


@pytest.mark.parametrize("kind", ["link", "loop", "dangling", "folder", "pipe"])
def test_pages_are_not_written_through_links(tmp_path: Path, kind: str) -> None:
    theirs, target = tmp_path / "theirs", tmp_path / "page.html"
    theirs.write_text("not ours")
    if kind == "folder":
        target.mkdir()
    elif kind == "pipe":
        os.mkfifo(target)
    else:
        target.symlink_to({"link": theirs, "loop": target, "dangling": tmp_path / "none"}[kind])
    with pytest.raises(StorageError, match="not written through"):
        write_text(target, "page")
    assert theirs.read_text() == "not ours"
    assert not (tmp_path / "none").exists()
    assert len(list(tmp_path.iterdir())) == 2
    assert not target.is_file() or target.is_symlink()


@pytest.mark.parametrize("place", [".", "/", ".."])
def test_a_folder_is_no_place_for_a_page(place: str) -> None:
    with pytest.raises(StorageError, match="a folder"):
        write_text(place, "text")


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "huge.json").open("wb") as file:
        file.truncate(LARGEST_JSON + 1)  # sparse: takes no room
    with pytest.raises(StorageError, match="more than"):
        read_bytes(tmp_path / "huge.json", "a description")
