"""Every number is what it was; ``make golden`` stores what changed on purpose."""

from __future__ import annotations

import pytest
import torch

from golden.stored import FOLDER, differences, read, relative_error
from golden.table import TABLE

SHOWN = 20


@pytest.mark.parametrize("name", TABLE)
def test_every_number_is_what_it_was(name: str) -> None:
    golden = TABLE[name]
    found = differences(golden.record(), read(name), golden.tolerance)
    left_off = [f"and {len(found) - SHOWN} more"] * (len(found) > SHOWN)
    assert not found, "\n".join([f"{name}: {len(found)} changes", *found[:SHOWN], *left_off])


def test_nothing_is_stored_that_is_not_compared() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(TABLE)


def test_errors_are_relative_to_the_largest_entry_and_nan_is_equal_to_nan() -> None:
    expected = torch.tensor([1.0, 4.0, float("nan")])
    assert relative_error(expected, expected) == 0
    assert relative_error(expected + torch.tensor([0, 1.0, 0]), expected) == 0.25
    assert relative_error(expected, expected.nan_to_num(0.0)) == float("inf")
    assert relative_error(expected[:2], expected) == float("inf")
