"""A tracker's state is read whole or refused, and a refusal changes nothing."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import engram
from engram.errors import DataError, EngramError, StorageError
from engram.tracking import scores
from engram.tracking.history import History, Record
from saved_folders import edit
from streamed import backward, build, data


def filled(history: History, updates: int) -> History:
    for step in range(updates):
        history.add(Record(step, 0.5, 1.0 + step), torch.full((7,), 1.0 + step))
    return history


def run(**settings: Any) -> engram.Tracker:
    """A tracker in the middle of its second epoch, with an update before it."""
    model, optimizer = build()
    tracker = engram.Tracker(model, optimizer, data(), **settings)
    for number in range(4):
        batch = torch.arange(8) + 8 * (number % 3)
        optimizer.zero_grad()
        with tracker.step(batch):
            backward(model, batch)
        optimizer.step()
    return tracker


SETTINGS: dict[str, dict[str, Any]] = {
    "optimizer": {},
    "held_out": {"held_out": 4},
    "averaged": {"posterior": "kronecker", "prior_precision": 1.0, "average": 0.5},
}


def seen(tracker: engram.Tracker) -> str:
    """Everything that a state holds, as words."""
    torch.set_printoptions(precision=12, threshold=100_000)
    try:
        return repr(tracker.state_dict())
    finally:
        torch.set_printoptions(profile="default")


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_state_comes_back_whole(kind: str, tmp_path: Path) -> None:
    tracker = run(**SETTINGS[kind])
    tracker.save(tmp_path)
    assert {file.suffix for file in tmp_path.iterdir()} == {".json", ".safetensors"}
    assert len(list(tmp_path.iterdir())) == 2
    again = engram.Tracker(*build(), data(), **SETTINGS[kind])
    again.resume(tmp_path)
    assert seen(again) == seen(tracker)


def put(*keys: Any) -> Callable[[Any], None]:
    """Put the last of the keys where the others lead; ``...`` takes away what is there."""

    def change(state: Any) -> None:
        *way, last, value = keys
        for key in way:
            state = state[key]
        if value is ...:
            del state[last]
        else:
            state[last] = value

    return change


CHANGES = {
    "optimizer": [
        put("history", ...),
        put("stream", ...),
        put("source", ...),
        put("more", 1),
        put("history", None),
        put("history", "format", 1),
        put("history", "records", ...),
        put("history", "records", 3),
        put("history", "records", 0, "step", "0"),
        put("history", "records", 0, "step", ...),
        put("history", "records", 0, "train", None),
        put("history", "records", 0, "leverage", [None]),
        put("history", "records", 0, "more", 1),
        put("history", "width", -1),
        put("history", "width", 10**12),
        put("history", "scores", None),
        put("history", "scores", torch.ones(1, 5)),
        put("history", "scores", torch.ones(1, 24).double()),
        put("stream", []),
        put("stream", "steps", 1.5),
        put("stream", "steps", ...),
        put("stream", "epoch", ...),
        put("stream", "epoch", "loss", ...),
        put("stream", "epoch", "loss", torch.ones(3)),
        put("stream", "epoch", "loss", torch.ones(24).double()),
        put("stream", "epoch", "status", torch.full((24,), 7, dtype=torch.int8)),
        put("stream", "epoch", "status", torch.zeros(24)),
        put("stream", "epoch", "more", torch.zeros(24)),
        put("source", "structure", "kronecker"),
        put("source", None),
        put("held_out", {}),
    ],
    "averaged": [
        put("source", {}),
        put("source", "structure", "diagonal"),
        put("source", "structure", 3),
        put("source", "updates", -1),
        put("source", "updates", "2"),
        put("source", "updates", 0),
        put("source", "sums", {}),
        put("source", "sums", [1]),
        put("source", "sums", {"rows/0": 3}),
    ],
    "held_out": [
        put("held_out", ...),
        put("held_out", {}),
        put("held_out", "indices", torch.arange(3)),
        put("held_out", "indices", torch.tensor([0, 1, 2, 24])),
        put("held_out", "indices", torch.tensor([0, 1, 2, -1])),
        put("held_out", "indices", torch.ones(4)),
        put("held_out", "indices", [1, 2, 3, 4]),
        put("held_out", "total", torch.ones(3)),
        put("held_out", "total", ...),
        put("held_out", "total_of_all", None),
        put("held_out", "updates", 1.5),
        put("held_out", "more", 1.5),
        put("held_out", "twin", None),
        put("held_out", "twin", "missed", None),
        put("held_out", "twin", "weights", {}),
        put("held_out", "twin", "weights", 3),
        put("held_out", "twin", "buffers", {"more": torch.ones(1)}),
        put("held_out", "twin", "optimizer", {"99": {}}),
        put("held_out", "twin", "optimizer", {"x": {}}),
        put("held_out", "twin", "optimizer", {"0": 3}),
        put("held_out", "twin", "optimizer", 3),
    ],
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_wrong_state_is_refused_and_changes_nothing(kind: str, tmp_path: Path) -> None:
    tracker, other = run(**SETTINGS[kind]), run(**SETTINGS[kind])
    with other.step(torch.arange(8, 16)):
        backward(other.model, torch.arange(8, 16))
    present, before = vars(other.source).get("present"), seen(other)
    for change in CHANGES[kind]:
        state = copy.deepcopy(tracker.state_dict())
        change(state)
        with pytest.raises(EngramError):
            other.load_state_dict(state)
        assert seen(other) == before
        assert vars(other.source).get("present") is present
    other.load_state_dict(tracker.state_dict())
    assert seen(other) == seen(tracker)


def test_a_changed_folder_is_refused(tmp_path: Path) -> None:
    tracker = run()
    other = run()
    before = seen(other)
    for change in CHANGES["optimizer"][:12]:
        tracker.save(tmp_path)
        edit(tmp_path, "tracker", change)
        with pytest.raises(StorageError):
            other.resume(tmp_path)
    with pytest.raises(StorageError, match="a folder written by tracker"):
        other.resume(tmp_path / "nothing")
    assert seen(other) == before


def test_a_cut_file_of_scores_is_not_filled_with_zeros(tmp_path: Path) -> None:
    history = filled(History(tmp_path), 3)
    state = history.state_dict()
    file = tmp_path / scores.FILE
    whole = file.read_bytes()
    file.write_bytes(whole[:-4])
    with pytest.raises(StorageError, match="cut"):
        history.score_matrix()
    with pytest.raises(StorageError, match="cut"):
        filled(history, 1)
    with pytest.raises(StorageError, match="cut"):
        History.of_state(state, tmp_path)
    assert file.read_bytes() == whole[:-4]
    file.write_bytes(whole[:-4] + b"\0\0\0\0")
    with pytest.raises(StorageError, match="other ones"):
        History.of_state(state, tmp_path)
    file.write_bytes(whole + b"\0\0")  # a row that was not finished
    again = History.of_state(state, tmp_path)
    assert filled(again, 1).score_matrix()[:, 0].tolist() == [1.0, 2.0, 3.0, 1.0]
    assert History.of_state(again.state_dict()).score_matrix().equal(again.score_matrix())


def test_scores_are_not_written_through_links(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_text("not ours")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / scores.FILE).symlink_to(theirs)
    with pytest.raises(StorageError):
        filled(History(tmp_path / "run"), 1)
    with pytest.raises(StorageError):
        History.of_state(filled(History(), 2).state_dict(), tmp_path / "run")
    assert theirs.read_text() == "not ours"


def test_no_folder_for_scores(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        History(tmp_path / "file")
    os.mkdir(tmp_path / "run")
    os.mkdir(tmp_path / "run" / scores.FILE)
    with pytest.raises(StorageError):
        filled(History(tmp_path / "run"), 1)


def test_a_history_that_names_no_file_is_refused(tmp_path: Path) -> None:
    state = filled(History(tmp_path), 3).state_dict()
    for change in (put("digest", ...), put("digest", 3), put("folder", 3), put("width", 10**15)):
        changed = copy.deepcopy(state)
        change(changed)
        with pytest.raises(DataError):
            History.of_state(changed, tmp_path)
    with pytest.raises(DataError):
        History.of_state(state | {"folder": str(tmp_path / "elsewhere")})
