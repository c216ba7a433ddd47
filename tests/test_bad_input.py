"""Wrong input is an error of its own kind that says what was expected, what came, what to do."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

import engram
from cases import CASES, MLP
from engram.errors import (
    ArgumentError,
    DataError,
    EngramError,
    LikelihoodError,
    ModelMismatchError,
    NonFiniteError,
    PosteriorError,
    TargetError,
)
from fitted import posterior
from refusal import Refusal

X, Y = MLP.data


def laplace(data=None, model=None, prior_precision=1.0, **settings):
    data, model = (X, Y) if data is None else data, MLP.model if model is None else model
    return engram.laplace(model, data, prior_precision=prior_precision, progress=False, **settings)


def sensitivities(data=None, model=None, fitted=None, **settings):
    fitted = posterior("mlp", "diagonal") if fitted is None else fitted
    data, model = (X, Y) if data is None else data, MLP.model if model is None else model
    if "likelihood" in settings:  # as if read off an optimizer, which is told the likelihood
        fitted = replace(fitted, likelihood=settings.pop("likelihood"))
    return engram.sensitivities(model, data, fitted, progress=False, **settings)


def remove(data=None, model=None, fitted=None, **settings):
    fitted = posterior("mlp", "diagonal") if fitted is None else fitted
    data, model = (X, Y) if data is None else data, MLP.model if model is None else model
    return engram.remove(model, data, fitted, **{"indices": [0], "progress": False, **settings})


CALLS = pytest.mark.parametrize("call", [laplace, sensitivities, remove])
PASSES = pytest.mark.parametrize("call", [laplace, sensitivities])


@CALLS
def test_shuffling_loader(call):
    with Refusal(DataError, "shuffl"):
        call(DataLoader(TensorDataset(X, Y), batch_size=2, shuffle=True))


@CALLS
def test_loader_that_drops(call):
    with Refusal(DataError, "drop_last"):
        call(DataLoader(TensorDataset(X, Y), batch_size=2, drop_last=True))


@CALLS
@pytest.mark.parametrize("drop_last", [False, True])
def test_shuffling_batch_sampler(call, drop_last):
    """The same two faults by another door: the loader itself has neither flag set."""
    sampler = BatchSampler(RandomSampler(range(7)), 2, drop_last)
    with Refusal(DataError, "shuffl|order|sampler"):
        call(DataLoader(TensorDataset(X, Y), batch_sampler=sampler))


@CALLS
def test_batch_sampler_that_drops(call):
    sampler = BatchSampler(SequentialSampler(range(7)), 2, drop_last=True)
    with Refusal(DataError, "drop"):
        call(DataLoader(TensorDataset(X, Y), batch_sampler=sampler))


@CALLS
def test_empty_data(call):
    with Refusal(DataError, "empty|no example|at least one|0 example"):
        call((X[:0], Y[:0]))


@PASSES
def test_inputs_and_targets_of_different_lengths(call):
    with Refusal(DataError, "7", "6"):
        call((X, Y[:6]))


@PASSES
@pytest.mark.parametrize("label", [3, -1])
def test_label_out_of_range(call, label):
    labels = Y.clone()
    labels[4] = label
    with Refusal(TargetError, str(label), "0"):
        call((X, labels))


@PASSES
def test_labels_of_the_wrong_dtype(call):
    with Refusal(TargetError, "int", "float"):
        call((X, Y.double()))


@PASSES
def test_labels_of_the_wrong_shape(call):
    with Refusal(TargetError, "shape"):
        call((X, torch.stack([Y, Y], 1)))


@PASSES
def test_soft_labels_that_do_not_sum_to_one(call):
    with Refusal(TargetError, "sum"):
        call((X, torch.full((7, 3), 0.5).double()))


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("bernoulli", torch.tensor([0.0, 1.0, 2.0, 0.0, 1.0, 0.0, 0.0])),
        ("poisson", torch.full((7, 1), -1.0)),
        ("gaussian", torch.zeros(7, 2)),
    ],
)
def test_targets_outside_the_likelihood(name, targets):
    model = CASES["mlp_bernoulli"].model
    with Refusal(TargetError):
        laplace((X, targets.double()), model, likelihood=name, prior_precision=1.0)


@PASSES
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_input_names_the_batch_and_the_example(call, value):
    inputs = X.clone()
    inputs[5, 1] = value
    with Refusal(NonFiniteError, "batch", r"example\D{0,20}5\b"):
        call((inputs, Y), batch_size=2)


@PASSES
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_weight(call, value):
    model = copy.deepcopy(MLP.model)
    fitted = posterior("mlp", "diagonal")
    with torch.no_grad():
        model.head.bias[1] = value
    settings = {} if call is laplace else {"fitted": fitted}
    with Refusal((NonFiniteError, ModelMismatchError), r"head\.bias|example\D{0,20}0\b"):
        call(model=model, **settings)


def overflowing(outputs, target):
    """Infinite for one target only."""
    return (outputs.sum(1) - target).square() / (1 - (target == 3.0).to(outputs.dtype))


@PASSES
def test_non_finite_loss_names_the_batch_and_the_example(call):
    targets = torch.zeros(7).double()
    targets[3] = 3.0
    likelihood = engram.likelihoods.from_loss(overflowing)
    with Refusal(NonFiniteError, "batch", r"example\D{0,20}3\b"):
        call((X, targets), batch_size=2, likelihood=likelihood)


@PASSES
def test_loss_with_mean_reduction(call):
    likelihood = engram.likelihoods.from_loss(nn.CrossEntropyLoss())
    with Refusal(LikelihoodError, "reduction"):
        call(likelihood=likelihood)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_prior_precision_that_is_not_positive(value):
    with Refusal(ArgumentError, "prior_precision", "positive|> 0|greater"):
        laplace(prior_precision=value)


@pytest.mark.parametrize(
    ("call", "settings", "offered"),
    [
        (laplace, {"structure": "cronecker"}, "kronecker"),
        (laplace, {"curvature": "gauss"}, "ggn"),
        (laplace, {"likelihood": "categorial"}, "categorical"),
        (sensitivities, {"estimator": "liner"}, "linear"),
        (remove, {"estimator": "liner"}, "linear"),
        (remove, {"at": "displayed"}, "displaced"),
    ],
)
def test_unknown_names_offer_the_known_ones(call, settings, offered):
    wrong = next(iter(settings.values()))
    with Refusal((ArgumentError, LikelihoodError), offered, wrong):
        call(**settings)


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "isotropic", "ekfac"])
def test_hessian_needs_a_dense_structure(structure):
    with Refusal(ArgumentError, "full", structure):
        laplace(structure=structure, curvature="hessian", prior_precision=1.0)


def test_hessian_that_is_not_positive_definite():
    """At random weights the Hessian has negative eigenvalues; a weak prior does not lift them."""
    assert torch.linalg.eigvalsh(MLP.dense.hessian).min() < -0.01
    with Refusal(PosteriorError, "positive", "definite", "prior_precision|ggn"):
        laplace(structure="full", curvature="hessian", prior_precision=1e-6)


def test_a_gauss_newton_matrix_that_rounding_made_indefinite():
    """It is not for want of a minimum, nor is there another curvature to take."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    data = torch.randn(30, 3), torch.arange(30) % 3
    asked = {"structure": "full", "curvature": "ggn", "prior_precision": 1e-12}
    with Refusal(PosteriorError, "rounding", "to do: raise prior_precision, or .* double"):
        engram.laplace(model, data, **asked, progress=False)
    engram.laplace(model.double(), (data[0].double(), data[1]), **asked, progress=False)


@pytest.mark.parametrize("call", [sensitivities, remove])
def test_posterior_of_a_model_with_other_names(call):
    other = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with Refusal(ModelMismatchError, r"body\.0\.|head\.|\b0\.|\b2\."):
        call(model=other)


@pytest.mark.parametrize("call", [sensitivities, remove])
def test_posterior_of_a_model_with_other_shapes(call):
    other = copy.deepcopy(MLP.model)
    other.head = nn.Linear(5, 4).double()
    with Refusal(ModelMismatchError, r"head\.(weight|bias)", "3", "4"):
        call(model=other)


@pytest.mark.parametrize("call", [sensitivities, remove])
def test_posterior_of_the_same_model_with_other_weights(call):
    """As after further training: the shapes fit, the curvature does not."""
    other = copy.deepcopy(MLP.model)
    with torch.no_grad():
        other.head.weight += 0.1
    with Refusal(ModelMismatchError, r"head\.weight"):
        call(model=other)


@pytest.mark.parametrize("indices", [[7], [-8], [0, 100]])
def test_indices_out_of_range(indices):
    with Refusal(ArgumentError, "ind", "6|7"):
        remove(indices=indices)


def test_repeated_indices():
    with Refusal(ArgumentError, "repeat|duplicate|twice|distinct|unique"):
        remove(indices=[1, 2, 1])


def test_weights_of_another_length():
    with Refusal(ArgumentError, "weight", "2", "3"):
        remove(indices=[1, 2], weights=[0.5, 0.5, 0.5])


@pytest.mark.parametrize("batch_size", [0, -1])
def test_batch_size_that_is_not_positive(batch_size):
    with Refusal(ArgumentError, "batch_size"):
        sensitivities(batch_size=batch_size)


def test_a_model_without_trained_parameters():
    model = copy.deepcopy(MLP.model).requires_grad_(False)
    with Refusal(EngramError, "requires_grad|train", states_both_sides=False):
        laplace(model=model, prior_precision=1.0)


def test_outputs_that_are_not_one_row_an_example():
    model = nn.Linear(4, 3).double()
    with Refusal(EngramError, "output|shape"):
        laplace((torch.randn(7, 2, 4).double(), Y), model, prior_precision=1.0)


def test_posterior_of_another_likelihood():
    fitted = laplace(likelihood="categorical", prior_precision=1.0)
    other = engram.likelihoods.from_loss(overflowing)
    recipe = engram.recipes.Newton(posterior=fitted)
    with Refusal(ModelMismatchError, "categorical", "use the same one"):
        engram.retrain(MLP.model, (X, Y), [0], train=recipe, likelihood=other, progress=False)
