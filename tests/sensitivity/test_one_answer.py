"""One posterior, one answer: a group of one is the single example, whichever way it is asked."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.func import functional_call, hessian, jacrev

import engram
from engram.core.parameters import Layout
from engram.optimizers import Newton
from minima import to_minimum

DELTA, CALM = 1.0, 5.0
FITS = {
    "default": {},
    "full": {"structure": "full"},
    "kronecker": {"structure": "kronecker"},
    "diagonal": {"structure": "diagonal"},
    "ekfac": {"structure": "ekfac"},
    "last_layer": {"structure": "last_layer"},
    "low_rank": {"structure": "low_rank", "curvature": "hessian"},
    "low_rank ggn": {"structure": "low_rank", "curvature": "ggn"},
}


def at_minimum(prior_precision):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    data = (torch.randn(30, 3).double(), torch.randint(0, 4, (30,)))
    data[1][11] = 3  # by itself in its class
    data[1][data[1] == 3] = torch.where(torch.arange(30)[data[1] == 3] == 11, 3, 2)
    to_minimum(model, data, prior_precision)
    return model, data


@pytest.fixture(scope="module")
def problem():
    return at_minimum(DELTA)


def fitted(problem, kind):
    return engram.laplace(*problem, prior_precision=DELTA, progress=False, **FITS[kind])


@pytest.mark.parametrize("kind", FITS)
def test_a_group_of_one_is_the_single_example(problem, kind):
    posterior = fitted(problem, kind)
    result = engram.sensitivities(*problem, posterior, progress=False)
    close = {"rtol": 1e-4, "atol": 1e-6} if "low" in kind else {"rtol": 1e-9, "atol": 1e-12}
    for index in range(0, 30, 3):
        removal = engram.remove(*problem, posterior, [index], progress=False)
        moved = (removal.group.outputs_without - removal.group.outputs)[0]
        torch.testing.assert_close(moved, result.deviation[index], **close)
        torch.testing.assert_close(removal.group.loss_without[0], result.loo_loss[index], **close)
        assert removal.flagged == bool(result.flagged[index])
        assert removal.estimator == result.basis.estimator


def test_so_is_a_class_with_one_example(problem):
    posterior = fitted(problem, "default")
    result = engram.sensitivities(*problem, posterior, progress=False)
    removal = engram.remove_classes(*problem, posterior, progress=False)[3]
    assert removal.indices.tolist() == [11]
    torch.testing.assert_close(removal.group.loss_without, result.loo_loss[[11]])


@pytest.mark.parametrize("estimator", ["linear", "corrected", "newton"])
def test_so_by_name_and_where_a_guard_holds(problem, estimator):
    weak = engram.laplace(
        *problem, structure="full", curvature="hessian", prior_precision=DELTA, progress=False
    )
    flimsy = replace(
        weak, blocks=tuple(replace(b, cholesky=0.6 * b.cholesky) for b in weak.blocks)
    )  # less in it than the examples bring, so that guards hold
    for posterior in (weak, flimsy):
        result = engram.sensitivities(*problem, posterior, estimator=estimator, progress=False)
        if posterior is flimsy and estimator == "corrected":
            assert result.flagged.any()
        for index in range(0, 30, 4):
            removal = engram.remove(
                *problem, posterior, [index], estimator=estimator, progress=False
            )
            assert removal.flagged == bool(result.flagged[index])
            torch.testing.assert_close(
                removal.group.loss_without[0], result.loo_loss[index], rtol=1e-8, atol=1e-10
            )


def dense_newton(model, data, prior_precision, members, shares):
    """(H + delta - sum eps_j H_j)^-1 sum eps_j g_j from matrices that are all built."""
    layout = Layout.of({n: p.detach() for n, p in model.named_parameters()})
    start = layout.flatten({n: p.detach() for n, p in model.named_parameters()})
    weights = torch.ones(len(data[0])).double()
    weights[members] -= shares

    def loss(vector, weights):
        outputs = functional_call(model, layout.unflatten(vector), (data[0],))
        return (weights * nn.functional.cross_entropy(outputs, data[1], reduction="none")).sum()

    prior = prior_precision * torch.eye(len(start)).double()
    matrix = hessian(lambda v: loss(v, weights))(start) + prior
    taken = torch.zeros_like(weights)
    taken[members] = shares
    step = torch.linalg.solve(matrix, jacrev(lambda v: loss(v, taken))(start))
    return layout.unflatten(step), float(torch.linalg.eigvalsh(matrix)[0])


@pytest.mark.parametrize(
    ("members", "shares"), [([4], 0.5), ([4], -1.0), ([2, 9], 1.0), ([2, 9, 20], 0.7)]
)
def test_a_group_is_taken_out_of_the_hessian(members, shares):
    calm = at_minimum(CALM)
    share = torch.full((len(members),), shares).double()
    expected, smallest = dense_newton(*calm, CALM, members, share)
    assert smallest > 0
    posterior = engram.laplace(*calm, prior_precision=CALM, progress=False)
    removal = engram.remove(*calm, posterior, members, weights=share, progress=False)
    assert removal.matrix == "precision without the group's Hessian"
    assert removal.why == ""
    for name, value in expected.items():
        torch.testing.assert_close(removal.delta[name], value, rtol=1e-6, atol=1e-9)


def test_where_nothing_definite_remains_the_gauss_newton_matrix_is_named(problem):
    posterior, pair = fitted(problem, "default"), [2, 9]
    assert dense_newton(*problem, DELTA, pair, torch.ones(2).double())[1] < 0
    removal = engram.remove(*problem, posterior, pair, progress=False)
    assert removal.matrix == "exact Gauss-Newton matrix of the remaining data"
    assert "Hessian of the remaining data" in removal.why
    assert removal.why in repr(removal)
    plain = fitted(problem, "full")
    expected = engram.remove(*problem, plain, pair, estimator="corrected", progress=False)
    for name, value in expected.delta.items():
        torch.testing.assert_close(removal.delta[name], value, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", ["default", "full", "kronecker"])
def test_it_is_continuous_in_the_weights(problem, kind):
    posterior = fitted(problem, kind)
    at = {
        share: engram.remove(*problem, posterior, [7], weights=[share], progress=False)
        for share in (1e-6, 1 - 1e-6, 1.0, 1 + 1e-6)
    }
    linear = engram.remove(*problem, posterior, [7], estimator="linear", progress=False)
    for name, whole in at[1.0].delta.items():
        size = float(whole.abs().max())
        for near in (1 - 1e-6, 1 + 1e-6):
            assert float((at[near].delta[name] - whole).abs().max()) < 1e-4 * size
        torch.testing.assert_close(
            at[1e-6].delta[name] / 1e-6, linear.delta[name], rtol=1e-3, atol=1e-7
        )


@pytest.mark.parametrize("kind", FITS)
def test_the_order_of_a_group_does_not_matter(problem, kind):
    posterior = fitted(problem, kind)
    one = engram.remove(*problem, posterior, [3, 14, 8], weights=[1, 0.5, 0.2], progress=False)
    other = engram.remove(*problem, posterior, [8, 3, 14], weights=[0.2, 1, 0.5], progress=False)
    again = engram.remove(*problem, posterior, [3, 14, 8], weights=[1, 0.5, 0.2], progress=False)
    for name, value in one.delta.items():
        assert torch.equal(other.delta[name], value)
        assert torch.equal(again.delta[name], value)
    torch.testing.assert_close(one.group.loss_without[[2, 0, 1]], other.group.loss_without)


def test_kronecker_factors_lose_the_groups_inputs(problem):
    """Against factors fitted to the remaining inputs, with the rows of all data."""
    model, (x, y) = problem
    posterior, group = fitted(problem, "kronecker"), [1, 5, 6, 20]
    removal = engram.remove(model, (x, y), posterior, group, progress=False)
    assert removal.matrix == "Kronecker factors of the remaining data"
    rest = [i for i in range(30) if i not in group]
    loss = nn.functional.cross_entropy(model(x[group]), y[group], reduction="sum")
    gradient = dict(
        zip(
            ("0.weight", "0.bias"),
            torch.autograd.grad(loss, [model[0].weight, model[0].bias]),
            strict=True,
        )
    )
    inputs = torch.cat([x, torch.ones(30, 1).double()], dim=1)
    probability = model(x).softmax(1)
    hidden = (1 - model[0](x).tanh() ** 2)[:, None, :] * model[2].weight
    output = torch.diag_embed(probability) - probability[:, :, None] * probability[:, None, :]
    rows = torch.einsum("nko,nkl,nlp->op", hidden, output, hidden) / 30
    columns = inputs[rest].T @ inputs[rest]
    matrix = (
        torch.kron(rows.detach().contiguous(), columns) + DELTA * torch.eye(len(rows) * 4).double()
    )
    flat = torch.cat([gradient["0.weight"], gradient["0.bias"][:, None]], dim=1).flatten()
    expected = torch.linalg.solve(matrix, flat).reshape(5, 4)
    torch.testing.assert_close(removal.delta["0.weight"], expected[:, :3], rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(removal.delta["0.bias"], expected[:, 3], rtol=1e-8, atol=1e-12)


def test_influence_has_the_linear_rules_step_on_its_diagonal(problem):
    posterior = fitted(problem, "default")
    pairs = engram.influence(*problem, problem[1], posterior, progress=False)
    result = engram.sensitivities(*problem, posterior, estimator="linear", progress=False)
    residual = result.outputs.softmax(1) - nn.functional.one_hot(problem[1][1], 4)
    torch.testing.assert_close(pairs.diagonal(), (residual * result.deviation).sum(1))
    variance = engram.prediction_variance(*problem, posterior, progress=False)
    moved = (variance @ residual[:, :, None])[:, :, 0]
    torch.testing.assert_close(moved, result.deviation)


@pytest.mark.parametrize("kind", ["default", "full", "kronecker", "low_rank ggn"])
def test_calibration_scales_every_answer(problem, kind):
    """By c in S: the linear rule's steps, influences and variances are 1 / c of what they were."""
    posterior = fitted(problem, kind)
    scaled = engram.calibrate(*problem, posterior, curvature="ggn", progress=False)
    twice = engram.calibrate(*problem, scaled, curvature="ggn", seed=1, progress=False)
    for calibrated in (scaled, twice):
        factor = calibrated.scale
        assert factor == pytest.approx(calibrated.settings["calibration"]["total_scale"])
        one, other = (
            engram.remove(*problem, p, [2, 3], estimator="linear", progress=False)
            for p in (posterior, calibrated)
        )
        for name, value in one.delta.items():
            torch.testing.assert_close(other.delta[name] * factor, value)
        one, other = (
            engram.influence(*problem, problem[1], p, progress=False)
            for p in (posterior, calibrated)
        )
        torch.testing.assert_close(other * factor, one)
        one, other = (
            engram.prediction_variance(*problem, p, progress=False) for p in (posterior, calibrated)
        )
        torch.testing.assert_close(other * factor, one)
    result = engram.sensitivities(*problem, scaled, progress=False)
    for index in (0, 9):
        removal = engram.remove(*problem, scaled, [index], progress=False)
        torch.testing.assert_close(removal.group.loss_without[0], result.loo_loss[index])


def test_a_calibrated_group_has_the_scaled_gauss_newton_matrix(problem):
    """Where a group needs the exact matrix, it has the scale of the posterior."""
    low = replace(fitted(problem, "low_rank ggn"), scale=2.0)
    removal = engram.remove(*problem, low, [1, 2], estimator="corrected", progress=False)
    full = fitted(problem, "full")
    twice = replace(
        full, blocks=tuple(replace(b, cholesky=2**0.5 * b.cholesky) for b in full.blocks)
    )
    expected = engram.remove(*problem, twice, [1, 2], estimator="corrected", progress=False)
    for name, value in expected.delta.items():
        torch.testing.assert_close(removal.delta[name], value, rtol=1e-4, atol=1e-7)


def test_newtons_own_posterior_has_the_answers_of_laplace(problem):
    model, (x, y) = problem
    optimizer = Newton(model.parameters(), num_data=30, prior_precision=DELTA, lr=0.0)
    optimizer.step(lambda: nn.functional.cross_entropy(model(x), y))
    read = engram.posterior_of(optimizer, model, num_data=30)
    for group in ([5], [5, 6]):
        one, other = (
            engram.remove(*problem, posterior, group, progress=False)
            for posterior in (read, fitted(problem, "default"))
        )
        assert one.matrix == other.matrix
        for name, value in other.delta.items():
            torch.testing.assert_close(one.delta[name], value, rtol=1e-6, atol=1e-10)


def test_a_removal_that_is_no_number_is_flagged(problem):
    removal = engram.remove(*problem, fitted(problem, "diagonal"), [1], progress=False)
    assert not removal.flagged
    lost = replace(removal.group, loss_without=removal.group.loss_without * float("nan"))
    assert replace(removal, group=lost).flagged
    assert replace(removal, evaluation=lost).flagged
    assert "not to be believed" in repr(replace(removal, group=lost))


@pytest.mark.parametrize("kind", ["default", "full", "kronecker", "low_rank"])
@pytest.mark.parametrize("weight", [1e20, 1e308, -1e308])
def test_weights_without_measure_are_flagged_or_refused(problem, kind, weight):
    posterior = fitted(problem, kind)
    try:
        removal = engram.remove(*problem, posterior, [1], weights=[weight], progress=False)
    except engram.errors.EngramError:
        return
    assert removal.flagged
