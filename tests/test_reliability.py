"""A few signals of each kind; ``python -m benchmarks.reliability`` sends hundreds."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from benchmarks.reliability.signals import interrupts, kills
from benchmarks.reliability.works import Work, works

NAMES = (
    *("sensitivities", "influence", "retrain, a recipe", "retrain, a function"),
    *("Tracker.save", "Result.save", "Posterior.save"),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reliability")


@pytest.fixture(scope="module")
def made(place: Path) -> dict[str, Work]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        return {work.name: work for work in works(place / "scratch", seed=1)}


def test_every_work_is_listed(made: dict[str, Work]) -> None:
    assert tuple(made) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_signal_leaves_everything_as_it_was(
    name: str, made: dict[str, Work], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    random = Random(name)
    folder = place / "folder"
    outcomes = interrupts(made[name], folder, 2, random) + kills(made[name], folder, 1, random)
    assert [outcome for outcome in outcomes if outcome.fault] == []
