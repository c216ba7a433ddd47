"""Penalised models on real data: the leave-one-out loss is within 1 % of fitting again."""

import numpy as np
import pytest
import statsmodels.api as sm
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from sklearn.linear_model import LogisticRegression

from engram.models import fit_glm, fit_linear, fit_multinomial, sensitivities_of


def scaled(inputs):
    spread = inputs.std(0)
    return (inputs - inputs.mean(0))[:, spread > 0] / spread[spread > 0]


def breast_cancer(**more):
    inputs, targets = load_breast_cancer(return_X_y=True)
    return fit_glm(scaled(inputs), targets, "bernoulli", **{"penalty": 1.0, **more})


def diabetes(response, **more):
    inputs, targets = load_diabetes(return_X_y=True)
    return fit_glm(scaled(inputs), targets, response, penalty=10.0, **more)


def digits():
    inputs, targets = load_digits(return_X_y=True)
    inputs, targets = scaled(inputs[:400]), targets[:400]
    return fit_multinomial(inputs, targets, penalty=10.0)


def doctor_visits(response, **more):
    data = sm.datasets.randhie.load_pandas()
    inputs, targets = data.exog.to_numpy()[::30], data.endog.to_numpy()[::30]
    return fit_glm(scaled(inputs), targets, response, penalty=2.0, **more)


FITS = {
    "breast cancer, logit": breast_cancer,
    "breast cancer, probit": lambda: breast_cancer(link="probit"),
    "breast cancer, cloglog": lambda: breast_cancer(link="cloglog"),
    "breast cancer, penalised intercept": lambda: breast_cancer(penalise_intercept=True),
    "diabetes, gamma": lambda: diabetes("gamma"),
    "diabetes, poisson": lambda: diabetes("poisson"),
    "diabetes, gaussian": lambda: diabetes("gaussian"),
    "doctor visits, poisson": lambda: doctor_visits("poisson"),
    "doctor visits, negative binomial": lambda: doctor_visits("negative_binomial"),
    "digits, multinomial": digits,
}
EVERY = {"breast cancer, logit": 1, "digits, multinomial": 40}  # refit each, or every 40th


def refitted_losses(fit, indices):
    losses = []
    for i in indices:
        again = fit.without([i])
        assert again.converged
        output = fit.objective.design.rows(torch.tensor([i])).outputs(again.coefficients)
        losses.append(float(fit.likelihood.loss(output, fit.targets[i : i + 1])))
    return np.array(losses)


@pytest.mark.parametrize("name", FITS)
def test_loss_without_each_example(name):
    """One Newton step; near separation, with refits where a second one goes on."""
    fit = FITS[name]()
    every = EVERY.get(name, 4)
    chosen = np.arange(0, len(fit.targets), every)
    truth = refitted_losses(fit, chosen)
    estimate = sensitivities_of(fit)
    found = estimate.loo_loss.numpy()[chosen]
    assert abs(found.mean() / truth.mean() - 1) < 1e-3
    np.testing.assert_allclose(found, truth, rtol=0.01, atol=0.01 * np.abs(truth).mean())
    assert not estimate.flagged.any()
    assert estimate.verdict.level == "good"


def test_rules_in_order():
    """The linear rule is too small, more rounds come near, one Newton step is nearest."""
    fit = doctor_visits("poisson")
    chosen = np.arange(0, len(fit.targets), 4)
    truth = refitted_losses(fit, chosen)
    error = {
        rule: np.abs(sensitivities_of(fit, estimator=rule).loo_loss.numpy()[chosen] - truth).sum()
        for rule in ("linear", "iterated", "corrected")
    }
    assert error["corrected"] < error["linear"]
    assert error["iterated"] < error["linear"]


def test_rounds_that_grow_apart_are_flagged_and_held():
    fit = breast_cancer(link="cloglog")
    iterated = sensitivities_of(fit, estimator="iterated", rounds=10)
    corrected = sensitivities_of(fit, estimator="corrected")
    assert iterated.flagged.any()
    held = iterated.flagged
    assert torch.equal(iterated.loo_loss[held], corrected.loo_loss[held])


def test_fits_equal_scikit_learn():
    fit = digits()
    inputs, targets = fit.objective.design.matrix[:, 1:].numpy(), fit.targets.argmax(1).numpy()
    peer = LogisticRegression(C=0.1, tol=1e-10, max_iter=10_000, solver="newton-cg")
    peer.fit(inputs, targets)
    np.testing.assert_allclose(fit.coefficients[:, 1:], peer.coef_, atol=1e-6)
    means = peer.predict_proba(inputs)
    np.testing.assert_allclose(fit.means, means, atol=1e-6)


def test_unpenalised_multinomial_equals_statsmodels():
    data = sm.datasets.anes96.load_pandas()
    inputs, targets = data.exog[["logpopul", "selfLR", "age"]], data.endog.to_numpy().astype(int)
    peer = sm.MNLogit(targets, sm.add_constant(inputs)).fit(disp=0, tol=1e-12)
    fit = fit_multinomial(inputs, targets)
    coefficients = fit.coefficients - fit.coefficients[:1]
    np.testing.assert_allclose(coefficients[1:].mT, peer.params, atol=1e-6)
    effective = sensitivities_of(fit).diagnostics.effective_parameters
    np.testing.assert_allclose(effective, peer.params.size, rtol=1e-6)


def test_multinomial_of_two_classes_is_logistic():
    inputs, targets = load_breast_cancer(return_X_y=True)
    inputs = scaled(inputs)[:, :5]
    two, one = fit_multinomial(inputs, targets, penalty=2.0), fit_glm(inputs, targets, penalty=1.0)
    for rule, tolerance in (("corrected", 1e-8), ("exact", 1e-3)):  # which refits, may differ
        left, right = (sensitivities_of(fit, estimator=rule) for fit in (two, one))
        limits = {"rtol": tolerance, "atol": 1e-6 * tolerance}
        np.testing.assert_allclose(left.loo_loss, right.loo_loss, **limits)
    np.testing.assert_allclose(left.leverage, right.leverage, rtol=1e-8)


def test_parameter_deviation_of_several_outputs():
    fit = digits()
    part = fit.without(range(100, 400))
    deviation = part.parameter_deviation()
    design, shares = part.objective.design, part.targets
    pull = torch.softmax(part.outputs, 1) - shares
    for i in (0, 3):
        probability = torch.softmax(part.outputs[i], 0)
        hessian = probability.diag() - torch.outer(probability, probability)
        row = design.matrix[i]
        precision = part.factor.precision - torch.kron(hessian, torch.outer(row, row))
        step = torch.linalg.solve(precision, torch.kron(pull[i], row))
        np.testing.assert_allclose(deviation[i].reshape(-1), step, atol=1e-9)


def test_ridge_result_equals_gaussian_glm():
    inputs, targets = load_diabetes(return_X_y=True)
    left = sensitivities_of(fit_linear(inputs, targets, penalty=0.1))
    right = sensitivities_of(fit_glm(inputs, targets, "gaussian", penalty=0.1))
    np.testing.assert_allclose(left.loo_loss, right.loo_loss, rtol=1e-9)
