"""Gradients for many seeds at once are those of single passes, whatever the operations."""

import pytest
import torch
from torch import nn

import engram
from engram.curvature.batched_gradients import many_gradients
from engram.optimizers import GaussNewton, Newton


class GroupNormed(nn.Module):
    """A convolution, a group norm and an average over places."""

    def __init__(self, groups):
        super().__init__()
        self.before, self.norm = nn.Conv2d(2, 2, 1), nn.GroupNorm(groups, 2)
        self.head = nn.Linear(2, 3)

    def forward(self, x):
        return self.head(self.norm(self.before(x)).tanh().flatten(2).mean(2))


def problem(groups, examples, places):
    torch.manual_seed(0)
    model = GroupNormed(groups).double()
    return model, (torch.randn(examples, 2, *places).double(), torch.arange(examples) % 3)


@pytest.mark.parametrize("places", [(1, 2), (2, 2), (3, 3)])
@pytest.mark.parametrize("examples", [1, 2, 5])
@pytest.mark.parametrize("groups", [1, 2])
def test_second_derivatives_of_a_group_norm(groups, examples, places):
    """All at once they raise for most shapes, and are wrong for one example in one group."""
    model, (x, y) = problem(groups, examples, places)
    parameters = list(model.parameters())
    loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    flat = torch.cat([g.flatten() for g in gradients])
    seeds = torch.eye(len(flat)).double()
    found = many_gradients([flat], parameters, [seeds], len(seeds))
    for m, seed in enumerate(seeds):
        alone = torch.autograd.grad(flat, parameters, seed, retain_graph=True)
        for part, expected in zip(found, alone, strict=True):
            torch.testing.assert_close(part[m], expected)


def test_a_hessian_does_not_depend_on_the_batches():
    """One example at a time is where the derivative all at once is wrong without a word."""
    model, data = problem(1, 4, (2, 2))
    settings = {"structure": "full", "curvature": "hessian", "prior_precision": 20.0}
    whole, single = (engram.laplace(model, data, **settings, batch_size=b) for b in (4, 1))
    vectors = {n: torch.randn(1, *p.shape).double() for n, p in model.named_parameters()}
    for name, value in whole.multiply(vectors).items():
        torch.testing.assert_close(single.multiply(vectors)[name], value)


def test_gauss_newton_with_parameters_that_take_no_part():
    model, (x, y) = problem(2, 5, (2, 2))
    model.spare = nn.Linear(3, 2).double()
    optimizer = Newton(
        model.parameters(), num_data=5, prior_precision=2.0, curvature=GaussNewton("categorical")
    )
    optimizer.step(lambda: (model(x), y))
    posterior = engram.posterior_of(optimizer, model, num_data=5)
    own = {n: torch.ones_like(p)[None] for n, p in model.named_parameters()}
    for name in ("spare.weight", "spare.bias"):
        torch.testing.assert_close(posterior.multiply(own)[name], 2.0 * own[name])


def test_a_parameter_without_dimensions():
    """A temperature: one number has its row of the Hessian, and of the Gauss-Newton matrix."""

    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(3, 2)
            self.temperature = nn.Parameter(torch.tensor(1.5))

        def forward(self, x):
            return super().forward(x) * self.temperature

    torch.manual_seed(0)
    model, x, y = Scaled().double(), torch.randn(5, 3).double(), torch.arange(5) % 2
    fitted = engram.laplace(
        model, (x, y), structure="full", curvature="hessian", prior_precision=30.0
    )
    features = nn.functional.linear(x, model.weight, model.bias).detach()

    def loss(temperature):
        return nn.functional.cross_entropy(temperature * features, y, reduction="sum")

    at = model.temperature.detach()
    expected = 30 + torch.autograd.functional.hessian(loss, at)
    only = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    only["temperature"] = torch.ones_like(at)
    torch.testing.assert_close(fitted.multiply(only)["temperature"], expected)
    optimizer = Newton(
        model.parameters(), num_data=5, prior_precision=30.0, curvature=GaussNewton("categorical")
    )
    optimizer.step(lambda: (model(x), y))
    posterior = engram.posterior_of(optimizer, model, num_data=5)
    torch.testing.assert_close(posterior.multiply(only)["temperature"], expected)
