"""Results of statsmodels against what statsmodels says of them."""

import numpy as np
import pytest
import statsmodels.api as sm
from scipy import stats
from sklearn import linear_model

import engram
from engram import models
from engram.errors import DesignError
from tabular_data import CANCER, COUNTS, HITS, IRIS, TRIALS, WEIGHTS, X

RESULTS = {
    "OLS": lambda: sm.OLS(COUNTS, X).fit(),
    "WLS": lambda: sm.WLS(COUNTS, X, weights=WEIGHTS[: len(X)]).fit(),
    "GLM": lambda: sm.GLM(COUNTS + 1, X, family=sm.families.Gamma(sm.families.links.Log())).fit(),
    "GLM with exposure": lambda: sm.GLM(
        COUNTS, X, family=sm.families.Poisson(), exposure=TRIALS, offset=X[:, 1]
    ).fit(),
    "GLM of trials": lambda: sm.GLM(
        np.column_stack([HITS, TRIALS - HITS]), X, family=sm.families.Binomial()
    ).fit(),
    "GLM with weights": lambda: sm.GLM(
        COUNTS, X, family=sm.families.NegativeBinomial(alpha=0.5), freq_weights=TRIALS
    ).fit(),
    "Logit": lambda: sm.Logit(CANCER[1], X).fit(disp=0),
    "Probit": lambda: sm.Probit(CANCER[1], X).fit(disp=0),
    "Poisson": lambda: sm.Poisson(COUNTS, X, exposure=TRIALS, offset=X[:, 1]).fit(disp=0),
    "MNLogit": lambda: sm.MNLogit(IRIS[1], sm.add_constant(IRIS[0][:, 1:2])).fit(disp=0),
}


@pytest.mark.parametrize("name", RESULTS)
def test_statsmodels(name):
    results = RESULTS[name]()
    fit = models.read(results)
    result = engram.from_estimator(results)
    assert result.diagnostics.relative_gradient < 1e-5
    np.testing.assert_allclose(
        result.diagnostics.effective_parameters, np.size(results.params), rtol=1e-6
    )
    if name != "MNLogit":
        errors = results.bse
        if name.startswith("GLM"):  # whose own are by the expected Hessian
            hessian = results.model.hessian(results.params, scale=results.scale, observed=True)
            errors = np.sqrt(np.diag(np.linalg.inv(-hessian)))
        np.testing.assert_allclose(fit.standard_errors[0], errors, rtol=1e-5)
        assert fit.names == tuple(results.model.exog_names)
    if name in ("Logit", "Probit", "Poisson", "MNLogit"):
        np.testing.assert_allclose(-result.loss.sum(), results.llf, rtol=1e-8)


@pytest.mark.parametrize(
    "family",
    [
        sm.families.Gaussian(),
        sm.families.Gamma(sm.families.links.Log()),
        sm.families.InverseGaussian(sm.families.links.Log()),
        sm.families.Poisson(),
    ],
    ids=lambda family: type(family).__name__,
)
def test_losses_are_densities_of_weighted_examples(family):
    """Variance weights divide the dispersion, frequency weights count examples."""
    spread = WEIGHTS[: len(X)]
    model = sm.GLM(COUNTS + 1, X, family=family, var_weights=spread, freq_weights=TRIALS)
    results = model.fit()
    loss = engram.from_estimator(results).loss.numpy()
    weights = TRIALS * (spread if isinstance(family, sm.families.Poisson) else 1.0)
    total = model.loglike(results.params, scale=results.scale)
    np.testing.assert_allclose(-(weights * loss).sum(), total, rtol=1e-8)


def test_losses_of_weighted_least_squares():
    results = RESULTS["WLS"]()
    deviation = np.sqrt(results.scale / WEIGHTS[: len(X)])
    expected = -stats.norm(results.fittedvalues, deviation).logpdf(COUNTS)
    np.testing.assert_allclose(engram.from_estimator(results).loss, expected, rtol=1e-8)


@pytest.mark.parametrize("family", [sm.families.Poisson(), sm.families.Binomial()])
def test_quasi_likelihood(family):
    targets = COUNTS if isinstance(family, sm.families.Poisson) else HITS / TRIALS
    results = sm.GLM(targets, X, family=family).fit(scale="X2")
    fit, peer = models.read(results), results.get_influence()
    measures = models.glm_measures(fit)
    np.testing.assert_allclose(fit.standard_errors[0], results.bse, rtol=1e-6)
    np.testing.assert_allclose(measures.cooks_distance, peer.cooks_distance[0], rtol=1e-5)
    np.testing.assert_allclose(measures.dfbetas, peer.dfbetas, rtol=1e-5, atol=1e-10)
    np.testing.assert_allclose(measures.studentised, peer.resid_studentized, rtol=1e-5)


@pytest.mark.filterwarnings("ignore")  # of statsmodels, which stops without an error
def test_separation_elsewhere():
    apart = (CANCER[0][:, 0] > 0).astype(float)
    constant = sm.add_constant(CANCER[0][:, :2])
    binomial = sm.families.Binomial()
    stopped = [
        sm.GLM(apart, constant, family=binomial).fit(maxiter=8),
        sm.GLM(apart, constant, family=binomial).fit(maxiter=25),
        sm.Logit(apart, constant).fit(disp=0, maxiter=12),
    ]
    for results in stopped:
        with pytest.raises(DesignError, match="complete separation"):
            engram.from_estimator(results)
    free = linear_model.LogisticRegression(C=np.inf).fit(CANCER[0][:, :2], apart)
    with pytest.raises(DesignError, match="complete separation"):
        engram.from_estimator(free, CANCER[0][:, :2], apart)
    held = linear_model.LogisticRegression().fit(CANCER[0][:, :2], apart)
    assert engram.from_estimator(held, CANCER[0][:, :2], apart).num_data == 120


def test_statsmodels_leverage():
    results = RESULTS["GLM of trials"]()
    theirs = results.get_influence().hat_matrix_diag
    np.testing.assert_allclose(engram.from_estimator(results).leverage, theirs, rtol=1e-6)
