"""Losses are log densities, or are not called so."""

import itertools
import json

import mpmath
import numpy as np
import pytest
import statsmodels.api as sm
import torch
from scipy import integrate, stats

import engram
from engram.likelihoods import Tweedie
from engram.likelihoods.tweedie import power_likelihood
from engram.models import fit_glm, sensitivities_of

RANDOM = np.random.default_rng(4)
X = RANDOM.normal(size=(80, 2))
MEANS = np.exp(0.4 * X[:, 0] + 0.3)
TARGETS = np.array([RANDOM.gamma(2.0, m, RANDOM.poisson(0.9)).sum() for m in MEANS])


def density(power, mean, dispersion):
    likelihood = Tweedie(power, dispersion=dispersion)
    eta = torch.tensor([[np.log(mean)]], dtype=torch.float64)
    return lambda y: float(
        (-likelihood.loss(eta, torch.tensor([[float(y)]], dtype=torch.float64))).exp()
    )


@pytest.mark.parametrize("power", [1.1, 1.5, 1.9])
@pytest.mark.parametrize("dispersion", [0.5, 2.0])
def test_a_density_has_a_whole_of_one(power, dispersion):
    p = density(power, 1.4, dispersion)
    ends = [-150.0, -20.0, -5.0, 0.0, 3.0, 6.5]  # of log y: the density has a pole at 0
    parts = [
        integrate.quad(lambda t: p(np.exp(t)) * np.exp(t), *pair, limit=200)[0]
        for pair in itertools.pairwise(ends)
    ]
    rest = sum(parts)
    assert p(0.0) + rest == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("power", [1.02, 1.3, 1.7, 1.98])
@pytest.mark.parametrize("y", [1e-3, 0.7, 25.0, 2e3])
def test_the_series(power, y):
    p, phi, number = mpmath.mpf(power), mpmath.mpf(0.3), mpmath.mpf(y)
    a = (2 - p) / (p - 1)
    z = number**a / ((p - 1) ** a * phi ** (1 + a) * (2 - p))
    centre = int(number ** (2 - p) / ((2 - p) * phi))
    reach = 40 + int(14 * centre**0.5)
    terms = [
        mpmath.exp(j * mpmath.log(z) - mpmath.loggamma(j + 1) - mpmath.loggamma(a * j))
        for j in range(max(1, centre - reach), centre + reach)
    ]
    expected = mpmath.log(mpmath.fsum(terms)) - mpmath.log(y)
    found = -Tweedie(power).constant(
        torch.tensor([[y]], dtype=torch.float64), torch.tensor([[0.3]], dtype=torch.float64)
    )
    assert float(found) == pytest.approx(float(expected), rel=1e-9, abs=1e-8)


def test_saddle_point_joins_the_series(monkeypatch):
    from engram.likelihoods import tweedie as tweedie_density

    y = torch.tensor([2e6], dtype=torch.float64)
    one = torch.tensor([1e-2], dtype=torch.float64)
    series = tweedie_density.log_normaliser(y, one, 1.5)
    monkeypatch.setattr(tweedie_density, "FARTHEST", 1.0)
    assert torch.allclose(tweedie_density.log_normaliser(y, one, 1.5), series, rtol=0, atol=1e-5)


def test_against_statsmodels():
    family = sm.families.Tweedie(sm.families.links.Log(), var_power=1.6, eql=False)
    peer = sm.GLM(TARGETS, sm.add_constant(X), family=family).fit(tol=1e-12)
    fit = fit_glm(X, TARGETS, Tweedie(1.6))
    result = sensitivities_of(fit)
    assert fit.dispersion == pytest.approx(peer.scale, rel=1e-6)
    theirs = family.loglike_obs(TARGETS, peer.fittedvalues, scale=peer.scale)
    np.testing.assert_allclose(result.loss, -theirs, rtol=1e-5, atol=1e-7)
    assert result.basis.loss_unit == "nats"
    assert (TARGETS == 0).any()


def test_powers_with_a_density_of_their_own():
    positive = TARGETS + 0.1
    for power, kind, theirs in (
        (2.0, "gamma", lambda mean, phi: stats.gamma(1 / phi, scale=mean * phi)),
        (3.0, "inverse_gaussian", lambda mean, phi: stats.invgauss(mean * phi, scale=1 / phi)),
    ):
        fit = fit_glm(X, positive, power_likelihood(power, "log"))
        assert torch.equal(fit.coefficients, fit_glm(X, positive, kind, link="log").coefficients)
        expected = -theirs(fit.means[:, 0].numpy(), fit.dispersion).logpdf(positive)
        np.testing.assert_allclose(sensitivities_of(fit).loss, expected, rtol=1e-9)


@pytest.mark.parametrize("power", [1.0, 2.5])
def test_what_is_no_density_is_not_called_nats(power, tmp_path):
    fit = fit_glm(X, TARGETS + 0.1, Tweedie(power))
    result = sensitivities_of(fit)
    assert result.basis.loss_unit == "half unit deviances over the dispersion"
    assert "nats" not in repr(result)
    stored = json.loads((result.save(tmp_path / "run") / "result.json").read_text())
    assert "half unit deviances" in json.dumps(stored)
    assert "nats" not in json.dumps(stored.get("content", stored).get("units", ""))
    assert "half unit deviances" in result.report(tmp_path / "page.html").read_text()


def test_a_quasi_likelihood_is_called_so():
    results = sm.GLM(TARGETS.round(), sm.add_constant(X), family=sm.families.Poisson())
    assert "quasi" in engram.from_estimator(results.fit(scale="X2")).basis.loss_unit
    assert engram.from_estimator(results.fit()).basis.loss_unit == "nats"
