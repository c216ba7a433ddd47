"""Parameters with priors of their own are trained again with these, not with their mean."""

import pytest
import torch
from torch import nn

import engram
from engram.errors import ArgumentError
from engram.likelihoods import Gaussian
from engram.retraining.recipes import SGD, Adam, Newton

DECAYS = {"weight": 0.3, "bias": 0.02}
NUM_DATA = 20
PRIOR = {name: NUM_DATA * decay for name, decay in DECAYS.items()}


def solution(x, y, prior):
    """argmin of 1/2 sum (y - w'x - b)^2 + 1/2 d_w |w|^2 + 1/2 d_b b^2, [D + 1]."""
    wide = torch.cat([x, torch.ones(len(x), 1).double()], dim=1)
    penalty = torch.tensor([prior["weight"]] * x.shape[1] + [prior["bias"]]).double()
    return torch.linalg.solve(wide.T @ wide + penalty.diag(), wide.T @ y[:, 0])


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_DATA, 3, generator=generator).double()
    y = x.sum(1, keepdim=True) + 3.0 + torch.randn(NUM_DATA, 1, generator=generator).double()
    model = nn.Linear(3, 1).double()
    found = solution(x, y, PRIOR)
    with torch.no_grad():
        model.weight.copy_(found[None, :3])
        model.bias.copy_(found[3:])
    return model, (x, y)


def left_out(data, index, prior=PRIOR):
    x, y = data
    kept = torch.arange(len(x)) != index
    return float(solution(x[kept], y[kept], prior) @ torch.cat([x[index], torch.ones(1).double()]))


def fitted(model, num_data=NUM_DATA):
    groups = [
        {"params": [parameter], "weight_decay": DECAYS[name]}
        for name, parameter in model.named_parameters()
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    return engram.posterior_of(optimizer, model, num_data=num_data, likelihood=Gaussian())


RECIPES = {
    "newton": Newton(relative_gradient=1e-9),
    "lbfgs": engram.recipes.LBFGS(relative_gradient=1e-9),
    "adam": Adam(0.05, epochs=300, batch_size=None),
    "sgd": SGD(0.05, epochs=300, batch_size=None),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_train_with_the_prior_of_each_parameter(problem, recipe):
    model, data = problem
    truth = engram.retrain(
        model, data, [0, 7], train=RECIPES[recipe], likelihood=Gaussian(),
        prior_precision=PRIOR, progress=False,
    )  # fmt: skip
    found = (truth.outputs + truth.deviation)[:, 0].tolist()
    assert found == pytest.approx([left_out(data, 0), left_out(data, 7)], abs=1e-6)


def test_verify_and_refine_take_the_priors_of_the_posterior(problem):
    model, data = problem
    posterior = fitted(model)
    assert posterior.prior_by_name == pytest.approx(PRIOR)
    result = engram.sensitivities(model, data, posterior, progress=False)
    check = engram.verify(model, data, result, sample=6, progress=False)
    expected = [left_out(data, int(i)) for i in check.truth.indices]
    found = (check.truth.outputs + check.truth.deviation)[:, 0].tolist()
    assert found == pytest.approx(expected, abs=2e-3)
    refined = engram.refine(
        model, data, result, posterior, indices=[2, 5], method="retrain",
        train=Newton(relative_gradient=1e-9), progress=False,
    )  # fmt: skip
    found = (refined.outputs + refined.deviation)[[2, 5], 0].tolist()
    assert found == pytest.approx([left_out(data, 2), left_out(data, 5)], abs=1e-7)


def test_the_mean_of_the_priors_is_another_answer(problem):
    data = problem[1]
    mean = dict.fromkeys(PRIOR, (3 * PRIOR["weight"] + PRIOR["bias"]) / 4)
    assert abs(left_out(data, 0, mean) - left_out(data, 0)) > 0.02


def test_a_saved_result_keeps_its_priors(problem, tmp_path):
    model, data = problem
    result = engram.sensitivities(model, data, fitted(model))
    assert engram.load(result.save(tmp_path)).basis.prior_by_name == pytest.approx(PRIOR)


@pytest.mark.parametrize(
    ("prior", "words"),
    [
        ({"weight": 1.0}, "none for 'bias'"),
        ({"weight": 1.0, "bias": 1.0, "scale": 1.0}, "one for 'scale'"),
        ({"weight": 1.0, "bias": -1.0}, "-1.0 for 'bias'"),
        ({"weight": 1.0, "bias": "a"}, "'a' for 'bias'"),
        ({"weight": 1.0, "bias": float("nan")}, "nan for 'bias'"),
        ({"weight": 0.0, "bias": 0.0}, "0 for all"),
        ([1.0, 2.0], "positive prior_precision"),
        (0.0, "positive prior_precision"),
    ],
    ids=str,
)
def test_priors_that_make_no_sense(problem, prior, words):
    model, data = problem
    with pytest.raises(ArgumentError, match=words):
        engram.retrain(
            model, data, [0], likelihood=Gaussian(), prior_precision=prior, progress=False
        )
