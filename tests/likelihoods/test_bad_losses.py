"""Loss functions that stand for no likelihood, each refused by the true cause."""

import math

import pytest
import torch
from torch import nn

import engram
from cases import MLP
from engram.errors import EngramError, LikelihoodError, NonFiniteError, TargetError
from engram.likelihoods import Categorical, SampleWeighted, from_loss
from reference import Dense, DenseLikelihood
from refusal import Refusal

X = MLP.data[0]
Y = torch.linspace(-1, 1, 7).double()


def square(f, y):
    return (f[:, 0] - y) ** 2


def by_count(f, y):
    return square(f, y) / len(f)


def normalised(f, y):
    return square((f - f.mean(0)) / (f.std(0, correction=0) + 1), y)


def neighbours(f, y):
    return (f[:, 0] - f[:, 0].roll(1) - y) ** 2


def noisy(f, y):
    return square(f, y) + torch.rand(len(f)).to(f)


def by_items(f, y):
    return torch.tensor([(a[0].item() - b.item()) ** 2 for a, b in zip(f, y, strict=True)]).to(f)


def indicator(f, y):
    return ((f[:, 0] - y).abs() > 1e-3).to(f)


def rounded(f, y):
    return (5 * f[:, 0] - 5 * y).round().abs()


def in_place(f, y):
    return f.sub_(y[:, None])[:, 0] ** 2


def in_place_target(f, y):
    return (f[:, 0] - y.mul_(2)) ** 2


def failing(f, y):
    return f @ y


MIXING = "depends on this example alone"
CASES = {
    by_count: MIXING,
    normalised: MIXING,
    neighbours: MIXING,
    noisy: "same each time",
    by_items: "gradient",
    indicator: "gradient|jump",
    rounded: "jump",
    in_place: "writes into",
    in_place_target: "writes into",
    failing: "failing",
    nn.CrossEntropyLoss(): "crossentropyloss",
    nn.MSELoss(): "reduction|mseloss",
}


@pytest.mark.parametrize("batch_size", ["auto", 1])
@pytest.mark.parametrize("function", CASES)
def test_losses_of_no_likelihood(function, batch_size):
    with Refusal(LikelihoodError, CASES[function]):
        engram.laplace(
            MLP.model,
            (X, Y),
            likelihood=from_loss(function),
            batch_size=batch_size,
            progress=False,
            prior_precision=1.0,
        )


@pytest.mark.parametrize("value", [None, 3, "mse"])
def test_what_is_no_function(value):
    with Refusal(LikelihoodError, "function"):
        from_loss(value)
    if value is not None:
        with Refusal(LikelihoodError, "mean"):
            from_loss(square, mean=value)


@pytest.mark.parametrize("mean", [lambda f: f.softmax(0), lambda f: f[:, 0], lambda f: f @ f])
def test_means_of_no_prediction(mean):
    with Refusal(LikelihoodError, "mean|shape"):
        likelihood = from_loss(square, mean=mean)
        engram.laplace(
            MLP.model, (X, Y), likelihood=likelihood, progress=False, prior_precision=1.0
        )


def masked(f, y):
    """Missing targets are NaN, and count nothing."""
    known = ~y.isnan()
    return torch.where(known, (f[:, 0] - y.nan_to_num()) ** 2, torch.zeros_like(y))


def branching(f, y):
    """A loop over examples with a branch on their values."""
    return torch.stack(
        [(a[0] - b) ** 2 if b > 0 else 2 * (a[0] - b) ** 2 for a, b in zip(f, y, strict=True)]
    )


def weighted(f, y):
    return torch.where(y > 0, 1.0, 2.0) * square(f, y)


def hinge(f, y):
    """Zero, gradient and all, wherever the margin is wide."""
    return torch.relu(y - f[:, 0] - 100) ** 2


@pytest.mark.parametrize("function", [square, masked, branching, weighted, hinge])
def test_proper_losses_are_taken(function):
    y = Y.clone()
    if function is masked:
        y[2] = math.nan
    fitted = engram.laplace(
        MLP.model,
        (X, y),
        likelihood=from_loss(function),
        structure="full",
        progress=False,
        prior_precision=1.0,
    )
    by_example = DenseLikelihood(lambda f, target: function(f[None], target[None])[0], torch.clone)
    expected = Dense(MLP.model, X, y, by_example).precision("full", 1.0)
    assert fitted.log_det() == pytest.approx(expected.log_det(), rel=1e-9)


def test_a_branch_has_the_derivatives_of_its_formula():
    outputs = torch.randn(5, 3).double()
    y = torch.tensor([1.0, -1.0, 2.0, -3.0, 0.5]).double()
    for name in ("output_hessian", "residual", "hessian_factor"):
        found = getattr(from_loss(branching), name)(outputs, y)
        torch.testing.assert_close(found, getattr(from_loss(weighted), name)(outputs, y))


@pytest.mark.parametrize("likelihood", ["gaussian", "bernoulli", "poisson", "categorical"])
def test_targets_that_are_not_numbers(likelihood):
    """The cause is the target, not an overflow."""
    model = nn.Linear(4, 3).double()
    targets = torch.rand(7, 3).double()
    if likelihood == "categorical":
        targets = targets / targets.sum(1, keepdim=True)
    targets[5] = math.nan
    with Refusal(EngramError, "target", "nan", "5"):
        engram.laplace(
            model, (X, targets), likelihood=likelihood, progress=False, prior_precision=1.0
        )


def test_a_loss_that_is_not_a_number_for_a_target():
    y = Y.clone()
    y[5] = math.nan
    with Refusal(NonFiniteError, "target is nan|nan target", "example 5"):
        engram.laplace(
            MLP.model, (X, y), likelihood=from_loss(square), progress=False, prior_precision=1.0
        )


F3 = torch.zeros(2, 3)


@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan"), "0.1", True, None])
def test_label_smoothing_is_a_share(value):
    with Refusal(LikelihoodError, "label_smoothing from 0 to below 1", "such as 0.1"):
        Categorical(label_smoothing=value)


@pytest.mark.parametrize("value", [[1.0, 0.0], [1.0, -1.0], [], "weights", 2.0, [1.0, math.inf]])
def test_class_weights_are_positive(value):
    with Refusal(LikelihoodError, "class_weights above 0", "weight= of the training"):
        Categorical(class_weights=value)


def test_a_weight_for_every_class():
    with Refusal(LikelihoodError, "each of the 3 classes", "2 class_weights"):
        Categorical(class_weights=[1.0, 2.0]).prepare(F3, torch.tensor([0, 1]))


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (torch.tensor([0, 1]), "weights as the last column"),
        (torch.tensor([[0.5, 1.0], [1.0, 1.0]]), "class numbers in the first column"),
        (torch.tensor([[0.0, -1.0], [1.0, 1.0]]), "weights of at least 0"),
        (torch.tensor([[0.0, float("nan")], [1.0, 1.0]]), "weights of at least 0"),
        (torch.tensor([[0.0, 1.0], [3.0, 1.0]]), "class numbers from 0 to 2"),
    ],
)
def test_targets_that_carry_no_weights(targets, words):
    with Refusal(TargetError, words):
        SampleWeighted().prepare(F3, targets)


def test_what_is_weighted_is_a_likelihood():
    with Refusal(LikelihoodError, "a likelihood object", "gaussian"):
        SampleWeighted("gaussian")
