"""Sensitivities through the engine against the dense reference, to 1e-8.

Every case with every structure once, by the rule that is one product V e; V itself is in
test_variance. What the rules make of V and e is in estimators/test_rules: here each is asked on
some nets, and those that need more than V (``newton``, ``downdated``) on every net that has it.
"""

import pytest
import torch

import engram
from cases import BY_LIKELIHOOD, CASES, MLP
from dense_deviation import deviations, downdated, newton
from engram.errors import NonFiniteError
from engram.sensitivity.estimators.base import eigen
from fitted import PARAMETERS, assert_close, posterior, precision, sensitivities
from problems import ESTIMATORS

FIELDS = ("deviation", "prediction_deviation", "score", "loss", "loo_loss")
LAST_LAYER = ["mlp", "positions", "conv2d_groups", "attention_fused"] + [
    case.name for case in BY_LIKELIHOOD
]
PROBLEMS = PARAMETERS + [(name, "last_layer") for name in LAST_LAYER]


ASKED = [
    (name, structure)
    for name in ("mlp_poisson", "two_inputs", "conv2d_groups", "encoder_layer", "embedding")
    for structure in ("diagonal", "kronecker", "full")
] + [("mlp", "last_layer"), ("mlp", "isotropic"), ("mlp", "ekfac")]
NOT_LINEAR = [name for name in ESTIMATORS if name != "linear"]


def hessian_prior(name):
    """Twice what makes the Hessian positive definite, whatever the network."""
    lowest = float(torch.linalg.eigvalsh(CASES[name].dense.hessian).min())
    return max(2.0, 2.0 - 2 * lowest)


def assert_agrees(case, result, expected, tolerance=1e-8):
    assert_close(result.outputs, case.dense.outputs)
    for field in FIELDS:
        assert_close(getattr(result, field), getattr(expected, field), tolerance)
    assert torch.equal(result.indices, torch.arange(case.dense.num_data))


@pytest.mark.parametrize(("name", "structure"), PROBLEMS)
def test_against_the_dense_reference(name, structure):
    case = CASES[name]
    result = sensitivities(case, posterior(name, structure), estimator="linear")
    expected = deviations(case.dense, precision(name, structure), "linear")
    assert_agrees(case, result, expected)
    assert_close(result.leverage, expected.leverage)


@pytest.mark.parametrize("estimator", NOT_LINEAR)
@pytest.mark.parametrize(("name", "structure"), ASKED)
def test_every_rule_on_some_nets(name, structure, estimator):
    case = CASES[name]
    result = sensitivities(case, posterior(name, structure), estimator=estimator)
    expected = deviations(case.dense, precision(name, structure), estimator)
    assert_agrees(case, result, expected)
    assert_close(result.leverage, expected.leverage)
    assert torch.equal(result.flagged, expected.flagged)


@pytest.mark.parametrize("name", [name for name in CASES if name != "weight_norm"])
def test_newton_on_every_net(name):
    """With the exact Hessian, made positive definite; that of weight norm torch does not have."""
    case, prior = CASES[name], hessian_prior(name)
    result = sensitivities(case, posterior(name, "full", "hessian", prior), estimator="newton")
    expected = newton(case.dense, precision(name, "full", "hessian", prior))
    assert_agrees(case, result, expected, 1e-7)
    assert_close(result.leverage, expected.leverage)
    assert torch.equal(result.flagged, expected.flagged)


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if "kronecker" in case.structures])
def test_downdated_on_every_net(name):
    case = CASES[name]
    result = sensitivities(case, posterior(name, "kronecker"), estimator="downdated")
    expected = downdated(case.dense, case.prior_precision)
    assert_agrees(case, result, expected)
    assert_close(result.leverage, expected.leverage)


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "ekfac", "full"])
@pytest.mark.parametrize("name", ["mlp", "mlp_poisson", "conv1d"])
def test_empirical_curvature(name, structure):
    case = CASES[name]
    result = sensitivities(case, posterior(name, structure, "empirical"), estimator="linear")
    expected = deviations(case.dense, precision(name, structure, "empirical"), "linear")
    assert_agrees(case, result, expected)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("structure", ["full", "last_layer"])
def test_exact_hessian(structure, estimator):
    fitted = posterior("mlp", structure, "hessian", 20.0)
    expected = precision("mlp", structure, "hessian", 20.0)
    assert_agrees(
        MLP,
        sensitivities(MLP, fitted, estimator=estimator),
        deviations(MLP.dense, expected, estimator),
    )


@pytest.mark.parametrize("rounds", [0, 1, 10])
def test_rounds_of_iterated(rounds):
    result = sensitivities(MLP, posterior("mlp", "kronecker"), estimator="iterated", rounds=rounds)
    expected = deviations(MLP.dense, precision("mlp", "kronecker"), "iterated", rounds)
    assert_agrees(MLP, result, expected)


def test_no_rounds_of_iterated_is_linear():
    fitted = posterior("mlp", "diagonal")
    linear = sensitivities(MLP, fitted, estimator="linear")
    iterated = sensitivities(MLP, fitted, estimator="iterated", rounds=0)
    assert_close(iterated.deviation, linear.deviation, 1e-13)


def test_guarded_examples_are_flagged_and_stay_finite():
    """A prior so weak that the isotropic posterior contradicts every example."""
    fitted = posterior("mlp_gaussian", "isotropic", prior_precision=1e-3)
    case = CASES["mlp_gaussian"]
    result = sensitivities(case, fitted, estimator="corrected")
    assert result.flagged.all()
    assert torch.isfinite(result.deviation).all()
    assert torch.isfinite(result.loo_loss).all()
    linear = sensitivities(case, fitted, estimator="linear")
    assert (result.deviation.norm(dim=1) <= 100.001 * linear.deviation.norm(dim=1)).all()


def test_summaries_are_means():
    result = sensitivities(MLP, posterior("mlp", "kronecker"))
    assert float(result.loo_nll) == pytest.approx(float(result.loo_loss.mean()))
    assert float(result.train_nll) == pytest.approx(float(result.loss.mean()))
    assert (result.num_data, result.num_outputs) == (7, 3)


def test_top_orders_by_score():
    result = sensitivities(MLP, posterior("mlp", "kronecker"))
    frame = result.to_frame()
    assert len(frame) == 7
    assert list(result.top(3).index) == result.score.argsort(descending=True)[:3].tolist()
    by_loss = result.top(7, by="loo_loss").index
    assert list(by_loss) == result.loo_loss.argsort(descending=True).tolist()


def test_a_saved_result_comes_back(tmp_path):
    result = sensitivities(MLP, posterior("mlp", "kronecker"), estimator="corrected")
    result.save(tmp_path / "run")
    loaded = engram.load(tmp_path / "run")
    for field in (*FIELDS, "outputs", "leverage", "flagged", "indices"):
        assert torch.equal(getattr(loaded, field), getattr(result, field))


def test_iterated_that_diverges_is_flagged():
    """An exponential mean and a weak prior: the rounds run away, and the result says so."""
    case = CASES["mlp_poisson"]
    fitted = posterior("mlp_poisson", "diagonal", prior_precision=1e-2)
    result = sensitivities(case, fitted, estimator="iterated", rounds=6)
    runaway = ~torch.isfinite(result.loo_loss) | (result.deviation.abs().amax(1) > 1e6)
    assert result.flagged.any(), "expected a case in which some rounds grow apart"
    assert not (runaway & ~result.flagged).any(), "expected each runaway example flagged"


def test_variances_that_are_not_finite_are_said_to_be():
    with pytest.raises(NonFiniteError, match="finite prediction variances"):
        eigen(torch.full((1, 3, 3), float("nan")))
