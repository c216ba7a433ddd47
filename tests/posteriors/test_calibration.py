"""Calibration against traces of dense matrices."""

import pytest
import torch
from torch import nn

import engram
from cases import CASES
from engram.curvature.operators import GaussNewton
from engram.engine.session import session
from engram.errors import ArgumentError, ModelMismatchError, PosteriorError
from engram.posteriors.calibration import (
    MATCHED,
    Traces,
    fitted_trace,
    probe_vectors,
    quadratic_forms,
)
from fitted import posterior
from snapshot import differences, snapshot

STRUCTURES = ("full", "kronecker", "diagonal")


def calibrate(case, fitted, **settings):
    return engram.calibrate(
        case.model,
        case.data,
        fitted,
        progress=False,
        **{"curvature": "ggn", "relative_residual": 1e-9, **settings},
    )


def roots(case, match):
    """The matrix whose trace against the covariance is matched, from dense parts, [P, P]."""
    return case.dense.ggn("empirical" if match == "errors" else "ggn")


def exact_covariance(case):
    identity = torch.eye(case.dense.num_params).double()
    return torch.linalg.inv(case.dense.ggn() + case.prior_precision * identity)


@pytest.mark.parametrize("match", MATCHED)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_with_every_root_as_a_probe_the_trace_is_exact(match, structure):
    case = CASES["mlp"]
    fitted = posterior("mlp", structure)
    columns = case.dense.columns("empirical" if match == "errors" else "ggn")
    rows = torch.einsum("nkp,nkr->nrp", case.dense.jacobian, columns).flatten(0, 1)
    with session(case.model, case.data, case.public_likelihood, progress=False) as opened:
        exact = GaussNewton(opened, fitted.layout, case.prior_precision)
        forms, own, residual = quadratic_forms(exact, fitted, rows, 1e-10)
        total = fitted_trace(opened, fitted, match)
    expected = torch.trace(exact_covariance(case) @ roots(case, match))
    assert abs(forms.sum() - expected) < 1e-8 * expected
    assert abs(own.sum() - total) < 1e-8 * total
    assert residual <= 1e-10


@pytest.mark.parametrize("match", MATCHED)
def test_random_probes_agree_within_their_standard_error(match):
    case = CASES["conv2d_groups"]
    fitted = posterior("conv2d_groups", "kronecker")
    with session(case.model, case.data, case.public_likelihood, progress=False) as opened:
        layout = fitted.layout
        exact = GaussNewton(opened, layout, case.prior_precision)
        probes = probe_vectors(opened, layout, match, 200, seed=3)
        forms, own, residual = quadratic_forms(exact, fitted, probes, 1e-8)
        traces = Traces(forms, own, fitted_trace(opened, fitted, match), 0, residual)
    expected = float(torch.trace(exact_covariance(case) @ roots(case, match)))
    value, error = traces.trace
    assert abs(value - expected) < 3 * error
    assert error < 0.1 * expected


def test_probes_do_not_depend_on_the_batch_size():
    case, fitted = CASES["mlp"], posterior("mlp", "kronecker")
    found = []
    for batch_size in (2, 7):
        with session(case.model, case.data, case.public_likelihood, batch_size, False) as opened:
            found.append(probe_vectors(opened, fitted.layout, "leverages", 3, seed=0))
    assert (found[0] - found[1]).abs().max() < 1e-12


@pytest.mark.parametrize("match", MATCHED)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_calibrating_again_changes_nothing(match, structure):
    case = CASES["mlp"]
    first = calibrate(case, posterior("mlp", structure), match=match)
    second = calibrate(case, first, match=match)
    assert abs(second.settings["calibration"]["scale"] - 1) < 1e-8
    total = first.settings["calibration"]["scale"]
    assert abs(second.settings["calibration"]["total_scale"] - total) < 1e-8 * total
    vector = {name: torch.ones_like(m) for name, m in first.mean.items()}
    for name, value in first.multiply(vector).items():
        assert torch.allclose(second.multiply(vector)[name], value, rtol=1e-7)


def test_the_exact_posterior_keeps_its_scale():
    case = CASES["mlp"]
    record = calibrate(case, posterior("mlp", "full")).settings["calibration"]
    assert abs(record["scale"] - 1) < 1e-8
    hessian = posterior("mlp", "full", "hessian", 20.0)
    kept = calibrate(case, hessian, curvature="hessian").settings["calibration"]
    assert abs(kept["scale"] - 1) < 1e-8


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_precision_is_scaled_and_the_prior_is_not(structure):
    case, fitted = CASES["mlp"], posterior("mlp", structure)
    before = dict(fitted.settings)
    found = calibrate(case, fitted, probes=3, seed=4)
    scale = found.settings["calibration"]["scale"]
    vector = {name: torch.randn_like(m) for name, m in fitted.mean.items()}
    for name, value in fitted.solve(vector).items():
        assert torch.allclose(found.solve(vector)[name], value / scale)
    assert found.prior_precision == fitted.prior_precision
    assert dict(fitted.settings) == before


def test_the_model_is_as_before():
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 2)).train()
    data = (torch.randn(12, 3), torch.randint(0, 2, (12,)))
    fitted = engram.laplace(model, data, progress=False, prior_precision=1.0)
    before = snapshot(model)
    engram.calibrate(model, data, fitted, curvature="ggn", progress=False)
    assert differences(before, snapshot(model)) == []


def small():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    data = (torch.randn(12, 3), torch.randint(0, 2, (12,)))
    return model, data, engram.laplace(model, data, prior_precision=1e-3, progress=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"match": "traces"}, "match to be one of errors, leverages; got 'traces'"),
        ({"curvature": "fisher"}, "curvature to be one of hessian, ggn; got 'fisher'"),
        ({"probes": 1}, "number of probes from 2"),
        ({"relative_residual": 0.0}, "a relative_residual between 0 and 1; got 0.0"),
    ],
)
def test_wrong_arguments(settings, message):
    model, data, fitted = small()
    with pytest.raises(ArgumentError, match=message):
        engram.calibrate(model, data, fitted, progress=False, **settings)


def test_a_posterior_of_another_model():
    _, data, fitted = small()
    other = nn.Linear(3, 2)
    with pytest.raises(ModelMismatchError, match="another model"):
        engram.calibrate(other, data, fitted, progress=False)


def test_a_model_that_is_not_at_a_minimum():
    model, data, fitted = small()
    with pytest.raises(PosteriorError, match=r'negative curvature.*use curvature="ggn"'):
        engram.calibrate(model, data, fitted, relative_residual=1e-6, progress=False)


def test_a_model_without_errors():
    model = nn.Linear(2, 1)
    x = torch.randn(6, 2)
    data = (x, model(x).detach())
    fitted = engram.laplace(model, data, likelihood="gaussian", progress=False, prior_precision=1.0)
    with pytest.raises(PosteriorError, match="gradients that are not all zero"):
        engram.calibrate(model, data, fitted, progress=False)
