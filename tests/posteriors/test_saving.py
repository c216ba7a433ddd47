"""A saved posterior is the same one when it is read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import engram
from engram.errors import ArgumentError, ModelMismatchError, PosteriorError, StorageError
from saved_folders import edit

STRUCTURES = ["full", "kronecker", "diagonal", "isotropic", "last_layer", "low_rank"]


@pytest.fixture(scope="module")
def problem() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    return model, (torch.randn(60, 5, dtype=torch.float64), torch.randint(3, (60,)))


def fitted(problem: tuple[nn.Module, tuple[Tensor, Tensor]], structure: str) -> engram.Posterior:
    return engram.laplace(*problem, structure=structure, prior_precision=2.0, progress=False)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_read_posterior_gives_the_same_sensitivities(
    problem: tuple[nn.Module, tuple[Tensor, Tensor]], structure: str, tmp_path: Path
) -> None:
    written = fitted(problem, structure)
    read = engram.load(written.save(tmp_path / structure))
    assert repr(read) == repr(written)
    assert read.settings == written.settings
    assert read.names == written.names
    assert read.digest == written.digest
    assert read.log_det() == written.log_det()
    before, after = (
        engram.sensitivities(*problem, posterior, progress=False) for posterior in (written, read)
    )
    for name in ("score", "loo_loss", "leverage"):
        # tensors are read in another order in memory; NaN where a leverage was not sampled
        rounding = {"rtol": 1e-12, "atol": 0.0, "equal_nan": True}
        torch.testing.assert_close(getattr(after, name), getattr(before, name), **rounding)


def test_calibrated_posterior_keeps_its_record_and_retrains(
    problem: tuple[nn.Module, tuple[Tensor, Tensor]], tmp_path: Path
) -> None:
    kronecker = fitted(problem, "kronecker")
    written = engram.calibrate(*problem, kronecker, curvature="ggn", progress=False)
    read = engram.load(written.save(tmp_path))
    assert read.settings["calibration"] == written.settings["calibration"]
    recipe = engram.recipes.Newton(posterior=read)
    truth = engram.retrain(*problem, [3], train=recipe, prior_precision=2.0, progress=False)
    assert len(truth.indices) == 1


@pytest.mark.parametrize("structure", ["full", "kronecker", "low_rank"])
def test_a_calibrated_posterior_is_read_as_it_was(
    problem: tuple[nn.Module, tuple[Tensor, Tensor]], structure: str, tmp_path: Path
) -> None:
    first = engram.calibrate(*problem, fitted(problem, structure), curvature="ggn", progress=False)
    read = engram.load(first.save(tmp_path / "first"))
    assert (read.scale, read.exact, read.curvature) == (first.scale, False, first.curvature)
    assert read.digest == first.digest
    again = engram.calibrate(*problem, read, curvature="ggn", seed=1, progress=False)
    expected = engram.calibrate(*problem, first, curvature="ggn", seed=1, progress=False)
    assert again.scale == pytest.approx(expected.scale, rel=1e-10)
    assert again.scale == pytest.approx(
        first.scale * again.settings["calibration"]["scale"], rel=1e-12
    )
    read = engram.load(again.save(tmp_path / "second"))
    one, other = (engram.remove(*problem, p, [1, 2], progress=False) for p in (again, read))
    torch.testing.assert_close(one.group.loss_without, other.group.loss_without)


def test_different_priors_of_parameters_are_kept(
    problem: tuple[nn.Module, tuple[Tensor, Tensor]], tmp_path: Path
) -> None:
    model, (x, y) = problem
    groups = [{"params": model[0].parameters(), "weight_decay": 0.1}]
    groups.append({"params": model[2].parameters(), "weight_decay": 0.2})
    optimizer = torch.optim.SGD(groups, lr=0.0)
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    written = engram.posterior_of(optimizer, model, num_data=len(x))
    read = engram.load(written.save(tmp_path))
    assert read.prior_by_name == written.prior_by_name
    assert read.prior_of("0.weight") != read.prior_of("2.weight")


def test_posterior_of_other_weights_is_refused(
    problem: tuple[nn.Module, tuple[Tensor, Tensor]], tmp_path: Path
) -> None:
    read = engram.load(fitted(problem, "diagonal").save(tmp_path))
    other = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    with pytest.raises(ModelMismatchError, match="other weights"):
        engram.sensitivities(other, problem[1], read, progress=False)


def test_missing_and_older_folders_are_errors(
    problem: tuple[nn.Module, tuple[Tensor, Tensor]], tmp_path: Path
) -> None:
    with pytest.raises(StorageError, match=r"has saved something.*posterior\.json.*No such file"):
        engram.load(tmp_path / "nothing")
    path = fitted(problem, "diagonal").save(tmp_path / "saved")
    document = json.loads((path / "posterior.json").read_text())
    (path / "posterior.json").write_text(json.dumps(document | {"format": 1}))
    with pytest.raises(StorageError, match="format 1"):
        engram.load(path)


def put(*keys: Any) -> Callable[[dict[str, Any]], None]:
    """Put the last of the keys where the others lead."""

    def change(content: dict[str, Any]) -> None:
        *way, last, value = keys
        for key in way:
            content = content[key]
        if value is DELETED:
            del content[last]
        else:
            content[last] = value

    return change


DELETED = object()
NOT_A_NUMBER = {"float": "nan"}
CHANGES = [
    (put("blocks", None), "a list in posterior.json: blocks"),
    (put("blocks", []), "with blocks"),
    (put("mean", {}), "a mean with parameters"),
    (put("mean", "0.weight", DELETED), "parameters of the mean"),
    (put("mean", "0.weight", 3), "a tensor in posterior.json: mean: 0.weight"),
    (put("mean", "0.weight", {"tensor": "lost"}), "'lost'"),
    (put("mean", "0.weight", {"tensor": 3}), "the tensor 3"),
    (put("blocks", 0, "kind", "unknown"), "diagonal or kronecker or dense"),
    (put("blocks", 0, "kind", ["kronecker"]), "diagonal or kronecker or dense"),
    (put("blocks", 0, "layout", "names", ["lost"]), "'lost'"),
    (put("blocks", 0, "layout", "names", []), "names and shapes"),
    (put("blocks", 0, "layout", "shapes", [[6, 6]]), "the shape"),
    (put("blocks", 0, "layout", "shapes", [[-6, -5]]), "a shape"),
    (put("blocks", 0, "layout", "shapes", [[10**30]]), "a whole number"),
    (put("blocks", 0, "layout", "shapes", "5"), "a list"),
    (put("blocks", 0, "tolerance", "0"), "a number"),
    (put("blocks", 0, "tolerance", -1.0), "a tolerance"),
    (put("blocks", 0, "extra", 1), "'extra' as well"),
    (put("prior_precision", -2.0), "none negative"),
    (put("prior_precision", NOT_A_NUMBER), "none negative"),
    (put("prior_precision", {"float": "huge"}), "a number"),
    (put("prior_precision", "2"), "a number"),
    (put("prior_precision", True), "a number"),
    (put("prior_precision", DELETED), "prior_precision"),
    (put("prior_by_name", {"lost": 1.0}), "lost"),
    (put("prior_by_name", [1.0]), "an object"),
    (put("num_data", 0), "0 examples"),
    (put("num_data", 1.5), "a whole number"),
    (put("num_data", 10**30), "a whole number"),
    (put("structure", None), "words"),
    (put("settings", 3), "an object"),
    (put("unknown", 3), "'unknown' as well"),
    (put("scale", 0.0), "a positive scale"),
    (put("exact", 1), "true or false"),
    (put("curvature", "another"), "one of hessian"),
    (put("curvature", ["ggn"]), "one of hessian"),
    (put("likelihood", "name", "another"), "a likelihood"),
    (put("likelihood", "settings", {"another": 3}), "a likelihood"),
    (put("likelihood", "settings", 3), "a likelihood"),
    (put("likelihood", {}), "a likelihood"),
    (put("likelihood", 3), "a likelihood"),
]


@pytest.mark.parametrize(("change", "words"), CHANGES, ids=[words for _, words in CHANGES])
def test_wrong_keys_and_types_are_refused(
    problem: tuple[nn.Module, tuple[Tensor, Tensor]], tmp_path: Path, change: Any, words: str
) -> None:
    path = fitted(problem, "diagonal").save(tmp_path)
    edit(path, "posterior", change)
    with pytest.raises(StorageError, match=words):
        engram.load(path)


def filled(ending: str, value: float) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        name = next(n for n in tensors if n.endswith(ending))
        tensors[name].view(-1)[0] = value

    return change


def cut(ending: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        name = next(n for n in tensors if n.endswith(ending))
        tensors[name] = tensors[name][:-1].clone()

    return change


def whole(ending: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        name = next(n for n in tensors if n.endswith(ending))
        tensors[name] = tensors[name].long()

    return change


TENSORS = [
    ("diagonal", filled("0.weight", math.nan)),
    ("diagonal", filled("precision", math.nan)),
    ("diagonal", filled("precision", math.inf)),
    ("diagonal", filled("precision", 0.0)),
    ("diagonal", filled("precision", -1.0)),
    ("diagonal", cut("precision")),
    ("diagonal", cut("0.weight")),
    ("diagonal", whole("precision")),
    ("diagonal", whole("0.weight")),
    ("diagonal", lambda tensors: tensors.update(beside=torch.ones(1))),
    ("diagonal", lambda tensors: tensors.pop("mean/0.weight")),
    ("kronecker", filled("rows", math.nan)),
    ("kronecker", filled("columns", math.inf)),
    ("kronecker", filled("row_share", math.nan)),
    ("kronecker", cut("columns")),
    ("kronecker", cut("row_share")),
    ("full", filled("cholesky", math.nan)),
    ("full", filled("cholesky", 0.0)),
    ("full", filled("cholesky", -1.0)),
    ("full", cut("cholesky")),
    ("full", whole("cholesky")),
    ("low_rank", filled("basis", math.nan)),
    ("low_rank", filled("inside", math.nan)),
    ("low_rank", filled("inside", 0.0)),
    ("low_rank", filled("outside", math.inf)),
    ("low_rank", cut("basis")),
    ("low_rank", cut("inside")),
]


@pytest.mark.parametrize(("structure", "change"), TENSORS)
def test_wrong_tensors_are_refused(
    problem: tuple[nn.Module, tuple[Tensor, Tensor]], tmp_path: Path, structure: str, change: Any
) -> None:
    path = fitted(problem, structure).save(tmp_path)
    edit(path, "posterior", change_tensors=change)
    with pytest.raises(StorageError):
        engram.load(path)


@pytest.mark.parametrize("device", ["nowhere", "meta", 3.5, "cuda:99"])
def test_a_device_that_is_not_there_is_refused(
    problem: tuple[nn.Module, tuple[Tensor, Tensor]], tmp_path: Path, device: Any
) -> None:
    path = fitted(problem, "diagonal").save(tmp_path)
    with pytest.raises(ArgumentError, match="device"):
        engram.load(path, device)


@pytest.mark.parametrize("rest", [0.0, -1.0, {"float": "inf"}, NOT_A_NUMBER])
def test_a_rest_that_is_no_precision_is_refused(
    problem: tuple[nn.Module, tuple[Tensor, Tensor]], tmp_path: Path, rest: Any
) -> None:
    path = fitted(problem, "low_rank").save(tmp_path)
    edit(path, "posterior", put("blocks", 0, "rest", rest))
    with pytest.raises(StorageError):
        engram.load(path)


def test_numbers_of_numpy_are_saved(
    problem: tuple[nn.Module, tuple[Tensor, Tensor]], tmp_path: Path
) -> None:
    posterior = replace(fitted(problem, "diagonal"), settings={"seed": np.int64(3)})
    assert engram.load(posterior.save(tmp_path)).settings == {"seed": 3}


def test_a_posterior_that_could_not_be_read_is_not_saved(
    problem: tuple[nn.Module, tuple[Tensor, Tensor]], tmp_path: Path
) -> None:
    good = fitted(problem, "diagonal")
    good.save(tmp_path)
    for bad in (
        replace(good, blocks=()),
        replace(good, prior_precision=-1.0),
        replace(good, mean={name: value / 0 for name, value in good.mean.items()}),
        replace(good, settings={"function": print}),
        replace(good, mean=None),
        replace(good, blocks=None),
        replace(good, blocks=(1,)),
        replace(good, prior_precision="1"),
        replace(good, num_data=None),
    ):
        with pytest.raises((StorageError, PosteriorError)):
            bad.save(tmp_path)
    assert engram.load(tmp_path).log_det() == good.log_det()
