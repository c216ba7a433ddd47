"""A loss without curvature is refused: its posterior would be the prior."""

import pytest
import torch
from torch import nn

import engram
from engram.errors import LikelihoodError
from engram.likelihoods import Gaussian, from_loss


def absolute(f, y):
    return (f[:, 0] - y).abs()


def hinge(f, y):
    return (1 - f[:, 0] * (2 * y - 1)).clamp(min=0)


def linear(f, y):
    return -f[:, 0] * y


def problem(kind=torch.float64):
    torch.manual_seed(0)
    x = torch.randn(40, 3).to(kind)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(kind)
    return {"linear": nn.Linear(3, 1).to(kind), "net": net}, (x, (x.sum(1) > 0).to(kind))


@pytest.mark.parametrize("loss", [absolute, hinge, linear])
@pytest.mark.parametrize("name", ["linear", "net"])
@pytest.mark.parametrize("structure", ["full", "kronecker", "diagonal", "isotropic", "last_layer"])
def test_losses_of_straight_pieces_are_refused(loss, name, structure):
    models, data = problem()
    with pytest.raises(LikelihoodError, match=rf"a loss that curves.*from_loss\({loss.__name__}"):
        engram.laplace(
            models[name],
            data,
            likelihood=from_loss(loss),
            structure=structure,
            progress=False,
            prior_precision=1.0,
        )


@pytest.mark.parametrize("name", ["linear", "net"])
def test_so_by_default(name):
    models, data = problem(torch.float32)
    with pytest.raises(LikelihoodError, match="Huber in place of absolute"):
        engram.laplace(
            models[name], data, likelihood=from_loss(absolute), progress=False, prior_precision=1.0
        )


def test_the_remedies_work():
    models, data = problem()
    smooth = from_loss(lambda f, y: nn.functional.huber_loss(f[:, 0], y, reduction="none"))
    engram.laplace(models["linear"], data, likelihood=smooth, progress=False, prior_precision=1.0)
    engram.laplace(
        models["linear"],
        data,
        likelihood=from_loss(absolute),
        structure="full",
        curvature="empirical",
        progress=False,
        prior_precision=1.0,
    )


def test_outputs_of_zero_that_no_weight_moves_are_not():
    """The posterior is the prior there, but not for want of curvature in the loss."""
    silent = nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        silent.weight.zero_()
    data = (torch.zeros(9, 3).double(), torch.ones(9, 1).double())
    engram.laplace(
        silent, data, likelihood="gaussian", structure="full", progress=False, prior_precision=1.0
    )


def test_a_saturated_softmax_that_is_wrong_is_refused():
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    with torch.no_grad():
        model.weight *= 1e6
    x = torch.randn(30, 3).double()
    wrong = 1 - model(x).argmax(1)
    with pytest.raises(LikelihoodError, match="saturated"):
        engram.laplace(model, (x, wrong), structure="full", progress=False, prior_precision=1.0)
    right = model(x).argmax(1)  # nothing is left to learn: the prior it is
    engram.laplace(model, (x, right), structure="full", progress=False, prior_precision=1.0)


@pytest.mark.parametrize("noise_variance", [1e-9, 1.0, 1e12])
@pytest.mark.parametrize("prior_precision", [1e-6, 1.0, 1e12])
def test_a_weak_likelihood_and_a_strong_prior_are_not(noise_variance, prior_precision):
    models, (x, y) = problem()
    engram.laplace(
        models["linear"],
        (x, 1e3 * y),
        likelihood=Gaussian(noise_variance),
        structure="diagonal",
        prior_precision=prior_precision,
        progress=False,
    )
