"""Views of examples: the same for the same example, and drawing them disturbs nothing else."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from engram.core.data.batches import Batch
from engram.engine.views import Views
from engram.errors import ArgumentError


def noisy(inputs: Tensor) -> Tensor:
    """With noise of all three sources of random numbers."""
    shift = random.random() + float(np.random.random())
    return inputs + torch.rand(len(inputs), 1) + shift


def batch(indices: Tensor) -> Batch:
    return Batch(indices, (torch.zeros(len(indices), 2), indices.float()), indices)


def test_a_view_depends_on_seed_and_example_alone() -> None:
    views = Views(noisy, seed=3)
    whole = views.of(batch(torch.arange(6))).inputs
    part = views.of(batch(torch.tensor([4, 2]))).inputs
    assert isinstance(whole, tuple)
    assert isinstance(part, tuple)
    assert torch.equal(part[0], whole[0][[4, 2]])
    assert torch.equal(part[1], torch.tensor([4.0, 2.0]))
    assert len(whole[0][:, 0].unique()) == 6
    other = Views(noisy, seed=4).of(batch(torch.arange(6))).inputs
    assert isinstance(other, tuple)
    assert not torch.isclose(other[0], whole[0]).any()


def test_the_random_state_is_as_before() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    Views(noisy, seed=0).of(batch(torch.arange(3)))
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])


def test_half_of_the_examples_are_flipped_and_others_each_time() -> None:
    def flipped(inputs: Tensor) -> Tensor:
        return -inputs if torch.rand(()) < 0.5 else inputs

    ones = Batch(torch.arange(2000), (torch.ones(2000, 1),), torch.zeros(2000))
    first, second = (Views(flipped, seed).of(ones).inputs[0][:, 0] for seed in (0, 1))
    for found in (first, second):
        assert abs(float(found.mean())) < 0.1
    assert abs(float((first * second).mean())) < 0.1


@pytest.mark.parametrize(
    ("inputs", "augment", "words"),
    [
        ((torch.zeros(2, 3),), lambda x: x[:, :2], r"a view of shape \[1, 3\] from augment"),
        ((torch.zeros(2, 3),), lambda x: (x, x), "got tuple"),
        ((torch.zeros(2, 3, dtype=torch.long),), lambda x: x, "inputs of torch.int64"),
        ({"input_ids": torch.zeros(2, 3)}, lambda x: x, "got dict"),
    ],
)
def test_what_is_no_view_is_refused(inputs, augment, words) -> None:
    with pytest.raises(ArgumentError, match=words):
        Views(augment, 0).of(Batch(torch.arange(2), inputs, torch.zeros(2)))
