"""Numbers given as arguments: what is one, and what is said of what is not."""

import numpy as np
import pytest
import torch

from engram.core.arguments import fraction, positive, seed_number, whole
from engram.errors import ArgumentError
from refusal import Refusal

NOT_WHOLE = [True, 1.0, np.float64(2.0), float("nan"), "3", None, [3], torch.tensor(2.5), 1 + 0j]


@pytest.mark.parametrize("kind", [int, np.int64, np.int32, np.uint8])
def test_integers_of_every_kind_are_integers(kind):
    found = whole("rounds", kind(3))
    assert found == 3
    assert type(found) is int


@pytest.mark.parametrize("value", [*NOT_WHOLE, 0, -1, np.int64(0), 6])
def test_what_is_no_integer_in_range(value):
    with Refusal(ArgumentError, "whole rounds", "from 1 to 5", r"use rounds=1"):
        whole("rounds", value, 1, 5)


@pytest.mark.parametrize("value", [*NOT_WHOLE, -1, 2**64])
def test_what_is_no_seed(value):
    with Refusal(ArgumentError, "seed"):
        seed_number(value)


@pytest.mark.parametrize("value", [2, 0.5, np.float32(0.5), np.int64(1)])
def test_positive_numbers(value):
    assert positive("scale", value) == float(value)
    assert type(positive("scale", value)) is float


@pytest.mark.parametrize(
    "value", [0, -1.0, float("nan"), float("inf"), True, "1", None, [1.0], np.bool_(1), 1 + 0j]
)
def test_what_is_not_positive(value):
    with Refusal(ArgumentError, "positive scale"):
        positive("scale", value)
    with Refusal(ArgumentError, "share between 0 and 1"):
        fraction("share", value)


def test_a_long_value_is_cut():
    with pytest.raises(ArgumentError) as caught:
        whole("rounds", "x" * 10_000)
    assert len(str(caught.value)) < 300
