"""Trainings shared by forked processes: the same numbers, and failures that come back."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import engram
from engram.errors import ArgumentError, TrainingError
from engram.retraining.processes import check_processes, in_processes
from retraining_problems import RIDGE, ridge_fit, ridge_problem

Data = tuple[Tensor, Tensor]


def shaken(model: nn.Module, data: Data) -> None:
    """A training of which everything is random."""
    with torch.no_grad():
        model.weight.copy_(ridge_fit(*data).T + 0.1 * torch.randn(2, 4))


def failing(model: nn.Module, data: Data) -> None:
    raise ZeroDivisionError("no luck")


def returning_a_number(model: nn.Module, data: Data) -> int:
    return 3


def dying(model: nn.Module, data: Data) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def truth(workers: int, **settings: object) -> engram.SubsetTruth:
    _, x, y = ridge_problem()
    given = {"subsets": 12, "keep": 0.7, "train": shaken, "likelihood": RIDGE} | settings
    return engram.retrain(
        lambda: nn.Linear(4, 2, bias=False).double(), (x, y), workers=workers, progress=False,
        **given,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def nobody_is_left():
    yield
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("workers", [2, 3, 20])
def test_the_same_numbers_as_from_one_process(workers: int) -> None:
    alone, together = truth(1), truth(workers)
    assert torch.equal(alone.outputs, together.outputs)
    assert alone.seeds == together.seeds


def test_a_folder_is_gone_on_with_by_another_number_of_workers(tmp_path: Path) -> None:
    alone = truth(1, folder=tmp_path)
    again = truth(2, subsets=15, folder=tmp_path)
    assert len(list(tmp_path.glob("subsets-*.safetensors"))) == 15
    assert torch.equal(again.outputs[:12], alone.outputs)


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (failing, r"ends without an error.*ZeroDivisionError: no luck \(training \d+\)"),
        (returning_a_number, "got int"),
        (dying, "ended with code -9"),
    ],
)
def test_failures_come_back(train: object, words: str) -> None:
    with pytest.raises(TrainingError, match=words):
        truth(2, train=train)


def test_every_number_is_done_once_by_the_free_process(tmp_path: Path) -> None:
    def work(number: int) -> None:
        time.sleep(0.3 if number == 0 else 0.01)
        (tmp_path / f"{number}-{os.getpid()}").write_text("")

    seen: list[int] = []
    in_processes(range(9), work, 2, lambda: seen.append(1))
    done = [file.name.split("-") for file in tmp_path.iterdir()]
    assert sorted(int(number) for number, _ in done) == list(range(9))
    assert len(seen) == 9
    first = next(process for number, process in done if number == "0")
    assert sum(process == first for _, process in done) < 4


def test_an_interrupt_ends_the_processes() -> None:
    def work(number: int) -> None:
        time.sleep(60)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupted)
    began = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            in_processes([0, 1], work, 2, lambda: None)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < 20


ORPHANED = """
import os, time
from engram.retraining.processes import in_processes

def work(number):
    os.write(1, b"%d\\n" % os.getpid())  # whole lines from both
    time.sleep(0.2)

in_processes(range(1000), work, 2, lambda: None)
"""


def test_processes_end_when_their_parent_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", ORPHANED], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    children = {int(parent.stdout.readline()) for _ in range(4)}
    parent.kill()
    parent.wait()
    rest = parent.stdout.read()  # ends when nobody can write any more
    parent.stdout.close()
    assert len(children) == 2
    assert len(rest.split()) < 10


def test_what_cannot_be_forked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match=r"model on cuda:0.*torchrun"):
        check_processes(2, torch.device("cuda:0"))
    check_processes(1, torch.device("cuda:0"))
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    with pytest.raises(ArgumentError, match="cannot fork"):
        check_processes(2, torch.device("cpu"))
