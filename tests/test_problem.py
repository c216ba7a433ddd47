"""A model is planned once, however many calls stand inside a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engram
from engram.engine import prepare
from engram.problem import Opener, Problem, opened_problem
from engram.sensitivity.leave_one_out import Asked, left_out
from minima import to_minimum

DELTA = 2.0
Net = tuple[nn.Module, tuple[Tensor, Tensor]]


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    x, y = torch.randn(24, 4, dtype=torch.float64), torch.randint(3, (24,))
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    to_minimum(model, (x, y), DELTA)
    return model, (x, y)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that passes were planned for."""
    planned: list[nn.Module] = []
    make_plan = prepare.make_plan

    def counted(model: nn.Module, *rest: Any) -> object:
        planned.append(model)
        return make_plan(model, *rest)

    monkeypatch.setattr(prepare, "make_plan", counted)
    return planned


def fitted(net: Net, structure: str = "kronecker") -> engram.Posterior:
    return engram.laplace(*net, structure=structure, prior_precision=DELTA, progress=False)


def refine(net: Net) -> Callable[[], object]:
    posterior = fitted(net)
    result = engram.sensitivities(*net, posterior, progress=False)
    return lambda: engram.refine(
        *net, result, posterior, indices=[0, 3], method="retrain", progress=False
    )


def verify(net: Net) -> Callable[[], object]:
    result = engram.sensitivities(*net, fitted(net), progress=False)
    return lambda: engram.verify(*net, result, sample=3, refits=2, progress=False)


def tune(net: Net) -> Callable[[], object]:
    model, data = net

    def train(own: nn.Module, delta: float) -> None:
        to_minimum(own, data, delta)

    return lambda: engram.tune(model, data, train, [1.0, 2.0, 4.0], progress=False)


def updates(net: Net) -> Callable[[], object]:
    model, data = net
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = engram.Tracker(
        model, optimizer, data, posterior="kronecker", prior_precision=DELTA, samples=2
    )
    return lambda: [tracker.update() for _ in range(2)]


@pytest.mark.parametrize("call", [refine, verify, tune, updates])
def test_calls_inside_a_call_plan_once(
    call: Callable[[Net], Callable[[], object]], net: Net, plans: list[nn.Module]
) -> None:
    ready = call(net)
    plans.clear()
    ready()
    assert len(plans) == 1


def test_a_copy_at_other_weights_is_served_by_the_same_plan(
    net: Net, plans: list[nn.Module]
) -> None:
    model, data = net
    opener = Opener(data, engram.likelihoods.Categorical())
    with opener.session(model, progress=False):
        pass
    other = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with opener.session(other, progress=False) as opened:
        found = torch.cat([observed.outputs for observed in opened.passes("outputs")])
    assert len(plans) == 1
    torch.testing.assert_close(found, other(data[0]))


def test_another_kind_of_model_is_planned_anew(net: Net, plans: list[nn.Module]) -> None:
    model, data = net
    opener = Opener(data, engram.likelihoods.Categorical())
    for one in (model, nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()):
        with opener.session(one, progress=False):
            pass
    assert len(plans) == 2


class Switched(nn.Module):
    """Another model of the same modules once its flag is set."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.flag = False

    def forward(self, x: Tensor) -> Tensor:
        """In the other order, and the scale on another side."""
        if self.flag:
            return self.first(self.scale * self.second(x).tanh())
        return self.scale * self.second(self.first(x).tanh())


def test_a_model_that_runs_otherwise_is_planned_anew(plans: list[nn.Module]) -> None:
    torch.manual_seed(0)
    model = Switched().double()
    data = (torch.randn(9, 4, dtype=torch.float64), torch.randint(4, (9,)))
    opener = Opener(data, engram.likelihoods.Categorical())
    with opener.session(model, progress=False):
        pass
    model.flag = True
    posterior = engram.laplace(
        model, data, structure="diagonal", progress=False, prior_precision=1.0
    )
    fresh = engram.sensitivities(model, data, posterior, estimator="linear", progress=False)
    plans.clear()
    with opener.session(model, progress=False) as opened:
        again = left_out(Problem(opened, posterior), Asked("linear"))
    assert len(plans) == 1
    torch.testing.assert_close(again.deviation, fresh.deviation, rtol=1e-12, atol=0)


def test_a_problem_has_the_likelihood_of_its_posterior(net: Net) -> None:
    posterior = fitted(net)
    with opened_problem(*net, posterior, progress=False) as problem:
        assert problem.likelihood is posterior.likelihood
        assert problem.num_data == 24
        assert not problem.model.training
    assert net[0].training


@pytest.mark.parametrize("structure", ["kronecker", "full", "diagonal"])
def test_one_posterior_has_one_default_estimator(net: Net, structure: str) -> None:
    model, data = net
    posterior = fitted(net, structure)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = engram.Tracker(model, optimizer, data, posterior=structure, prior_precision=DELTA)
    assert tracker.posterior().digest == posterior.digest  # the same name is the same posterior
    tracked = tracker.update()
    result = engram.sensitivities(model, data, posterior, progress=False)
    assert tracked is not None
    assert tracked.basis.estimator == result.basis.estimator
    tuned = engram.tune(
        model, data, lambda own, delta: None, [DELTA], posterior=structure, progress=False
    )
    assert tuned.best.estimate == result.loo_nll
