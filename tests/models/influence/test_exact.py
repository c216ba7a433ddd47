"""Leave-one-out losses against refits: right, or said to be wrong, or infinite where they are."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression

import engram
from engram.errors import SeparationError
from engram.models import fit_glm, fit_multinomial, read, remove_group, sensitivities_of
from engram.models.influence import refits

INPUTS, LABELS = load_breast_cancer(return_X_y=True)
INPUTS = (INPUTS - INPUTS.mean(0)) / INPUTS.std(0)
RANDOM = np.random.default_rng(3)


def refitted(fit, i):
    """The loss of an example under the fit without it, by an optimiser that knows no engram."""
    design, targets = fit.objective.design, fit.targets.numpy()
    matrix, penalty = design.matrix.numpy(), design.penalty.numpy()
    kept = np.arange(len(targets)) != i
    loss = fit.likelihood.loss

    def objective(theta):
        outputs = torch.tensor(matrix @ theta, requires_grad=True)
        value = loss(outputs[kept, None], fit.targets[kept]).sum()
        (slope,) = torch.autograd.grad(value, outputs)
        total = value.item() + 0.5 * (penalty * theta**2).sum()
        return total, matrix.T @ slope.numpy() + penalty * theta

    found = minimize(
        objective, fit.coefficients[0].numpy(), jac=True, options={"gtol": 1e-9, "maxiter": 3000}
    )
    output = torch.tensor([[matrix[i] @ found.x]])
    return float(loss(output, fit.targets[i : i + 1]))


@pytest.mark.parametrize(
    ("link", "penalty", "mean", "level"),
    [("cloglog", 1.0, 0.3931, "unreliable"), ("logit", 0.01, 0.2123, "caution")],
)
def test_near_separation(link, penalty, mean, level):
    """One Newton step gives 0.2507 and 0.1724, increases of 0.58 and 0.78 of the truth."""
    fit = fit_glm(INPUTS, LABELS, link=link, penalty=penalty)
    exact, step = (sensitivities_of(fit, estimator=rule) for rule in ("exact", "corrected"))
    assert exact.loo_nll == pytest.approx(mean, abs=2e-4)
    assert exact.verdict.level == "good"
    assert not exact.flagged.any()
    assert 10 < int((exact.obtained == 2).sum()) < 200
    assert set(exact.to_frame()["obtained"]) == {"estimate", "retrain"}
    assert step.verdict.level == level
    assert step.diagnostics.step_error > 0.1
    for i in [int((exact.loo_loss - step.loo_loss).abs().argmax()), 5]:
        assert float(exact.loo_loss[i]) == pytest.approx(refitted(fit, i), rel=1e-3, abs=1e-5)


def test_one_answer_whichever_way_it_is_asked():
    fit = fit_glm(INPUTS, LABELS, link="cloglog", penalty=1.0)
    result = sensitivities_of(fit)
    for i in result.obtained.nonzero()[:3, 0].tolist():
        alone = float(remove_group(fit, [i]).group.loss_without[0])
        assert alone == pytest.approx(float(result.loo_loss[i]), rel=1e-6)


def test_several_outputs_near_separation():
    fit = fit_multinomial(INPUTS, LABELS, penalty=0.02)
    single = fit_glm(INPUTS, LABELS, penalty=0.01)
    left, right = sensitivities_of(fit), sensitivities_of(single)
    np.testing.assert_allclose(left.loo_loss, right.loo_loss, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e4])
def test_a_weak_penalty_is_no_sign_of_an_early_stop(scale):
    """The gradient of a penalty of 1e-9 is so small that any other is large beside it."""
    inputs = scale * RANDOM.normal(size=(200, 3))
    labels = RANDOM.random(200) < 1 / (1 + np.exp(-inputs[:, 0] / scale))
    model = LogisticRegression(C=1e9 / scale**2, tol=1e-10, max_iter=1000, solver="newton-cholesky")
    model.fit(inputs, labels)
    result = engram.from_estimator(model, inputs, labels)
    assert result.diagnostics.relative_gradient < 1e-5
    assert result.verdict.level == "good"
    early = LogisticRegression(C=1.0, max_iter=1).fit(INPUTS, LABELS)
    assert engram.from_estimator(early, INPUTS, LABELS).verdict.level == "unreliable"


def overlapping():
    """Classes that one example alone keeps from being separated."""
    inputs = np.r_[np.linspace(-2, -0.5, 10), np.linspace(0.5, 2, 10), 1.3]
    return inputs[:, None], np.r_[np.zeros(10), np.ones(10), 0.0]


def test_refits_that_are_separated_have_an_infinite_loss():
    inputs, labels = overlapping()
    for fit in (fit_glm(inputs, labels), fit_glm(inputs, labels, link="probit")):
        result = sensitivities_of(fit)
        assert result.loo_loss[20] == torch.inf
        assert result.deviation[20] == torch.inf
        assert result.flagged[20]
        assert result.prediction_deviation[20, 0] == pytest.approx(1 - float(fit.means[20]))
        assert torch.isfinite(result.loo_loss[:20]).all()
        assert result.loo_nll == torch.inf
        assert sensitivities_of(fit, estimator="corrected").verdict.level == "unreliable"
        with pytest.raises(SeparationError, match="complete separation"):
            fit.without([20])
        with pytest.raises(SeparationError, match="complete separation"):
            remove_group(fit, [20])


def test_separated_counts_and_classes():
    group = np.r_[np.zeros(10), np.ones(10)][:, None]
    counts = np.r_[RANDOM.poisson(3.0, 10), np.zeros(9), 4.0]
    result = sensitivities_of(fit_glm(group, counts, "poisson"))
    assert result.loo_loss[19] == torch.inf
    assert result.deviation[19] == -torch.inf
    assert torch.isfinite(result.loo_loss[:19]).all()
    inputs, labels = overlapping()
    result = sensitivities_of(fit_multinomial(inputs, labels.astype(int)))
    assert result.loo_loss[20] == torch.inf
    assert torch.isfinite(result.loo_loss[:20]).all()


def test_one_class_that_is_left_out():
    inputs = RANDOM.normal(size=(8, 1))
    result = sensitivities_of(fit_glm(inputs * 0, np.r_[1.0, np.zeros(7)], penalty=1.0))
    assert result.loo_loss[0] == torch.inf
    assert torch.isfinite(result.loo_loss[1:]).all()


def test_rounds_that_grow_apart_stay_at_the_best():
    fit = fit_glm(INPUTS, LABELS, penalty=0.01)
    corrected = sensitivities_of(fit, estimator="corrected")
    for rounds in (3, 10, 30):
        result = sensitivities_of(fit, estimator="iterated", rounds=rounds)
        assert result.verdict.level != "good"
        held = result.flagged
        assert torch.equal(result.loo_loss[held], corrected.loo_loss[held])


def test_what_was_read_from_elsewhere_is_refitted_too():
    model = LogisticRegression(C=100.0, tol=1e-8, max_iter=5000).fit(INPUTS, LABELS)
    assert engram.from_estimator(model, INPUTS, LABELS).loo_nll == pytest.approx(0.21226, abs=2e-4)
    assert read(model, INPUTS, LABELS).objective.design.penalty[1] == pytest.approx(0.01)


def test_a_loss_without_curvature_of_its_own():
    # Bernoulli with the log link: an example of target 1 has the loss -f and the leverage 0
    inputs = np.repeat([[0.0], [1.0]], [9, 12], 0)
    targets = np.r_[np.arange(9) < 4, np.arange(12) < 7].astype(float)
    result = sensitivities_of(fit_glm(inputs, targets, "bernoulli", link="log"))
    assert (result.leverage[targets == 1].abs() < 1e-12).all()
    own = inputs == inputs.T  # the mean of the own group without the example
    means = (own @ targets - targets) / (own.sum(1) - 1)
    truth = -np.where(targets == 1, np.log(means), np.log1p(-means))
    np.testing.assert_allclose(result.loo_loss, truth, rtol=1e-6)


def test_a_refit_that_does_not_arrive_is_none():
    # without some examples the likeliest means of others are 1, at the end of the support
    random = np.random.default_rng(53)
    inputs = random.normal(size=(30, 2))
    mean = 1 / (1 + np.exp(-0.3 * (0.5 * inputs[:, 0] - 0.3 * inputs[:, 1] + 0.4)))
    targets = random.binomial(5, mean) / 5
    fit = fit_glm(0.2 * inputs, targets, "bernoulli", link="log", weights=np.full(30, 5.0))
    result = sensitivities_of(fit, progress=False)
    lost = [i for i in range(30) if not fit.moved_without([i]).converged]
    assert len(lost) > 3
    assert (result.obtained[lost] == 0).all()
    assert result.flagged[lost].all()
    assert result.verdict.level != "good"


@pytest.mark.parametrize("penalty", [0.01, 1000.0])
def test_many_examples_are_looked_at_only_where_the_first_go_on(penalty, monkeypatch):
    fit = fit_glm(INPUTS, LABELS.astype(float), penalty=penalty)
    expected, inner, seen = sensitivities_of(fit, progress=False), refits._look, []
    monkeypatch.setattr(refits, "CHEAP", 0.0)
    monkeypatch.setattr(refits, "_look", lambda *a: seen.append(len(a[2])) or inner(*a))
    found = sensitivities_of(fit, progress=False)
    assert (sum(seen) == refits.AT_FIRST) == (penalty == 1000.0)
    torch.testing.assert_close(found.loo_loss, expected.loo_loss, rtol=1e-9, atol=1e-12)
