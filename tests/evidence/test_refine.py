"""Refining against dense solves and closed forms."""

import pytest
import torch
from torch import nn

import engram
from cases import CASES
from engram.engine.session import session
from engram.errors import ArgumentError, DataError, ModelMismatchError
from engram.sensitivity.exact_steps import Agreement
from fitted import assert_close, posterior, sensitivities
from retraining_problems import PRIOR_PRECISION, RIDGE, ridge_problem, ridge_without
from snapshot import differences, snapshot

NAMES = ("mlp", "used_twice", "frozen_layer", "named_inputs", "conv2d_groups", "prelu", "lstm")
CHOSEN = [0, 3, 6]


def refine(case, result, fitted, **settings):
    return engram.refine(
        case.model,
        case.data,
        result,
        fitted,
        progress=False,
        **{"relative_residual": 1e-10, **settings},
    )


def dense_deviation(case, i, remaining):
    """J_i (remaining + delta)^-1 grad loss_i, [K]."""
    dense = case.dense
    precision = remaining + case.prior_precision * torch.eye(dense.num_params).double()
    step = torch.linalg.solve(precision, dense.gradients[i])
    return dense.jacobian[i] @ step


@pytest.mark.parametrize("name", NAMES)
def test_gauss_newton_solves_equal_the_dense_ones(name):
    case, fitted = CASES[name], posterior(name, "kronecker")
    refined = refine(case, sensitivities(case, fitted), fitted, indices=CHOSEN, curvature="ggn")
    for i in CHOSEN:
        kept = torch.ones(case.dense.num_data).double()
        kept[i] = 0
        expected = dense_deviation(case, i, case.dense.ggn(weights=kept))
        assert_close(refined.deviation[i], expected)
    assert refined.provenance["settings"]["refined"][0]["largest_residual"] <= 1e-10


def test_hessian_solves_equal_the_dense_ones():
    """A softmax regression has a positive-definite Hessian, whatever is left out."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    x, y = torch.randn(12, 4).double(), torch.randint(0, 3, (12,))
    fitted = engram.laplace(
        model, (x, y), structure="diagonal", progress=False, prior_precision=1.0
    )
    before = engram.sensitivities(model, (x, y), fitted, progress=False)
    refined = engram.refine(
        model, (x, y), before, fitted, indices=CHOSEN, relative_residual=1e-10, progress=False
    )
    exact = engram.laplace(
        model, (x, y), structure="full", curvature="hessian", progress=False, prior_precision=1.0
    )
    expected = engram.sensitivities(model, (x, y), exact, estimator="corrected", progress=False)
    assert_close(refined.deviation[CHOSEN], expected.deviation[CHOSEN])
    assert_close(refined.loo_loss[CHOSEN], expected.loo_loss[CHOSEN])
    assert_close(refined.score[CHOSEN], expected.score[CHOSEN])


def test_where_the_hessian_is_not_positive_less_of_it_is_taken_off():
    """Far from a minimum with a weak prior; the last resort is the Gauss-Newton matrix."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    data = (torch.randn(12, 3).double(), torch.randint(0, 2, (12,)))
    fitted = engram.laplace(model, data, prior_precision=1e-3, progress=False)
    before = engram.sensitivities(model, data, fitted, progress=False)
    settings = {"indices": range(12), "relative_residual": 1e-9, "progress": False}
    refined = engram.refine(model, data, before, fitted, **settings)
    plain = engram.refine(model, data, before, fitted, curvature="ggn", **settings)
    flagged = refined.flagged
    assert flagged.all()
    assert_close(refined.deviation, plain.deviation, 1e-6)
    assert refined.provenance["settings"]["refined"][0]["refused"] == 12


def test_retraining_a_ridge_regression_equals_the_closed_form():
    model, x, y = ridge_problem()
    fitted = engram.laplace(
        model, (x, y), likelihood=RIDGE, prior_precision=PRIOR_PRECISION, progress=False
    )
    before = engram.sensitivities(model, (x, y), fitted, progress=False)
    for method in ("retrain", "solve"):
        refined = engram.refine(
            model,
            (x, y),
            before,
            fitted,
            indices=[1, 4],
            method=method,
            relative_residual=1e-10,
            train=engram.recipes.Newton(relative_gradient=1e-9),
            progress=False,
        )
        for i in (1, 4):
            expected = x[i] @ ridge_without(x, y, [i])
            assert (refined.outputs[i] + refined.deviation[i] - expected).abs().max() < 1e-7
        assert (refined.deviation[2] == before.deviation[2]).all()


def test_a_quadratic_objective_keeps_every_promise():
    model, x, y = ridge_problem()
    fitted = engram.laplace(
        model,
        (x, y),
        likelihood=RIDGE,
        structure="full",
        prior_precision=PRIOR_PRECISION,
        progress=False,
    )
    with session(model, (x, y), RIDGE, progress=False) as opened:
        objective = Agreement(opened, fitted, fitted.layout)
        chosen = torch.tensor([0, 2])
        exact = torch.stack([ridge_without(x, y, [i]).T for i in (0, 2)])
        steps = (exact - model.weight.detach()).flatten(1)
        residual = RIDGE.residual(model(x).detach(), y)[chosen]
        gradients = (residual[:, :, None] * x[chosen][:, None, :]).flatten(1)
        ratios = objective.of_steps(chosen, steps, 0.5 * (gradients * steps).sum(1))
        assert (ratios - 1).abs().max() < 1e-8
        too_long = objective.of_steps(chosen, 4 * steps, 2 * (gradients * steps).sum(1))
        assert (too_long < 0).all()


def test_what_was_not_chosen_stays_and_columns_say_how_each_was_obtained(tmp_path):
    case, fitted = CASES["mlp"], posterior("mlp", "kronecker")
    before = sensitivities(case, fitted)
    assert "obtained" not in before.to_frame()
    once = refine(case, before, fitted, indices=[0, 3])
    twice = refine(case, once, fitted, indices=[3], method="retrain", train=engram.recipes.LBFGS())
    assert twice.to_frame()["obtained"].tolist() == [
        *("solve", "estimate", "estimate", "retrain", "estimate", "estimate", "estimate")
    ]
    kept = [1, 2, 4, 5, 6]
    for name in ("deviation", "prediction_deviation", "score", "loo_loss", "loss"):
        assert torch.equal(getattr(twice, name)[kept], getattr(before, name)[kept])
    assert torch.equal(twice.deviation[0], once.deviation[0])
    assert (before.obtained == 0).all()
    loaded = engram.load(twice.save(tmp_path / "run"))
    assert torch.equal(loaded.obtained, twice.obtained)
    assert [step["method"] for step in loaded.provenance["settings"]["refined"]] == [
        *("solve", "retrain")
    ]
    assert "1 by solve, 1 by retrain" in repr(loaded)
    assert "obtained" in twice.top(2)
    assert twice.report(tmp_path / "page.html").is_file()


def test_by_default_the_flagged_and_the_top_ones_are_refined():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    data = (torch.randn(60, 4), torch.randint(0, 3, (60,)))
    fitted = engram.laplace(model, data, progress=False, prior_precision=1.0)
    before = engram.sensitivities(model, data, fitted, progress=False)
    before.flagged[int(before.score.argmin())] = True
    refined = engram.refine(model, data, before, fitted, progress=False)
    done = refined.obtained.nonzero()[:, 0]
    assert set(before.score.topk(20).indices.tolist()) < set(done.tolist())
    assert int(before.score.argmin()) in done
    assert len(done) == 21


def test_the_model_is_as_before():
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 2)).train()
    data = (torch.randn(12, 3), torch.randint(0, 2, (12,)))
    fitted = engram.laplace(model, data, progress=False, prior_precision=1.0)
    result = engram.sensitivities(model, data, fitted, progress=False)
    before = snapshot(model)
    for method in ("solve", "retrain"):
        engram.refine(model, data, result, fitted, indices=[1], method=method, progress=False)
        assert differences(before, snapshot(model)) == []


def small():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    data = (torch.randn(12, 3), torch.randint(0, 2, (12,)))
    fitted = engram.laplace(model, data, progress=False, prior_precision=1.0)
    return model, data, fitted, engram.sensitivities(model, data, fitted, progress=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "guess"}, "method to be one of auto, solve, replay, retrain; got 'guess'"),
        ({"curvature": "empirical"}, "curvature to be one of hessian, ggn; got 'empirical'"),
        ({"relative_residual": 2}, "a relative_residual between 0 and 1; got 2"),
        ({"indices": [12]}, "indices from 0 to 11; got 12, out of range"),
        ({"indices": []}, "at least one index"),
    ],
)
def test_wrong_arguments(settings, message):
    model, data, fitted, result = small()
    with pytest.raises(ArgumentError, match=message):
        engram.refine(model, data, result, fitted, progress=False, **settings)


def test_a_result_of_other_data():
    model, (x, y), fitted, result = small()
    fewer = (x[:9], y[:9])
    with pytest.raises(DataError, match="all 9 examples of this data, in order; got one of 12"):
        engram.refine(model, fewer, result, fitted, progress=False)
    with pytest.raises(ModelMismatchError, match="got other targets"):
        engram.refine(model, (x, 1 - y), result, fitted, progress=False)
    with pytest.raises(ModelMismatchError, match="got other outputs"):
        engram.refine(model, (x + 1, y), result, fitted, progress=False)
    with pytest.raises(ArgumentError, match=r"a result of engram\.sensitivities; got dict"):
        engram.refine(model, (x, y), {}, fitted, progress=False)


def test_a_posterior_of_another_model():
    _, data, fitted, result = small()
    with pytest.raises(ModelMismatchError, match="other weights"):
        engram.refine(nn.Linear(3, 2), data, result, fitted, progress=False)


def test_a_function_trains_in_the_modes_of_the_model():
    torch.manual_seed(0)
    x, y = torch.randn(12, 3), torch.randint(0, 2, (12,))
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)).train()
    posterior = engram.laplace(
        model, (x, y), structure="diagonal", progress=False, prior_precision=1.0
    )
    result = engram.sensitivities(model, (x, y), posterior, progress=False)
    modes = []

    def fit(own, data):
        modes.append(own[1].training)
        own[0].weight.data.mul_(0.9)

    engram.refine(
        model, (x, y), result, posterior, indices=[0], method="retrain", train=fit, progress=False
    )
    assert modes == [True] * 3


def test_a_posterior_of_another_prior_or_likelihood_is_refused():
    case, fitted = CASES["mlp"], posterior("mlp", "kronecker")
    result = sensitivities(case, fitted)
    other = posterior("mlp", "kronecker", prior_precision=40.0)
    with pytest.raises(ModelMismatchError, match="rows of two objectives do not mix"):
        refine(case, result, other)
    richer = posterior("mlp", "full")  # a better preconditioner of the same objective
    assert refine(case, result, richer, indices=CHOSEN, curvature="ggn").obtained.any()
    scaled = engram.likelihoods.from_loss(
        lambda f, y: 2 * nn.functional.cross_entropy(f, y, reduction="none")
    )
    foreign = engram.laplace(
        case.model,
        case.data,
        likelihood=scaled,
        structure="diagonal",
        prior_precision=case.prior_precision,
        progress=False,
    )
    with pytest.raises(ModelMismatchError, match="the likelihood of the result"):
        engram.refine(case.model, case.data, result, foreign, progress=False)
