"""Changed labels, changed inputs and added examples, against fitting again."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import engram
from engram.errors import ArgumentError, DataError

DELTA = 1.5


def ridge_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(20, 3, generator=generator).double()
    return x, (x.sum(1, keepdim=True) + torch.randn(20, 1, generator=generator).double())


def ridge(x: Tensor, y: Tensor) -> Tensor:
    return torch.linalg.solve(x.T @ x + DELTA * torch.eye(x.shape[1]).double(), x.T @ y).T


def fitted_ridge() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    data = ridge_data()
    model = nn.Linear(3, 1, bias=False).double()
    model.weight.data = ridge(*data)
    return model, data


CHANGES = ["label", "input", "both", "add", "all"]


def changed(x: Tensor, y: Tensor, what: str) -> tuple[dict[str, object], Tensor, Tensor]:
    """Arguments of perturb, and the perturbed data."""
    generator = torch.Generator().manual_seed(8)
    x_new, y_new = x.clone(), y.clone()
    indices = torch.tensor([4, 1, 17])
    given: dict[str, object] = {}
    if what in ("label", "both", "all"):
        y_new[indices] = torch.randn(3, *y.shape[1:], generator=generator).to(y) * 4
        given["targets"] = y_new[indices]
    if what in ("input", "both", "all"):
        x_new[indices] = torch.randn(3, x.shape[1], generator=generator).to(x)
        given["inputs"] = x_new[indices]
    if given:
        given["indices"] = indices
    if what in ("add", "all"):
        more = torch.randn(2, x.shape[1], generator=generator).to(x)
        labels = torch.randn(2, *y.shape[1:], generator=generator).to(y)
        given["add"] = (more, labels)
        x_new, y_new = torch.cat([x_new, more]), torch.cat([y_new, labels])
    return given, x_new, y_new


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize(
    ("structure", "curvature"), [("full", "ggn"), ("full", "hessian"), ("kronecker", "ggn")]
)
def test_ridge_regression_is_fitted_again(structure: str, curvature: str, what: str) -> None:
    model, data = fitted_ridge()
    posterior = engram.laplace(
        model,
        data,
        likelihood="gaussian",
        structure=structure,
        curvature=curvature,
        prior_precision=DELTA,
        tolerance=0,
    )
    given, x_new, y_new = changed(*data, what)
    estimator = "downdated" if structure == "kronecker" else "auto"
    before = copy.deepcopy(model.state_dict())
    found = engram.perturb(model, data, posterior, estimator=estimator, evaluate_on=data, **given)
    refit = ridge(x_new, y_new)
    assert torch.equal(model.weight, before["weight"])
    torch.testing.assert_close(
        model.weight.data + found.delta["weight"], refit, rtol=1e-10, atol=1e-10
    )
    assert found.evaluation is not None
    torch.testing.assert_close(found.evaluation.outputs_without, data[0] @ refit.T)
    if found.changed is not None:
        new = x_new[found.indices]
        torch.testing.assert_close(found.changed.outputs_without, new @ refit.T)
        squares = (new @ refit.T - y_new[found.indices]).square()[:, 0]
        loss = 0.5 * squares + 0.5 * math.log(2 * math.pi)
        torch.testing.assert_close(found.changed.loss_without, loss)
        assert found.before is not None
        old = data[0][found.indices] @ refit.T
        torch.testing.assert_close(found.before.outputs_without, old)
    if found.added is not None:
        torch.testing.assert_close(found.added.outputs_without, x_new[20:] @ refit.T)
    assert found.signals.agreement == pytest.approx(1.0, abs=1e-6)
    assert "Perturbation" in repr(found)


def minimised(
    x: Tensor, y: Tensor, hidden: int, start: nn.Module | None = None, steps: int = 60
) -> nn.Module:
    torch.manual_seed(2)
    model = start
    if model is None:
        layers = [nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, 2)]
        model = (nn.Sequential(*layers) if hidden else nn.Linear(3, 2)).double()
    optimizer = torch.optim.LBFGS(
        model.parameters(),
        max_iter=steps,
        tolerance_grad=1e-11,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )

    def objective() -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y, reduction="sum")
        total = loss + DELTA / 2 * sum(p.square().sum() for p in model.parameters())
        total.backward()
        return total

    for _ in range(10):
        optimizer.step(objective)
    return model


@pytest.mark.parametrize("hidden", [0, 4])
def test_classifiers_follow_their_refits(hidden: int) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(60, 3, generator=generator).double()
    y = (x[:, 0] + 0.5 * torch.randn(60, generator=generator).double() > 0).long()
    model = minimised(x, y, hidden)
    posterior = engram.laplace(
        model, (x, y), structure="full", curvature="hessian", prior_precision=DELTA
    )
    moved = x.clone()
    moved[[3, 7]] += 0.7
    near = model(x).detach().diff(dim=1)[:, 0].abs().argsort()[:2]  # least sure: flips are likely
    flipped = y.clone()
    flipped[near] = 1 - flipped[near]
    likely, unlikely = (x[:2] * 1.3, y[:2]), (x[:2] * 1.3, 1 - y[:2])
    cases = [
        ({"indices": near, "targets": flipped[near]}, x, flipped, 0.25),
        ({"indices": [3, 7], "inputs": moved[[3, 7]]}, moved, y, 0.05),
        ({"add": likely}, torch.cat([x, likely[0]]), torch.cat([y, likely[1]]), 0.15),
        # a contradiction that the net is sure about: one step leads too far, in its direction
        ({"add": unlikely}, torch.cat([x, unlikely[0]]), torch.cat([y, unlikely[1]]), 0.6),
    ]
    for given, x_new, y_new, largest in cases:
        found = engram.perturb(model, (x, y), posterior, evaluate_on=(x, y), **given)
        again = minimised(x_new, y_new, hidden, copy.deepcopy(model))
        true = (again(x) - model(x)).detach()
        assert found.evaluation is not None
        estimate = found.evaluation.outputs_without - found.evaluation.outputs
        assert float((estimate - true).norm() / true.norm()) < largest
        assert float((estimate * true).sum() / (estimate.norm() * true.norm())) > 0.93


def test_a_perturbation_is_the_sum_of_what_goes_and_what_comes() -> None:
    """To first order, with the precision of all data: the difference of two removals."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    x, y = torch.randn(30, 3), torch.arange(30) % 2
    posterior = engram.laplace(model, (x, y), structure="kronecker", prior_precision=1.0)
    found = engram.perturb(
        model, (x, y), posterior, [2, 9], targets=1 - y[[2, 9]], estimator="linear", step_size=0.5
    )
    loss = functional.cross_entropy
    gradient = torch.autograd.grad(
        loss(model(x[[2, 9]]), y[[2, 9]], reduction="sum")
        - loss(model(x[[2, 9]]), 1 - y[[2, 9]], reduction="sum"),
        list(model.parameters()),
    )
    names = [name for name, _ in model.named_parameters()]
    expected = posterior.solve(dict(zip(names, gradient, strict=True)))
    for name in names:
        torch.testing.assert_close(found.delta[name], 0.5 * expected[name], rtol=1e-4, atol=1e-6)


def test_dict_inputs_and_datasets() -> None:
    model, (x, y) = fitted_ridge()

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = model

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    wrapped = Named().double()
    data = [({"x": row}, label) for row, label in zip(x, y, strict=True)]
    posterior = engram.laplace(
        wrapped, data, likelihood="gaussian", structure="full", prior_precision=DELTA
    )
    new = x[[0, 5]] - 1
    found = engram.perturb(wrapped, data, posterior, [0, 5], inputs={"x": new})
    moved = x.clone()
    moved[[0, 5]] = new
    torch.testing.assert_close(
        model.weight.data + found.delta["linear.weight"], ridge(moved, y), rtol=1e-9, atol=1e-9
    )


def test_bad_requests_say_what_to_do() -> None:
    model, data = fitted_ridge()
    posterior = engram.laplace(model, data, likelihood="gaussian", prior_precision=DELTA)

    def perturb(*indices: object, **given: object) -> engram.Perturbation:
        return engram.perturb(model, data, posterior, *indices, **given)

    with pytest.raises(ArgumentError, match=r"neither.*add=\(x, y\)"):
        perturb()
    with pytest.raises(ArgumentError, match=r"indices alone.*engram.remove"):
        perturb([1])
    with pytest.raises(ArgumentError, match="indices of the examples that are changed"):
        perturb(targets=[[1.0]])
    with pytest.raises(DataError, match="2 rows of targets, one per index"):
        perturb([1, 2], targets=[[1.0]])
    with pytest.raises(DataError, match=r"targets of shape \[2, 1\]"):
        perturb([1, 2], targets=[1.0, 2.0])
    with pytest.raises(DataError, match=r"inputs of shape"):
        perturb([1, 2], inputs=torch.zeros(2, 4))
    with pytest.raises(ArgumentError, match="estimator to be one of auto, linear"):
        perturb([1], targets=[[1.0]], estimator="paper")
    with pytest.raises(ArgumentError, match="each index once"):
        perturb([1, 1], targets=[[1.0], [2.0]])


def test_advice_is_about_changes_and_not_about_leaving_out() -> None:
    """Twenty wrong labels at once, far from a minimum: nothing is to be replayed or left out."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    x, y = torch.randn(30, 3), torch.arange(30) % 2
    posterior = engram.laplace(model, (x, y), structure="full", prior_precision=0.01)
    found = engram.perturb(model, (x, y), posterior, range(20), targets=1 - y[:20])
    remedies = [reason.remedy for reason in found.verdict.reasons]
    assert remedies
    assert not [words for words in remedies if "eave out" in words or "replay" in words]
    assert [words for words in remedies if "changed data" in words]
