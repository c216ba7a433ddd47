"""History across restarts and on disk, and the memory that it takes."""

from __future__ import annotations

import gc
import math
import tracemalloc
from pathlib import Path

import pandas as pd
import psutil
import pytest
import torch
from torch import nn

import engram
from engram.errors import ArgumentError, DataError, FormatError
from engram.tracking import scores
from engram.tracking.history import History, Record
from engram.tracking.scores import ScoreRows
from streamed import NUM_DATA, backward, batches, build, data


def filled(history: History, updates: int) -> History:
    for step in range(updates):
        history.add(Record(step, 0.5, 1.0 + step), torch.full((7,), float(step)))
    return history


def test_large_scores_go_to_a_file_and_read_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    small = filled(History(), 6)
    monkeypatch.setattr(scores, "MEMORY_BYTES", 3 * 7 * 4)
    large = filled(History(), 6)
    assert small.scores.path is None
    assert large.scores.path is not None
    assert large.score_matrix().equal(small.score_matrix())
    assert large.scores[2].equal(small.scores[2])
    folder = large.scores.folder
    assert folder is not None
    del large
    gc.collect()
    assert not folder.exists()


def test_a_folder_keeps_the_scores_as_they_come(tmp_path: Path) -> None:
    history = filled(History(tmp_path / "run"), 3)
    assert (tmp_path / "run" / scores.FILE).stat().st_size == 3 * 7 * 4
    state = history.state_dict()
    assert "scores" not in state
    filled(history, 2)  # what came after the checkpoint is cut off
    again = History.of_state(state, tmp_path / "run")
    assert again.score_matrix().equal(torch.arange(3.0)[:, None].expand(3, 7))
    (tmp_path / "run" / scores.FILE).unlink()
    with pytest.raises(DataError, match="No such file"):
        History.of_state(state, tmp_path / "run")


def test_other_data_is_refused() -> None:
    rows = ScoreRows()
    rows.append(torch.zeros(3))
    with pytest.raises(DataError, match="3 examples"):
        rows.append(torch.zeros(4))


def test_a_checkpoint_in_the_middle_of_an_epoch_goes_on(tmp_path: Path) -> None:
    plan = batches(3)

    def run(tracker: engram.Tracker, some: list[torch.Tensor]) -> None:
        for batch in some:
            tracker.optimizer.zero_grad()
            with tracker.step(batch):
                backward(tracker.model, batch)
            tracker.optimizer.step()

    model, optimizer = build()
    whole = engram.Tracker(model, optimizer, data())
    run(whole, plan)

    model, optimizer = build()
    first = engram.Tracker(model, optimizer, data())
    run(first, plan[:5])
    parts = {"model": model, "optimizer": optimizer, "tracker": first}
    torch.save({k: v.state_dict() for k, v in parts.items()}, tmp_path / "checkpoint.pt")

    model, optimizer = build()
    second = engram.Tracker(model, optimizer, data())
    found = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    for name, part in {"model": model, "optimizer": optimizer, "tracker": second}.items():
        part.load_state_dict(found[name])
    assert second.stream.epoch.seen == first.stream.epoch.seen == 16
    run(second, plan[5:])
    pd.testing.assert_frame_equal(second.history.to_frame(), whole.history.to_frame())
    found, expected = second.history.score_matrix(), whole.history.score_matrix()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert second.stream.steps == whole.stream.steps


def test_a_record_survives_with_its_gaps(tmp_path: Path) -> None:
    history = History()
    history.add(Record(3, 0.1, math.nan, leverage=(0.1, 0.2, 0.3, 0.4, 0.5)), torch.ones(2))
    history.add(Record(4, 0.1, 0.2, streamed=True), torch.ones(2))
    history.save(tmp_path)
    first, second = engram.load(tmp_path).records
    assert math.isnan(first.estimate)
    assert first.leverage == (0.1, 0.2, 0.3, 0.4, 0.5)
    assert second.streamed


def test_other_data_cannot_be_resumed() -> None:
    model, optimizer = build()
    state = engram.Tracker(model, optimizer, data()).state_dict()
    x, y = data()
    other = engram.Tracker(model, optimizer, (x[:5], y[:5]))
    with pytest.raises(DataError, match="5 examples"):
        other.load_state_dict(state)


def test_memory_is_flat_over_a_thousand_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own memory and that of the process, from the 200th update to the 1000th."""
    monkeypatch.setattr(scores, "MEMORY_BYTES", 100 * NUM_DATA * 4)
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=0.1)
    tracker = engram.Tracker(model, optimizer, data())
    backward(model, torch.arange(NUM_DATA))
    optimizer.step()
    tracemalloc.start()
    seen = {}
    try:
        for number in range(1, 1001):
            if number % 50 == 0:
                tracker.update(step=number)
            else:
                with tracker.step(torch.arange(NUM_DATA)):
                    backward(model, torch.arange(NUM_DATA))
                optimizer.zero_grad()
            if number in (200, 1000):
                gc.collect()
                seen[number] = (
                    tracemalloc.get_traced_memory()[0],
                    psutil.Process().memory_info().rss,
                )
    finally:
        tracemalloc.stop()
    assert len(tracker.history) == 1000
    assert tracker.history.score_matrix().shape == (1000, NUM_DATA)
    assert seen[1000][0] - seen[200][0] < 0.5 * 2**20  # 800 records of a few numbers
    assert seen[1000][1] - seen[200][1] < 8 * 2**20


def test_a_run_resumes_in_the_folder_it_wrote_to(tmp_path: Path) -> None:
    state = filled(History(tmp_path), 3).state_dict()
    fresh = History(tmp_path)  # what a new tracker makes before its state is loaded
    assert (tmp_path / scores.FILE).stat().st_size == 3 * 7 * 4
    again = filled(History.of_state(state, tmp_path), 1)
    assert again.score_matrix()[:, 0].tolist() == [0.0, 1.0, 2.0, 0.0]
    del again, fresh
    filled(History(tmp_path), 1)
    assert (tmp_path / scores.FILE).stat().st_size == 7 * 4


def test_a_second_writer_does_not_break_a_live_one(tmp_path: Path) -> None:
    live = filled(History(tmp_path), 2)
    with pytest.raises(DataError, match="no other tracker"):
        filled(History(tmp_path), 1)
    filled(live, 1)
    assert live.score_matrix()[:, 0].tolist() == [0.0, 1.0, 0.0]
    History.of_state(live.state_dict(), tmp_path)  # takes over, and cuts nothing
    assert live.score_matrix().shape == (3, 7)


def test_everything_is_saved_without_pickle(tmp_path: Path) -> None:
    settings = {"posterior": "kronecker", "prior_precision": 1.0, "average": 0.5}
    model, optimizer = build()
    tracker = engram.Tracker(model, optimizer, data(), **settings)
    tracker.update()
    with tracker.step(torch.arange(8)):
        backward(model, torch.arange(8))
    tracker.save(tmp_path / "saved")
    again = engram.Tracker(model, optimizer, data(), folder=tmp_path / "run", **settings)
    again.resume(tmp_path / "saved")
    assert again.history.scores.folder == tmp_path / "run"
    assert again.history.score_matrix().equal(tracker.history.score_matrix())
    assert again.stream.epoch.seen == 8
    assert again.source.averaged is not None
    assert again.source.averaged.updates == tracker.source.averaged.updates == 2
    assert all(
        again.source.averaged.sums[k].equal(v) for k, v in tracker.source.averaged.sums.items()
    )
    with again.step(torch.arange(8, 16)):
        backward(model, torch.arange(8, 16))
    assert again.source.averaged.updates == 2
    x, y = data()
    other = engram.Tracker(model, optimizer, (x[:5], y[:5]), folder=tmp_path / "run", **settings)
    with pytest.raises(DataError, match="5 examples"):
        other.resume(tmp_path / "saved")
    assert again.history.score_matrix().equal(tracker.history.score_matrix())


@pytest.mark.parametrize("found", [torch.zeros(2), torch.tensor(3), True, None, "3", [3]])
def test_a_format_that_is_no_number_is_refused(found: object) -> None:
    with pytest.raises(FormatError, match="a history in format"):
        History.of_state({"format": found, "records": [], "width": 0})


def test_leave_one_out_losses_are_kept_over_time(tmp_path: Path) -> None:
    rows = torch.arange(12.0).reshape(4, 3)
    rows[1, 0] = rows[:, 2] = math.nan
    for folder in (None, tmp_path / "run"):
        history = History(folder)
        for step, row in enumerate(rows):
            history.add(Record(step, 0.5, 1.0), torch.zeros(3), row)
        state = history.state_dict()
        history.save(tmp_path / "saved")
        for again in (history, engram.load(tmp_path / "saved"), History.of_state(state, folder)):
            torch.testing.assert_close(again.loo_loss, rows, equal_nan=True)
            mean = again.mean_loo_loss()
            torch.testing.assert_close(
                mean, torch.tensor([5.0, 5.5, math.nan]), equal_nan=True, rtol=0, atol=0
            )
            assert again.mean_loo_loss(first=1, last=2).tolist()[:2] == [6.0, 5.5]
        with pytest.raises(ArgumentError, match="none of the 4 from 7 to the end"):
            history.mean_loo_loss(first=7)


def test_a_state_without_leave_one_out_losses_is_read() -> None:
    state = filled(History(), 3).whole_state()
    del state["loo_loss"]
    again = filled(History.of_state(state), 1)
    assert again.loo_loss.shape == (4, 7)
    assert again.loo_loss.isnan().all()


def test_a_tracker_keeps_leave_one_out_losses() -> None:
    model, optimizer = build()
    tracker = engram.Tracker(model, optimizer, data())
    found = []
    for number, batch in enumerate(batches(2)):
        optimizer.zero_grad()
        with tracker.step(batch):
            backward(model, batch)
        optimizer.step()
        if tracker.last_epoch is not None and len(tracker.history) > len(found):
            found.append(tracker.last_epoch.loo_loss.clone())
        if number == 5:
            result = tracker.update()
            assert result is not None
            found.append(result.loo_loss.float())
    assert len(found) == len(tracker.history) > 1
    torch.testing.assert_close(tracker.history.loo_loss, torch.stack(found), equal_nan=True)
    torch.testing.assert_close(
        tracker.mean_loo_loss(), torch.stack(found).nanmean(0), equal_nan=True
    )
