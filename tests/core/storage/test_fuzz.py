"""Damaged folders: what is read is what was saved, or an error of ours says that it is not.

``make fuzz`` draws many more cases than a run of the tests does.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import engram
import saved_things
from damage import (
    Damage,
    Files,
    bytes_changed,
    files_mixed,
    json_changed,
    signed,
    tensors_changed,
    written,
)
from engram.core.identity.digests import of_tensors
from engram.core.storage.values import taken_apart
from engram.errors import EngramError
from engram.retraining.run_folder import RunFolder
from saved_folders import files_of

EXAMPLES = int(os.environ.get("ENGRAM_FUZZ", "60"))  # of each kind of thing
LONGEST = 20.0  # seconds to read a small folder, on a machine with much else to do
damages = st.one_of(bytes_changed(), files_mixed(), json_changed(), tensors_changed())


@dataclass(frozen=True)
class Kind:
    """Two saves of a kind of thing, and how it is read and looked at."""

    first: Files
    second: Files
    read: Callable[[Path], Any]
    look: Callable[[Any], object]
    told: Callable[[Any], str] = field(default=lambda thing: words(thing))


def words(value: Any) -> str:
    """Equal only for equal values, whatever they are nested in."""
    plain, tensors = taken_apart(value)
    return repr(plain) + of_tensors(tensors)


def saves(*save: Callable[[Path], object]) -> list[Files]:
    found = []
    for one in save:
        with tempfile.TemporaryDirectory() as folder:
            one(Path(folder))
            found.append(files_of(Path(folder)))
    return found


def resumed(folder: Path) -> dict[str, Any]:
    tracker = saved_things.tracker()
    before = words(tracker.state_dict())
    try:
        tracker.resume(folder)
    except BaseException:
        assert words(tracker.state_dict()) == before
        raise
    return tracker.state_dict()


def told_of(found: engram.Posterior) -> str:
    facts = [found.mean, found.prior_precision, found.num_data, found.settings, found.digest]
    return words(facts)


def used(found: engram.Posterior) -> None:
    ones = {name: torch.ones_like(found.mean[name])[None] for name in found.names}
    assert all(value.isfinite().all() for value in found.solve(ones).values())
    assert math.isfinite(found.log_det())
    repr(found)


def of_posterior(structure: str) -> Kind:
    made = saved_things.posterior(structure)
    other = replace(made, num_data=made.num_data + 1)
    return Kind(*saves(made.save, other.save), engram.load, used, told_of)


def of_tracker() -> Kind:
    tracker = saved_things.followed()
    first = saves(tracker.save)
    tracker.update(step=2)
    return Kind(*first, *saves(tracker.save), resumed, lambda state: None)


def of_history() -> Kind:
    history = saved_things.followed().history
    first = saves(history.save)
    history.add(replace(history.records[-1], step=7), history.score_matrix()[0])
    return Kind(
        *first, *saves(history.save), lambda f: engram.load(f).whole_state(), lambda state: None
    )


def of_result() -> Kind:
    made = saved_things.result()
    pair = saves(made.save, replace(made, score=made.score + 1).save)
    return Kind(*pair, engram.load, lambda r: (repr(r), r.to_frame(), r.verdict))


def of_truth() -> Kind:
    made = saved_things.retrained()
    pair = saves(made.save, replace(made, score=made.score + 1).save)
    return Kind(*pair, engram.load, lambda r: (repr(r), r.to_frame()))


def of_verification() -> Kind:
    made = saved_things.verified()
    pair = saves(made.save, replace(made, estimated_score=made.estimated_score + 1).save)
    return Kind(*pair, engram.load, lambda r: (repr(r), r.to_frame()))


def of_certificate() -> Kind:
    made = saved_things.certified()
    pair = saves(made.save, replace(made, guesses=made.guesses + 1).save)
    return Kind(*pair, engram.load, lambda r: (repr(r), r.to_frame()))


def of_assessment() -> Kind:
    made = saved_things.assessed()
    other = replace(made, signals=replace(made.signals, spearman=0.25))
    pair = saves(made.save, other.save)
    return Kind(*pair, engram.load, lambda r: (repr(r), r.to_frame()))


def of_tuning() -> Kind:
    made = saved_things.tuned()
    other = replace(made, state={name: value + 1 for name, value in made.state.items()})
    return Kind(*saves(made.save, other.save), engram.load, lambda t: (repr(t), t.to_frame()), told)


def of_training() -> Kind:
    made, other = saved_things.recorded(), saved_things.recorded()
    other.num_missing_steps = 3
    return Kind(*saves(made.save, other.save), whole, repr, lambda t: words(t.state_dict()))


def whole(folder: Path) -> engram.Training:
    """With its checkpoints read, which is done when they are asked for."""
    found: engram.Training = engram.load(folder)
    found.grid.folder = None
    for snapshot in found.snapshots():
        snapshot.tensors, snapshot.file, snapshot.sha256 = snapshot.read(), None, ""
    return found


def told(found: engram.Tuning) -> str:
    return words([found.trials, found.best, found.state])


KINDS: dict[str, Callable[[], Kind]] = {
    "result": of_result,
    "posterior diagonal": lambda: of_posterior("diagonal"),
    "posterior kronecker": lambda: of_posterior("kronecker"),
    "posterior full": lambda: of_posterior("full"),
    "posterior low_rank": lambda: of_posterior("low_rank"),
    "retraining": of_truth,
    "verification": of_verification,
    "certificate": of_certificate,
    "assessment": of_assessment,
    "training": of_training,
    "tuning": of_tuning,
    "tracker": of_tracker,
    "history": of_history,
}


@cache
def kind_of(name: str) -> Kind:
    return KINDS[name]()


def read(kind: Kind, folder: Path) -> Any:
    """What comes of reading: the thing, or None for an error of ours."""
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            return kind.read(folder)
        except EngramError:
            return None
        finally:
            assert time.monotonic() - began < LONGEST


fuzzed = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize="ENGRAM_FUZZ" not in os.environ,
    database=None,
)


@pytest.mark.parametrize("name", KINDS)
@given(applied=st.lists(damages, min_size=1, max_size=3))
@fuzzed
def test_a_damaged_folder_is_read_as_it_was_or_refused(name: str, applied: list[Damage]) -> None:
    kind = kind_of(name)
    files = dict(kind.first)
    for damage in applied:
        files = damage(files, kind.second)
    with tempfile.TemporaryDirectory() as place:
        found = read(kind, written(Path(place), files))
        if found is None:
            return
        both = [kind.read(written(Path(place), pair)) for pair in (kind.first, kind.second)]
    assert kind.told(found) in [kind.told(saved) for saved in both]


@pytest.mark.parametrize("name", KINDS)
@given(applied=st.lists(st.one_of(json_changed(), tensors_changed()), min_size=1, max_size=2))
@fuzzed
def test_a_folder_that_was_edited_with_care_is_used_or_refused(
    name: str, applied: list[Damage]
) -> None:
    """With checksums that fit, what is read is still checked: nothing of it raises later."""
    kind = kind_of(name)
    files = dict(kind.first)
    for damage in applied:
        files = damage(files, kind.second)
    with tempfile.TemporaryDirectory() as place:
        folder = written(Path(place), files)
        signed(folder)
        found = read(kind, folder)
    if found is not None:
        kind.look(found)


def run_folder(folder: Path) -> RunFolder:
    return RunFolder(folder, "fingerprint", {"seed": 0})


def parts(folder: Path) -> set[str]:
    return {words(part) for _, part in run_folder(folder).parts.values()}


@cache
def run_folders() -> tuple[list[Files], set[str]]:
    """Two folders of one run, and all parts that are in them."""

    def save(number: float) -> Callable[[Path], None]:
        def write(folder: Path) -> None:
            made = run_folder(folder)
            made.write("refits", {"baseline": torch.ones(3), "refit_outputs": torch.ones(2, 3)})
            for copy in range(2):
                rows = torch.full((1, 2), number + copy)
                made.write("copies", {"number": torch.tensor([copy]), "outputs_without": rows})

        return write

    saved = saves(save(1.0), save(5.0))
    with tempfile.TemporaryDirectory() as place:
        known = [parts(written(Path(place), files)) for files in saved]
    return saved, set.union(*known)


@given(applied=st.lists(st.one_of(damages, tensors_changed()), min_size=1, max_size=3))
@fuzzed
def test_a_damaged_run_folder_keeps_what_is_whole(applied: list[Damage]) -> None:
    (first, second), known = run_folders()
    files = dict(first)
    for damage in applied:
        files = damage(files, second)
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says what it sets aside, and trains that again
        try:
            found = parts(written(Path(place), files))
        except EngramError:
            return
    assert found <= known
