"""Progress bars: made only when there is something to show, so that no lock is left taken."""

from __future__ import annotations

import sys
import time
from functools import partial

import pytest
from tqdm import tqdm

import engram.core.progress
from engram.core.progress import Bar, progress_over


def locks_are_free() -> bool:
    """Whether another thread could make a bar: tqdm's locks belong to the process."""
    taken = [lock._is_owned() for lock in tqdm.get_lock().locks if hasattr(lock, "_is_owned")]
    return bool(taken) and not any(taken)


class Interrupted:
    """Raises where a bar that is not due would take the locks of the process."""

    def __init__(self, *args: object, **settings: object) -> None:
        raise KeyboardInterrupt


def test_a_short_loop_makes_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engram.core.progress, "tqdm", Interrupted)
    assert list(progress_over(range(5), "short", shown=True)) == [0, 1, 2, 3, 4]
    assert locks_are_free()


def test_a_bar_that_is_not_shown_is_never_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engram.core.progress, "tqdm", Interrupted)
    monkeypatch.setattr(engram.core.progress, "DELAY", 0.0)
    assert list(progress_over(iter("ab"), "hidden", shown=False, total=2)) == ["a", "b"]


def test_bars_that_the_environment_has_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """With TQDM_DISABLE a bar has no clock, no words and no colours."""
    monkeypatch.setattr(engram.core.progress, "DELAY", 0.0)
    monkeypatch.setattr(engram.core.progress, "tqdm", partial(tqdm, disable=True))
    with Bar(2, "off", shown=True) as bar:
        time.sleep(1e-3)
        bar.update()
        bar.tell("more")
        bar.describe("still off")
        bar.update()
    assert bar.count == 2


def test_a_long_loop_shows_all_that_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engram.core.progress, "DELAY", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Bar(4, "counting", shown=True) as bar:
        for _ in range(3):
            time.sleep(0.11)  # tqdm draws ten times a second
            bar.update()
        bar.describe("still counting")
        bar.update()
    drawn = capsys.readouterr().err
    assert "counting:  50%" in drawn
    assert "2/4" in drawn
    assert bar.count == 4
    assert locks_are_free()


def test_a_file_is_not_filled_with_bars(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engram.core.progress, "DELAY", 0.0)
    with Bar(40, "counting", shown=True) as bar:
        for _ in range(40):
            time.sleep(0.02)
            bar.update()
    assert capsys.readouterr().err.count("counting") == 1


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("total", "form", "words"),
    [
        (100, None, "sensitivities: about 5 min in all, with"),  # 3 s each
        (15, None, ""),  # 45 s: no need to say
        (None, None, ""),  # nobody knows
        (100, "{desc}", ""),  # says it by itself
    ],
)
def test_what_takes_longer_than_a_minute_is_said_once(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    total: int | None,
    form: str | None,
    words: str,
) -> None:
    clock = Clock()
    monkeypatch.setattr(engram.core.progress.time, "monotonic", clock.monotonic)
    monkeypatch.setattr(engram.core.progress, "DELAY", 1e9)
    with Bar(total, "sensitivities", True, form) as bar:
        for _ in range(10):
            clock.now += 3.0
            bar.update()
    said = capsys.readouterr().err
    assert said.count("in all") == bool(words)
    assert words in said


def test_nothing_is_said_where_nothing_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(engram.core.progress.time, "monotonic", clock.monotonic)
    with Bar(1000, "sensitivities", False) as bar:
        clock.now += 100.0
        bar.update()
    assert capsys.readouterr().err == ""
