"""A saved posterior is the same one when it is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import engram
from engram.errors import DataError, ModelMismatchError

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
    read = engram.Posterior.load(written.save(tmp_path / structure))
    assert repr(read) == repr(written)
    assert read.settings == written.settings
    assert read.names == written.names
    assert read.log_determinant() == written.log_determinant()
    before, after = (
        engram.sensitivities(*problem, posterior, progress=False) for posterior in (written, read)
    )
    for name in ("score", "loo_loss", "leverage"):
        rounding = {"rtol": 1e-12, "atol": 0.0}  # tensors are read in another order in memory
        torch.testing.assert_close(getattr(after, name), getattr(before, name), **rounding)


def test_calibrated_posterior_keeps_its_record_and_retrains(
    problem: tuple[nn.Module, tuple[Tensor, Tensor]], tmp_path: Path
) -> None:
    kronecker = fitted(problem, "kronecker")
    written = engram.calibrate(*problem, kronecker, curvature="ggn", progress=False)
    read = engram.Posterior.load(written.save(tmp_path))
    assert read.settings["calibration"] == written.settings["calibration"]
    recipe = engram.recipes.Newton(posterior=read)
    truth = engram.retrain(*problem, [3], train=recipe, prior_precision=2.0, progress=False)
    assert len(truth.indices) == 1


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
    read = engram.Posterior.load(written.save(tmp_path))
    assert read.prior_by_name == written.prior_by_name
    assert read.prior_of("0.weight") != read.prior_of("2.weight")


def test_posterior_of_other_weights_is_refused(
    problem: tuple[nn.Module, tuple[Tensor, Tensor]], tmp_path: Path
) -> None:
    read = engram.Posterior.load(fitted(problem, "diagonal").save(tmp_path))
    other = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    with pytest.raises(ModelMismatchError, match="other weights"):
        engram.sensitivities(other, problem[1], read, progress=False)


def test_missing_damaged_and_newer_folders_are_errors(
    problem: tuple[nn.Module, tuple[Tensor, Tensor]], tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"without posterior\.safetensors"):
        engram.Posterior.load(tmp_path / "nothing")
    path = fitted(problem, "diagonal").save(tmp_path / "saved")
    description = json.loads((path / "posterior.json").read_text())
    for change, words in (
        ({"format": 9}, "format 9"),
        ({"blocks": None}, "undamaged"),
        ({"names": ["0.weight", "lost"]}, "mean lost"),
        ({"blocks": [{"kind": "unknown", "names": [], "shapes": []}]}, "unknown"),
    ):
        (path / "posterior.json").write_text(json.dumps(description | change))
        with pytest.raises(DataError, match=words):
            engram.Posterior.load(path)
    (path / "posterior.json").write_text("{")
    with pytest.raises(DataError, match="undamaged"):
        engram.Posterior.load(path)
    (path / "posterior.safetensors").write_bytes(b"no tensors")
    with pytest.raises(DataError, match="undamaged"):
        engram.Posterior.load(path)
