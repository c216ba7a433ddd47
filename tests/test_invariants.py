"""What must not matter: batches, order, repetition, precision of numbers."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import engram
from cases import CASES, MLP
from dense_deviation import deviations
from fitted import assert_close, posterior, sensitivities
from problems import ESTIMATORS, as_data
from reference import Dense
from single_examples import select

FIELDS = ("outputs", "deviation", "prediction_deviation", "loss", "loo_loss", "leverage")
QUICK = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
SMALL = st.sampled_from(["mlp", "conv2d_groups", "embedding", "layer_norm", "filter_response_norm"])
STRUCTURE = st.sampled_from(["diagonal", "kronecker", "ekfac", "full"])
ESTIMATOR = st.sampled_from(ESTIMATORS)


@QUICK
@given(SMALL, STRUCTURE, ESTIMATOR, st.integers(1, 9))
def test_batch_size_does_not_matter(name, structure, estimator, batch_size):
    case, fitted = CASES[name], posterior(name, structure)
    expected = sensitivities(case, fitted, estimator=estimator)
    result = sensitivities(case, fitted, estimator=estimator, batch_size=batch_size)
    for field in FIELDS:
        assert_close(getattr(result, field), getattr(expected, field), 1e-10)


@QUICK
@given(SMALL, STRUCTURE, ESTIMATOR, st.permutations(range(7)))
def test_order_does_not_matter(name, structure, estimator, order):
    case, order = CASES[name], list(order)
    x, y = case.data
    data = (x[order], y[order])
    expected = sensitivities(case, posterior(name, structure), estimator=estimator)
    fitted = engram.laplace(
        case.model, data, structure=structure, prior_precision=case.prior_precision, progress=False
    )
    result = engram.sensitivities(case.model, data, fitted, estimator=estimator, progress=False)
    for field in FIELDS:
        assert_close(getattr(result, field), getattr(expected, field)[order], 1e-8)
    assert torch.equal(result.indices, torch.arange(7))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("name", ["mlp", "conv2d_groups", "encoder_layer_dropout", "two_inputs"])
def test_two_calls_are_equal(name, estimator):
    case, fitted = CASES[name], posterior(name, "kronecker")
    first, second = (sensitivities(case, fitted, estimator=estimator) for _ in range(2))
    for field in FIELDS:
        assert torch.equal(getattr(first, field), getattr(second, field))


@pytest.mark.parametrize(
    ("name", "structure", "estimator"),
    [
        (name, structure, "linear")
        for name in ("mlp", "conv2d_groups", "encoder_layer", "embedding")
        for structure in ("diagonal", "kronecker", "ekfac", "full")
    ]
    + [("mlp", "kronecker", estimator) for estimator in ESTIMATORS if estimator != "linear"],
)
def test_single_precision_is_close(name, structure, estimator):
    """A prior that keeps every eigenvalue away from the guard, where clipping is not smooth."""
    case = CASES[name]
    model = copy.deepcopy(case.model).float()
    x, y = case.data
    data = (x.float() if x.is_floating_point() else x, y)
    fitted = engram.laplace(model, data, structure=structure, prior_precision=30, progress=False)
    result = engram.sensitivities(model, data, fitted, estimator=estimator, progress=False)
    exact = case.dense.precision(structure, 30.0)
    expected = deviations(case.dense, exact, estimator)
    for field in ("deviation", "loss", "loo_loss", "leverage"):
        assert_close(getattr(result, field), getattr(expected, field), 2e-4)


@pytest.mark.parametrize(
    ("name", "structure", "estimator"),
    [
        (name, structure, "linear")
        for name in ("mlp", "conv1d", "two_inputs", "batch_norm1d")
        for structure in ("isotropic", "diagonal", "kronecker", "ekfac", "full")
    ]
    + [("mlp", "kronecker", estimator) for estimator in ESTIMATORS if estimator != "linear"],
)
def test_one_example_is_enough(name, structure, estimator):
    case = CASES[name]
    inputs, targets = case.draw(7, seed=1)
    one = Dense(case.model, select(inputs, slice(0, 1)), targets[:1], case.likelihood.dense)
    data = as_data(one.inputs, one.targets)
    likelihood = case.public_likelihood
    fitted = engram.laplace(
        case.model,
        data,
        likelihood=likelihood,
        structure=structure,
        progress=False,
        prior_precision=1.0,
    )
    result = engram.sensitivities(case.model, data, fitted, estimator=estimator, progress=False)
    expected = deviations(one, one.precision(structure, 1.0), estimator)
    assert_close(result.deviation, expected.deviation)
    assert_close(result.loo_loss, expected.loo_loss)


@pytest.mark.parametrize("workers", [0, 2])
def test_forms_of_data_agree(workers):
    fitted, (x, y) = posterior("mlp", "kronecker"), MLP.data
    expected = sensitivities(MLP, fitted)
    dataset = TensorDataset(x, y)
    loader = DataLoader(dataset, batch_size=3, num_workers=workers)
    for data in (dataset, loader):
        result = engram.sensitivities(MLP.model, data, fitted, progress=False)
        assert_close(result.deviation, expected.deviation, 1e-12)


@pytest.mark.parametrize("name", ["two_inputs", "named_inputs"])
def test_loaders_of_several_inputs_agree(name):
    case, fitted = CASES[name], posterior(name, "kronecker")
    expected = sensitivities(case, fitted)
    result = engram.sensitivities(
        case.model,
        DataLoader(case.data, batch_size=3),
        fitted,
        progress=False,
    )
    assert_close(result.deviation, expected.deviation, 1e-12)


def test_a_subset_of_the_data_has_the_same_rows():
    """The posterior is of all data; asking about some examples does not change their answers."""
    fitted, (x, y) = posterior("mlp", "kronecker"), MLP.data
    expected = sensitivities(MLP, fitted, estimator="corrected")
    result = engram.sensitivities(
        MLP.model, (x[2:5], y[2:5]), fitted, estimator="corrected", progress=False
    )
    assert_close(result.deviation, expected.deviation[2:5], 1e-12)
