"""Ctrl-C at many moments of a streamed step: nothing is left, and the next step runs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import engram
from interrupting import condition, moments, surroundings, watched
from streamed import BATCH, backward, build, data

FIRST = torch.arange(BATCH)
SUSPENDED = ("hooked", "recording", "during", "step")  # a generator that yields takes no signal


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("tanh", {}),
        ("bare parameter", {}),
        ("tanh", {"held_out": 4}),
        ("tanh", {"posterior": "kronecker", "prior_precision": 1.0}),
    ],
    ids=["tape", "again", "held out", "fitted"],
)
def test_an_interrupted_step_leaves_everything_as_it_was(
    name: str, settings: dict[str, Any]
) -> None:
    model, optimizer = build(name)
    backward(model, FIRST)
    optimizer.step()
    tracker = engram.Tracker(model, optimizer, data(), **settings)

    def begun() -> AbstractContextManager[None]:
        return tracker.step(FIRST)

    def step() -> None:
        with begun():
            backward(model, FIRST)

    step()
    seen, interrupted = watched(step)[0], 0
    for moment in [n for n in moments(step, 30, 30) if seen[n] not in SUSPENDED]:
        before = surroundings(), condition(model)
        interrupted += watched(step, moment)[1]
        assert (surroundings(), condition(model)) == before
        tracker.steps.check_outside("another step")
    assert interrupted > 25
    step()
