"""A saved result comes back the same, and a damaged one does not come back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import engram
from engram.errors import StorageError
from saved_folders import edit, files_of


@pytest.fixture(scope="module")
def result() -> engram.Result:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    data = (torch.randn(20, 4), torch.randint(3, (20,)))
    posterior = engram.laplace(model, data, prior_precision=1.0, progress=False)
    return engram.sensitivities(model, data, posterior, progress=False)


def test_everything_comes_back(result: engram.Result, tmp_path: Path) -> None:
    read = engram.load(result.save(tmp_path))
    assert repr(read) == repr(result)
    for field in fields(result):
        written, found = getattr(result, field.name), getattr(read, field.name)
        if isinstance(written, Tensor):
            torch.testing.assert_close(found, written, rtol=0, atol=0, equal_nan=True)
    assert read.provenance == result.provenance
    assert read.coverage == result.coverage
    assert str(read.diagnostics) == str(result.diagnostics)


def test_numbers_of_numpy_are_saved(result: engram.Result, tmp_path: Path) -> None:
    settings = {"seed": np.int64(3), "rate": np.float32(0.5), "used": np.bool_(True)}
    noted = replace(result, provenance={**result.provenance, "own": settings})
    own = engram.load(noted.save(tmp_path)).provenance["own"]
    assert own == {"seed": 3, "rate": 0.5, "used": True}


def test_what_fails_to_be_saved_leaves_the_old_one(result: engram.Result, tmp_path: Path) -> None:
    result.save(tmp_path)
    before = files_of(tmp_path)
    other = replace(result, score=result.score + 1)
    bad = [
        replace(other, provenance={"function": print}),
        replace(other, score=result.score * math.nan),
        replace(other, loss=result.loss / 0),
        replace(other, score=result.score[:-1]),
        replace(other, outputs=result.outputs.long()),
        replace(other, coverage=None),
        replace(other, score=None),
        replace(other, outputs=[1.0]),
        replace(other, diagnostics=None),
    ]
    for one in bad:
        with pytest.raises(StorageError):
            one.save(tmp_path)
        assert files_of(tmp_path) == before


def test_rows_that_the_guard_flagged_may_be_unknown(result: engram.Result, tmp_path: Path) -> None:
    flagged = torch.zeros(20, dtype=torch.bool)
    flagged[3] = True
    score = result.score.clone()
    score[3] = math.nan
    read = engram.load(replace(result, score=score, flagged=flagged).save(tmp_path))
    assert read.score.isnan().nonzero().flatten().tolist() == [3]


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def apply(tensors: dict[str, Tensor]) -> None:
        tensors[name] = change(tensors[name].clone()).contiguous().clone()

    return apply


def first(value: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.index_fill(0, torch.tensor([0]), value)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("score", first(math.nan)),
        ("loss", first(math.inf)),
        ("outputs", first(math.nan)),
        ("deviation", first(math.nan)),
        ("prediction_deviation", first(-math.inf)),
        ("loo_loss", first(math.nan)),
        ("score", lambda t: t[:-1]),
        ("leverage", lambda t: t[:, None]),
        ("indices", lambda t: -t - 1),
        ("indices", lambda t: t.float()),
        ("indices", lambda t: t[:0]),
        ("targets", lambda t: t[:5]),
        ("targets", lambda t: t.float() / 0),
        ("outputs", lambda t: t[:, :2]),
        ("outputs", lambda t: t[:, 0]),
        ("outputs", lambda t: t.long()),
        ("flagged", lambda t: t.float()),
        ("obtained", lambda t: t + 4),
        ("obtained", lambda t: t[:4]),
    ],
)
def test_wrong_columns_are_refused(
    result: engram.Result, tmp_path: Path, name: str, change: Any
) -> None:
    edit(result.save(tmp_path), "result", change_tensors=changed(name, change))
    with pytest.raises(StorageError):
        engram.load(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("score"),
        lambda content: content.update(score=3.0),
        lambda content: content.update(more=3.0),
        lambda content: content["diagnostics"].pop("flagged_share"),
        lambda content: content["diagnostics"].update(flagged_share="0"),
        lambda content: content["diagnostics"].update(more=1.0),
        lambda content: content["diagnostics"].update(leverage_examples=1.5),
        lambda content: content.update(diagnostics=[]),
        lambda content: content.update(coverage={"weight": 3}),
        lambda content: content.update(provenance=None),
    ],
)
def test_wrong_descriptions_are_refused(result: engram.Result, tmp_path: Path, change: Any) -> None:
    edit(result.save(tmp_path), "result", change)
    with pytest.raises(StorageError):
        engram.load(tmp_path)
