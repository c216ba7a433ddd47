"""engram.load reads every kind and names what is none; columns that do not fit are refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import engram
import saved_things
from engram.core.storage.kinds import (
    KINDS,
    Column,
    anything,
    check_numbers,
    flags,
    numbers,
    positions,
)
from engram.errors import ArgumentError, ModelMismatchError, StorageError
from engram.likelihoods import from_loss
from engram.likelihoods.remembered import Remembered
from engram.tracking.history import History

CLASSES = {
    "result": (saved_things.result, engram.Result),
    "posterior": (lambda: saved_things.posterior("kronecker"), engram.Posterior),
    "assessment": (saved_things.assessed, engram.Assessment),
    "retraining": (saved_things.retrained, engram.Retraining),
    "subset_truth": (saved_things.subset_truth, engram.SubsetTruth),
    "verification": (saved_things.verified, engram.Verification),
    "certificate": (saved_things.certified, engram.Certificate),
    "tuning": (saved_things.tuned, engram.Tuning),
    "training": (saved_things.recorded, engram.Training),
    "history": (lambda: saved_things.followed().history, History),
    "tracker": (saved_things.followed, dict),
}


def test_every_kind_is_known() -> None:
    assert set(KINDS) - {"run"} == set(CLASSES)  # an audit's run has tests of its own


@pytest.mark.parametrize("name", CLASSES)
def test_a_folder_comes_back_as_what_was_saved(name: str, tmp_path: Path) -> None:
    make, kind = CLASSES[name]
    assert type(engram.load(make().save(tmp_path))) is kind
    assert type(engram.load(str(tmp_path / f"{name}.json"))) is kind
    assert (tmp_path / f"{name}.json").is_file()


def test_the_state_of_a_tracker_is_gone_on_with(tmp_path: Path) -> None:
    first, second = saved_things.followed(), saved_things.tracker()
    second.load_state_dict(engram.load(first.save(tmp_path)))
    assert len(second.history) == len(first.history)


def test_of_several_things_one_is_named(tmp_path: Path) -> None:
    posterior = saved_things.posterior("diagonal")
    posterior.save(tmp_path)
    saved_things.result().save(tmp_path)
    with pytest.raises(StorageError, match=r"got posterior\.json and result\.json.*name one"):
        engram.load(tmp_path)
    assert engram.load(tmp_path / "posterior.json").digest == posterior.digest


def test_a_folder_of_something_else_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        StorageError, match=r"assessment\.json, .*verification\.json; got .*No such"
    ):
        engram.load(tmp_path / "nowhere")
    with pytest.raises(StorageError, match="none of them"):
        engram.load(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(StorageError, match=r"with manifest\.json"):
        engram.load(tmp_path)
    with pytest.raises(StorageError, match="Not a directory"):
        engram.load(tmp_path / "manifest.json")
    with pytest.raises(StorageError, match=r"a folder written by result\.save"):
        engram.load(tmp_path / "result.json")


def squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs[:, 0] - targets).square()


def halved(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return squared(outputs, targets) / 2


def test_a_likelihood_that_is_a_function_is_given_again(tmp_path: Path) -> None:
    model, data = torch.nn.Linear(3, 1), (torch.randn(9, 3), torch.randn(9))
    posterior = engram.laplace(
        model, data, likelihood=from_loss(squared), progress=False, prior_precision=1.0
    )
    result = engram.sensitivities(model, data, posterior, progress=False)
    posterior.save(tmp_path / "posterior")
    result.save(tmp_path / "result")
    assert isinstance(engram.load(tmp_path / "posterior").likelihood, Remembered)
    assert isinstance(engram.load(tmp_path / "result").basis.likelihood, Remembered)
    own = from_loss(squared)
    read = engram.load(tmp_path / "posterior", likelihood=own)
    assert read.likelihood is own
    assert engram.load(tmp_path / "result", likelihood=own).basis.likelihood is own
    again = engram.sensitivities(model, data, read, progress=False)
    torch.testing.assert_close(again.loo_loss, result.loo_loss)
    for folder in ("posterior", "result"):
        with pytest.raises(ModelMismatchError, match="halved"):
            engram.load(tmp_path / folder, likelihood=from_loss(halved))


def test_a_likelihood_for_what_has_none_is_refused(tmp_path: Path) -> None:
    folder = saved_things.followed().history.save(tmp_path)
    with pytest.raises(ArgumentError, match="likelihood= for a history"):
        engram.load(folder, likelihood="categorical")


ROWS = torch.arange(3)


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        (numbers("N"), torch.ones(2), r"shape \[3\].*shape \[2\]"),
        (numbers("N K"), torch.ones(3), r"shape \[3, K\]"),
        (numbers("N K"), torch.ones(3, 0), r"shape \[3, 0\]"),
        (numbers("N"), torch.ones(3, 1), r"shape \[3, 1\]"),
        (numbers("N ..."), torch.ones(()), r"shape \[3, \.\.\.\]"),
        (numbers("N"), torch.ones(3).long(), "of floating-point numbers; got torch.int64"),
        (numbers("N"), torch.tensor([1.0, math.nan, 2.0]), "1 of 3 numbers NaN"),
        (numbers("N", low=0), torch.tensor([1.0, -1.0, 2.0]), "from 0"),
        (positions("N"), torch.tensor([1, -1, 2]), "from 0"),
        (positions("N", below=2), ROWS, "to below 2"),
        (positions("N", below="N"), ROWS + 1, "to below 3"),
        (positions("N"), ROWS.int(), "torch.int32"),
        (flags("N"), ROWS, "torch.int64"),
        (anything("N"), ("a", "b"), r"shape \[2\]"),
        (numbers("N"), {"weight": torch.ones(2)}, "column of 'weight'"),
    ],
)
def test_columns_that_do_not_fit_are_refused(column: Column, value: Any, words: str) -> None:
    with pytest.raises(StorageError, match=words):
        column.check("column", value, {"N": 3})


@pytest.mark.parametrize(
    ("column", "value"),
    [
        (numbers("N K"), torch.ones(3, 2, dtype=torch.float16)),
        (numbers("N", finite=False), torch.tensor([1.0, math.nan, 2.0])),
        (numbers("N ..."), torch.ones(3)),
        (numbers("N ..."), torch.ones(3, 4, 0)),
        (numbers("..."), torch.ones(())),
        (positions("N", below="N"), ROWS),
        (anything("N"), torch.ones(3, dtype=torch.complex64)),
        (anything("N"), ("a", "b", "c")),
        (numbers("N"), None),
        (numbers("N"), {}),
    ],
)
def test_columns_that_fit(column: Column, value: Any) -> None:
    column.check("column", value, {"N": 3})


def test_axes_of_one_name_have_one_length() -> None:
    lengths: dict[str, int] = {}
    numbers("N K").check("outputs", torch.ones(4, 2), lengths)
    assert lengths == {"N": 4, "K": 2}
    with pytest.raises(StorageError, match=r"deviation of shape \[4, 2\]"):
        numbers("N K").check("deviation", torch.ones(2, 4), lengths)


def test_numbers_of_a_shape() -> None:
    check_numbers("the mean", torch.ones(2), (2,))
    for value in (torch.ones(3), torch.ones(2).long(), torch.ones(2) / 0):
        with pytest.raises(StorageError, match="the mean"):
            check_numbers("the mean", value, (2,))
