"""The state of a tracker in a folder: one thing, its history and all its parts together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engram.core.errors import DataError, StorageError
from engram.core.storage.kinds import Kind, stored
from engram.tracking.history import History

if TYPE_CHECKING:
    from engram.tracking.tracker import Tracker

PARTS = ("history", "stream", "source")
OPTIONAL = ("held_out",)


def check_state(state: Any) -> dict[str, Any]:
    """StorageError for what is not the state of a tracker."""
    names = set(state) if isinstance(state, Mapping) else set()
    missing = [part for part in PARTS if part not in names]
    unknown = sorted(map(str, names - {*PARTS, *OPTIONAL}))
    if missing or unknown:
        raise StorageError(
            f"a tracker's state_dict() with {', '.join(PARTS)}",
            f"one without {', '.join(missing)}" if missing else f"one with {', '.join(unknown)}",
            "load what tracker.state_dict() gave",
        )
    return dict(state)


def parts_of(tracker: Tracker) -> dict[str, Any]:
    """The state of everything but the history."""
    names = ("stream", "source", "held_out")
    return {n: getattr(tracker, n).state_dict() for n in names if getattr(tracker, n) is not None}


def go_on(tracker: Tracker, state: Mapping[str, Any]) -> History:
    """Load every part and give the history; where one is refused, everything is as before."""
    before, held = parts_of(tracker), dict(vars(tracker.source))
    try:
        _load_parts(tracker, state)
        return History.of_state(state["history"], tracker.folder, tracker.num_data)
    except BaseException:
        _load_parts(tracker, before)
        vars(tracker.source).update(held)  # with what its state does not hold
        raise


def _load_parts(tracker: Tracker, state: Mapping[str, Any]) -> None:
    tracker.stream.load_state_dict(state["stream"])
    tracker.source.load_state_dict(state["source"])
    if tracker.held_out is not None:
        tracker.held_out.load_state_dict(state.get("held_out", {}))
    elif "held_out" in state:
        raise DataError(
            "the state of a tracker without held-out examples",
            "that of one with them",
            "resume with the held_out= that the run was started with",
        )


def _state(state: Any, where: str) -> Mapping[str, Any]:
    return check_state(state)


KIND: Kind[Mapping[str, Any]] = stored(Kind("tracker", 2, _state, content=dict))
