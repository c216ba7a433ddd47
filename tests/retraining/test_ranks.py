"""Processes that cannot be right are refused at once; waiting has a limit, and says for whom."""

import os
import time

import pytest
import torch

import engram
from engram.errors import ArgumentError, RunFolderError
from engram.retraining import run_folder
from engram.retraining.run_folder import Patience, Ranks, RunFolder, wait_until_done
from retraining_problems import RIDGE, ridge_problem


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "3", "WORLD_SIZE": "2"}, "RANK=3 and WORLD_SIZE=2"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 and WORLD_SIZE=2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({"RANK": "0", "WORLD_SIZE": "-4"}, "WORLD_SIZE=-4"),
        ({"RANK": "1"}, "RANK=1 and WORLD_SIZE=1"),
        ({"WORLD_SIZE": "2"}, "RANK, from 0 to 1"),
        ({"RANK": "first", "WORLD_SIZE": "2"}, "whole number in the environment's RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2.0"}, "environment's WORLD_SIZE; got '2.0'"),
    ],
    ids=str,
)
def test_an_impossible_environment_is_refused_at_once(tmp_path, monkeypatch, environment, words):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    model, x, y = ridge_problem()
    began = time.monotonic()
    with pytest.raises(ArgumentError, match=words):
        engram.retrain(model, (x, y), [0], likelihood=RIDGE, folder=tmp_path, progress=False)
    assert time.monotonic() - began < 10


def test_an_empty_variable_is_as_good_as_none(monkeypatch):
    monkeypatch.setenv("RANK", "")
    monkeypatch.setenv("WORLD_SIZE", " ")
    assert Ranks.of() == Ranks(0, 1)


def test_waiting_names_processes_that_never_came(tmp_path):
    run, ranks = RunFolder(tmp_path, "x", {}), Ranks(0, 4)
    with (
        ranks.taking_part(run),
        Ranks(1, 4).taking_part(run),
        pytest.raises(RunFolderError, match=r"no sign of processes 2, 3 in .* 3 missing"),
    ):
        wait_until_done(lambda: [5, 6, 7], run, ranks, True, Patience(join=0.3, silence=60))


def test_waiting_names_processes_that_fell_silent(tmp_path):
    run, ranks = RunFolder(tmp_path, "x", {}), Ranks(0, 2)
    silent = pytest.raises(RunFolderError, match=r"process 1 to write .*nothing new .* 2 missing")
    with Ranks(1, 2).taking_part(run), silent:
        wait_until_done(lambda: [1, 3], run, ranks, False, Patience(join=0.1, silence=0.4))


def test_waiting_ends_when_the_last_part_comes(tmp_path):
    run, other = RunFolder(tmp_path, "x", {}), RunFolder(tmp_path, "x", {})
    names = ("number", "outputs_without", "gradient_norm", "wanted_norm")
    other.write("copies", dict.fromkeys(names, torch.ones(1)))

    def missing():
        return [] if run.of_kind("copies") else [1]

    wait_until_done(missing, run, Ranks(0, 2), False, Patience(join=5, silence=5))
    assert not missing()


def test_a_process_takes_its_sign_away_however_it_ends(tmp_path):
    run = RunFolder(tmp_path, "x", {})

    def interrupted():
        with Ranks(1, 2).taking_part(run):
            assert Ranks(0, 2).absent(run, [1]) == []
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert Ranks(0, 2).absent(run, [1]) == [1]


def test_tasks_that_run_one_after_the_other_share_a_folder(tmp_path):
    model, x, y = ridge_problem()
    given = {"likelihood": RIDGE, "progress": False}

    def task(number):
        share = (number, 3)
        return engram.retrain(model, (x, y), [0, 1, 2, 5], folder=tmp_path, share=share, **given)

    for number in (2, 0):  # in any order
        with pytest.raises(RunFolderError, match=r"all copies.*process.* of 3.*share is done"):
            task(number)
    whole = task(1)
    expected = engram.retrain(model, (x, y), [0, 1, 2, 5], **given)
    torch.testing.assert_close(whole.deviation, expected.deviation)
    again = engram.retrain(model, (x, y), [0, 1, 2, 5], folder=tmp_path, **given)
    assert torch.equal(again.deviation, whole.deviation)
    with pytest.raises(ArgumentError, match="counted from 0"):
        engram.retrain(model, (x, y), [0], folder=tmp_path, share=(3, 3), **given)
    with pytest.raises(ArgumentError, match="folder="):
        engram.retrain(model, (x, y), [0], share=(0, 3), **given)


def test_a_step_of_slurm_says_which_share(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert Ranks.of() == Ranks(1, 4)


def test_a_sign_that_is_not_kept_fresh_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(run_folder, "BEAT_SECONDS", 0.01)
    run = RunFolder(tmp_path, "x", {})
    killed = tmp_path / "process-1-of-2"  # nobody is left who could take it away
    killed.write_text("")
    past = time.time() - 1.0
    os.utime(killed, (past, past))
    absent = pytest.raises(RunFolderError, match="no sign of process 1")
    with Ranks(0, 2).taking_part(run), absent:
        wait_until_done(lambda: [1], run, Ranks(0, 2), False, Patience(join=0.1, silence=60))
