"""Shares of work by hand and from the environment."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from engram.core.processes.group import Processes
from engram.core.processes.shares import Share
from engram.errors import ArgumentError

VARIABLES = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Share(0, 1)),
        ({"RANK": "2", "WORLD_SIZE": "3"}, Share(2, 3)),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}, Share(1, 4)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, Share(0, 1)),  # a batch script, not its steps
    ],
)
def test_the_environment_says_which(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: Share
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert Share.chosen() == expected


def test_who_is_told_its_share_waits_for_nobody() -> None:
    assert Share.chosen((1, 3)) == Share(1, 3, at_once=False)


@pytest.mark.parametrize("given", [(3, 3), (-1, 2), (0, 0), "first", 3, (1, 2, 3)])
def test_what_is_no_share_is_refused(given: Any) -> None:
    with pytest.raises(ArgumentError, match="counted from 0"):
        Share.chosen(given)


def test_shares_are_all_of_the_work_and_nothing_twice() -> None:
    for count in (1, 2, 3, 7):
        rows = [Processes(rank, count).rows(5).tolist() for rank in range(count)]
        assert list(chain.from_iterable(rows)) == list(range(5))
        shares = [Share(number, count).of(list(range(5))) for number in range(count)]
        assert sorted(chain.from_iterable(shares)) == list(range(5))


def test_the_largest_piece_of_work_goes_first() -> None:
    owners = Processes(0, 2).shares([1.0, 8.0, 2.0, 4.0])
    assert owners == [1, 0, 1, 1]
