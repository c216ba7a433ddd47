"""Generalised linear models: derivatives, fits and influence against statsmodels, SAS and R."""

import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import statsmodels.stats as sm_stats
import torch
from statsmodels.stats.outliers_influence import MLEInfluence

from engram import likelihoods
from engram.models import fit_glm, glm_measures, sensitivities_of

REFERENCE = Path(sm_stats.__file__).parent / "tests" / "results"
RANDOM = np.random.default_rng(1)
NUM_DATA = 200
X = RANDOM.normal(size=(NUM_DATA, 3)) * 0.4
ETA = X @ [0.5, -0.7, 0.3] + 1.0
RATE = np.exp(ETA)
BINARY = RANDOM.binomial(1, 1 / (1 + np.exp(-(ETA - 1)))).astype(float)
COUNTS = RANDOM.poisson(RATE).astype(float)
POSITIVE = RANDOM.gamma(4.0, RATE / 4.0)
WEIGHTS = RANDOM.uniform(0.5, 2.0, NUM_DATA)
OFFSET = RANDOM.uniform(-0.2, 0.2, NUM_DATA)
families, links = sm.families, sm.families.links

# response, targets, statsmodels' family
CASES = {
    "logit": (likelihoods.Bernoulli(), BINARY, families.Binomial()),
    "probit": (likelihoods.Bernoulli("probit"), BINARY, families.Binomial(links.Probit())),
    "cloglog": (likelihoods.Bernoulli("cloglog"), BINARY, families.Binomial(links.CLogLog())),
    "loglog": (likelihoods.Bernoulli("loglog"), BINARY, families.Binomial(links.LogLog())),
    "cauchit": (likelihoods.Bernoulli("cauchit"), BINARY, families.Binomial(links.Cauchy())),
    "poisson": (likelihoods.Poisson(), COUNTS, families.Poisson()),
    "poisson sqrt": (likelihoods.Poisson("sqrt"), COUNTS, families.Poisson(links.Sqrt())),
    "poisson identity": (
        likelihoods.Poisson("identity"),
        COUNTS,
        families.Poisson(links.Identity()),
    ),
    "gamma log": (likelihoods.Gamma(), POSITIVE, families.Gamma(links.Log())),
    "gamma inverse": (
        likelihoods.Gamma("inverse"),
        POSITIVE,
        families.Gamma(links.InversePower()),
    ),
    "gaussian log": (likelihoods.Gaussian(link="log"), POSITIVE, families.Gaussian(links.Log())),
    "inverse gaussian": (
        likelihoods.InverseGaussian(),
        POSITIVE,
        families.InverseGaussian(links.Log()),
    ),
    "negative binomial": (
        likelihoods.NegativeBinomial(0.7),
        COUNTS,
        families.NegativeBinomial(alpha=0.7),
    ),
    "tweedie": (
        likelihoods.Tweedie(1.5),
        COUNTS,
        families.Tweedie(links.Log(), var_power=1.5),
    ),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def assert_close(left, right, tolerance=1e-8):
    np.testing.assert_allclose(np.asarray(left), np.asarray(right), rtol=tolerance, atol=tolerance)


def theirs(case, **more):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on links that can leave the support
        model = sm.GLM(case[1], sm.add_constant(X), family=case[2], **more)
        rough = model.fit(tol=1e-12, maxiter=200)
        return model.fit(start_params=rough.params, method="newton", tol=1e-14, maxiter=50)


@every_case
def test_derivatives_are_those_of_the_loss(case):
    response, targets = case[0], torch.tensor(case[1])
    eta = torch.tensor(np.abs(ETA) + 0.2, requires_grad=True)
    loss = response.kernel(eta, targets)
    first = torch.autograd.grad(loss.sum(), eta, create_graph=True)[0]
    second = torch.autograd.grad(first.sum(), eta)[0]
    assert_close(response.residual(eta, targets).detach(), first.detach())
    assert_close(response.unit_curvature(eta, targets).detach(), second)
    slope = response.link.slope(eta)
    expected = slope.square() / response.variance(response.link.mean(eta))
    assert_close(response.expected_curvature(eta).detach(), expected.detach())


@every_case
def test_fit(case):
    peer = theirs(case)
    fit = fit_glm(X, case[1], case[0], hessian="observed")
    assert_close(fit.coefficients[0], peer.params, 1e-6)
    assert sensitivities_of(fit).diagnostics.relative_gradient < 1e-9
    if case[0].has_dispersion:
        assert_close(fit.dispersion, peer.scale, 1e-6)
    if case[0].name in ("bernoulli", "poisson", "negative_binomial", "gamma"):
        total = float(fit.likelihood.loss(fit.outputs, fit.targets).sum())
        assert_close(
            total, -case[2].loglike(case[1], peer.fittedvalues, scale=fit.dispersion), 1e-7
        )


@every_case
def test_influence_with_the_expected_hessian(case):
    influence = theirs(case).get_influence(observed=False)
    ours = glm_measures(fit_glm(X, case[1], case[0], hessian="expected"))
    assert_close(ours.leverage, influence.hat_matrix_diag, 1e-6)
    assert_close(ours.studentised, influence.resid_studentized, 1e-6)
    assert_close(ours.cooks_distance, influence.cooks_distance[0], 1e-6)
    # statsmodels takes Pearson residuals, whose sign is wrong for a link that falls
    sign = -1 if case[0].link.name == "inverse" else 1
    assert_close(sign * ours.dfbeta, influence.d_params, 1e-6)
    assert_close(sign * ours.predictor_change, influence.d_linpred, 1e-6)


@every_case
def test_influence_with_the_observed_hessian(case):
    """One Newton step, built from statsmodels' own scores and Hessian."""
    peer = theirs(case)
    model = peer.model
    scores = model.score_obs(peer.params)  # these and the Hessian have 1 / scale in them
    hessian = -model.hessian(peer.params, observed=True)
    factor = model.hessian_factor(peer.params, observed=True)
    leverage = factor * np.einsum("np,pq,nq->n", model.exog, np.linalg.inv(hessian), model.exog)
    ours = glm_measures(fit_glm(X, case[1], case[0]))
    assert_close(ours.leverage, leverage, 1e-5)
    steps = np.linalg.solve(hessian, scores.T).T / (1 - leverage)[:, None]
    assert_close(ours.dfbeta, steps, 1e-5)


def test_probit_against_the_likelihood_influence_of_statsmodels():
    peer = sm.Probit(BINARY, sm.add_constant(X)).fit(disp=0, tol=1e-14)
    ours = glm_measures(fit_glm(X, BINARY, "bernoulli", link="probit"))
    influence = MLEInfluence(peer)
    raw = influence.d_params * (1 - influence.hat_matrix_diag)[:, None]
    assert_close(ours.dfbeta * (1 - ours.leverage)[:, None], raw, 1e-7)


@pytest.mark.parametrize("name", ["logit", "poisson", "gamma log"])
def test_offset_and_weights(name):
    case = CASES[name]
    peer = theirs(case, offset=OFFSET, var_weights=WEIGHTS)
    fit = fit_glm(X, case[1], case[0], offset=OFFSET, weights=WEIGHTS)
    assert_close(fit.coefficients[0], peer.params, 1e-6)
    ours, influence = glm_measures(fit), peer.get_influence(observed=True)
    assert_close(ours.leverage, influence.hat_matrix_diag, 1e-6)


def test_dfbetas_use_the_fits_standard_errors():
    fit = fit_glm(X, COUNTS, "poisson")
    influence = theirs(CASES["poisson"]).get_influence()
    assert_close(glm_measures(fit).dfbetas, influence.dfbetas, 1e-7)


def test_sas_values_for_finneys_data():
    """Pregibon's example: vasoconstriction of the skin; SAS prints four digits."""
    data = pd.read_csv(REFERENCE / "binary_constrict.csv", index_col=0)
    sas = pd.read_csv(REFERENCE / "results_influence_logit.csv", index_col=0)
    fit = fit_glm(data[["const", "log_rate", "log_volumne"]], data["constrict"], intercept=False)
    ours = glm_measures(fit)
    columns = {
        "resid_pearson": ours.residual_pearson,
        "resid_deviance": ours.residual_deviance,
        "hat_matrix_diagonal": ours.leverage,
        "Cooks C": ours.confidence_interval_displacement,
        "Cooks Cbar": ours.displacement_bar,
        "d_deviance": ours.deviance_change,
        "d_pearson_chi2": ours.chi_square_change,
    }
    for name, values in columns.items():
        np.testing.assert_allclose(values, sas[name], atol=6e-5, err_msg=name)
    np.testing.assert_allclose(ours.dfbetas, sas.iloc[:, 5:8], atol=1e-4)


def test_r_values_for_grouped_trials():
    """R's influence.measures of a binomial fit on five doses of 40 animals."""
    share = np.array([0, 2, 14, 19, 30]) / 40
    fit = fit_glm(np.arange(1.0, 6)[:, None], share, weights=np.full(5, 40.0))
    ours = glm_measures(fit)
    hat = [0.2594393406119333, 0.3696442663244837, 0.3535768402250521, 0.389209198535791057,
           0.6281303543027403]  # fmt: skip
    cooks = [0.25220202795934726, 0.26107981497746285, 1.28985614424132389, 0.08449722285516942,
             0.36362110845918005]  # fmt: skip
    assert_close(ours.leverage, hat, 5e-6)
    assert_close(ours.cooks_distance, cooks, 1e-5)


def test_r_values_for_least_squares():
    """R's lm.influence on macroeconomic data, through the gaussian response."""
    from engram.models import fit_linear, linear_measures

    data = sm.datasets.macrodata.load_pandas().data
    growth = 400 * np.diff(np.log(data[["realgdp", "realinv"]]), axis=0)
    inputs = np.column_stack([growth[:, 0], data["realint"].to_numpy()[:-1]])
    ours = linear_measures(fit_linear(inputs, growth[:, 1]))
    table = pd.read_csv(REFERENCE / "influence_measures_R.csv", index_col=0)
    found = torch.cat(
        [
            ours.dfbetas,
            torch.stack(
                [ours.dffits, ours.covariance_ratio, ours.cooks_distance, ours.leverage], 1
            ),
        ],
        1,
    )
    assert_close(found, table.to_numpy(), 1e-8)


@pytest.mark.parametrize("link", ["inverse", "inverse_squared"])
def test_signs_of_falling_links_are_those_of_refitting(link):
    """Where statsmodels has the other sign."""
    fit = fit_glm(X, POSITIVE, "gamma", link=link, hessian="expected")
    steps = glm_measures(fit).dfbeta
    for i in glm_measures(fit).cooks_distance.argsort(descending=True)[:5].tolist():
        truth = (fit.coefficients - fit.without([i]).coefficients)[0]
        assert torch.nn.functional.cosine_similarity(steps[i], truth, dim=0) > 0.9
