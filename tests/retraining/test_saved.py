"""A saved retraining or verification comes back the same, and a damaged one does not come back."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import engram
from engram.errors import StorageError
from engram.evidence.correlation import agreement
from retraining_problems import PRIOR_PRECISION, RIDGE, ridge_problem
from saved_folders import edit, files_of


@pytest.fixture(scope="module")
def truth() -> engram.Retraining:
    model, x, y = ridge_problem()
    found = engram.retrain(
        model, (x, y), [1, 2, 5], train="newton", likelihood=RIDGE, keep_models=True,
        prior_precision=PRIOR_PRECISION, evaluate_on=(x, y), progress=False,
    )  # fmt: skip
    return replace(found, provenance={**found.provenance, "seed": torch.ones(1).numpy()[0]})


@pytest.fixture(scope="module")
def verification(truth: engram.Retraining) -> engram.Verification:
    strata = torch.tensor([0, 1, 2])
    score = agreement(truth.score, truth.score)
    return engram.Verification(truth.score, truth.increase, strata, score, score, truth)


def test_a_verification_is_one_thing_with_its_truth(
    verification: engram.Verification, tmp_path: Path
) -> None:
    read = engram.load(verification.save(tmp_path))
    assert repr(read) == repr(verification)
    assert read.to_frame().equals(verification.to_frame())
    assert len(list(tmp_path.iterdir())) == 2


def test_what_cannot_be_saved_leaves_the_old_one(
    truth: engram.Retraining, verification: engram.Verification, tmp_path: Path
) -> None:
    truth.save(tmp_path)
    verification.save(tmp_path)
    before = files_of(tmp_path)
    bad = replace(truth, score=truth.score * math.nan)
    for one in (bad, replace(truth, provenance={"train": print}), replace(verification, truth=bad)):
        with pytest.raises(StorageError):
            one.save(tmp_path)
    with pytest.raises(StorageError):
        replace(verification, strata=torch.tensor([0, 1, 3])).save(tmp_path)
    assert files_of(tmp_path) == before


CHANGES = [
    lambda content: content.update(kind="others"),
    lambda content: content.update(kind=3),
    lambda content: content.update(labels=["1", "2"]),
    lambda content: content.update(labels="123"),
    lambda content: content.pop("score"),
    lambda content: content.update(score=None),
    lambda content: content.update(more=1),
    lambda content: content.update(noise_floor={}),
    lambda content: content["noise_floor"].update(drift={"float": "nan"}),
    lambda content: content["noise_floor"].update(refits=-1),
    lambda content: content["noise_floor"].update(refits="3"),
    lambda content: content.update(evaluation_loss=None),
    lambda content: content.update(parameters=[]),
    lambda content: content.update(parameters={"weight": 3}),
    lambda content: content.update(provenance="none"),
]
TENSORS = [
    lambda tensors: tensors["score"].fill_(math.nan),
    lambda tensors: tensors["outputs"].fill_(math.inf),
    lambda tensors: tensors["parameters/weight"].fill_(math.nan),
    lambda tensors: tensors["evaluation_loss"].fill_(math.nan),
    lambda tensors: tensors["owners"].fill_(3),
    lambda tensors: tensors["indices"].fill_(-1),
    lambda tensors: tensors.update(indices=tensors["indices"].float()),
    lambda tensors: tensors.update(score=tensors["score"][:2].clone()),
    lambda tensors: tensors.update(seconds=tensors["seconds"][:2].clone()),
    lambda tensors: tensors.update(deviation=tensors["deviation"].flatten()),
    lambda tensors: tensors.update(targets=tensors["targets"][:1].clone()),
    lambda tensors: tensors.update({"parameters/weight": torch.ones(())}),
    lambda tensors: tensors.update(evaluation_loss_with=torch.ones(2, 3)),
]


@pytest.mark.parametrize("change", CHANGES)
def test_wrong_fields_are_refused(truth: engram.Retraining, tmp_path: Path, change: Any) -> None:
    edit(truth.save(tmp_path), "retraining", change)
    with pytest.raises(StorageError):
        engram.load(tmp_path)


@pytest.mark.parametrize("change", TENSORS)
def test_wrong_tensors_are_refused(truth: engram.Retraining, tmp_path: Path, change: Any) -> None:
    edit(truth.save(tmp_path), "retraining", change_tensors=change)
    with pytest.raises(StorageError):
        engram.load(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["score"].pop("slope"),
        lambda content: content["score"]["slope"].update(value=None),
        lambda content: content["truth"].pop("loss"),
        lambda content: content["truth"]["noise_floor"].update(drift=-1.0),
        lambda content: content.update(truth=[]),
    ],
)
def test_wrong_verifications_are_refused(
    verification: engram.Verification, tmp_path: Path, change: Any
) -> None:
    edit(verification.save(tmp_path), "verification", change)
    with pytest.raises(StorageError):
        engram.load(tmp_path)


@pytest.mark.parametrize("name", ["strata", "estimated_score", "truth/score"])
def test_verifications_with_other_rows_are_refused(
    verification: engram.Verification, tmp_path: Path, name: str
) -> None:
    def shorten(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name][:2].clone()

    edit(verification.save(tmp_path), "verification", change_tensors=shorten)
    with pytest.raises(StorageError):
        engram.load(tmp_path)
