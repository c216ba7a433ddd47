"""Posteriors, densities and moments against scipy, scikit-learn and numerical integration."""

import numpy as np
import pandas as pd
import pytest
from scipy import integrate, stats
from sklearn.decomposition import PCA

import family_cases as cases
from engram.families import (
    LinearRegression,
    NormalInverseGamma,
    NormalInverseWishart,
    NormalKnownVariance,
    ProbabilisticPCA,
)
from family_cases import CASES

KEPT = np.array([0, 2, 3, 5, 6, 7, 9, 11])
NUM = 12
RANDOM = np.random.default_rng(0)
WEIGHTS = RANDOM.uniform(0.2, 2.0, NUM)


@pytest.fixture(params=["removed", "weighted"])
def weights(request):
    """Weights that the posteriors are brought to by removing or reweighting."""
    if request.param == "weighted":
        return WEIGHTS
    return np.isin(np.arange(NUM), KEPT).astype(float)


def posterior(name, weights, seed=0):
    """A posterior over all data from which shares were taken, and the data as numpy arrays."""
    case = CASES[name]
    data = case.data(seed, NUM)
    changed = np.flatnonzero(weights != 1)
    return case.family.fit(data).remove(changed.tolist(), weights=1 - weights[changed]), data


def assert_close(value, expected, tolerance=1e-10):
    assert np.allclose(np.asarray(value), expected, rtol=tolerance, atol=tolerance)


def test_beta_bernoulli(weights):
    fitted, y = posterior("beta_bernoulli", weights)
    known = stats.beta(0.8 + weights @ y, 1.7 + weights @ (1 - y))
    assert_close(fitted.moments()["mean"], known.mean())
    assert_close(fitted.moments()["variance"], known.var())
    for label in (0, 1):
        density = integrate.quad(lambda t, y=label: known.pdf(t) * t**y * (1 - t) ** (1 - y), 0, 1)
        assert_close(fitted.log_predictive([label]).exp(), density[0], 1e-7)


def test_gamma_poisson(weights):
    fitted, (y, t) = posterior("gamma_poisson", weights)
    a, b = 0.6 + weights @ y, 1.3 + weights @ t
    assert_close([float(v) for v in fitted.standard().values()], [a, b])
    known = stats.gamma(a, scale=1 / b)
    assert_close(fitted.moments()["variance"], known.var())
    new = np.arange(6), np.linspace(0.5, 3, 6)
    assert_close(fitted.log_predictive(new), stats.nbinom.logpmf(new[0], a, b / (b + new[1])))


def test_gamma_exponential(weights):
    fitted, y = posterior("gamma_exponential", weights)
    a, b = 1.4 + weights.sum(), 0.7 + weights @ y
    known = stats.gamma(a, scale=1 / b)
    assert_close(fitted.moments()["mean"], known.mean())
    new = np.linspace(0.1, 9, 5)
    assert_close(fitted.log_predictive(new), stats.lomax.logpdf(new, a, scale=b))


def test_dirichlet_categorical(weights):
    fitted, y = posterior("dirichlet_categorical", weights)
    alpha = np.array([0.5, 1.0, 2.0, 0.2]) + np.array([weights[y == k].sum() for k in range(4)])
    known = stats.dirichlet(alpha)
    assert_close(fitted.moments()["mean"], known.mean())
    assert_close(fitted.moments()["variance"], known.var())
    assert_close(fitted.log_predictive(range(4)).exp(), known.mean())


def test_normal_known_variance(weights):
    fitted, y = posterior("normal_known_variance", weights)
    precision = 1 / 2.5 + weights.sum() / 0.6
    mean = (0.4 / 2.5 + weights @ y / 0.6) / precision
    assert_close(fitted.moments()["mean"], mean)
    assert_close(fitted.moments()["variance"], 1 / precision)
    new = np.linspace(-3, 3, 5)
    assert_close(
        fitted.log_predictive(new), stats.norm.logpdf(new, mean, (1 / precision + 0.6) ** 0.5)
    )


def test_normal_inverse_gamma(weights):
    """Mean, spread and density by integrating prior times likelihood over mu and log sigma."""
    fitted, y = posterior("normal_inverse_gamma", weights)
    mu, log_sd = np.meshgrid(np.linspace(-12, 14, 1201), np.linspace(-3.5, 4, 601))
    sd = np.exp(log_sd)
    log_q = stats.invgamma.logpdf(sd**2, 1.2, scale=0.9) + np.log(2 * sd**2)
    log_q += stats.norm.logpdf(mu, 0.3, sd / 0.6**0.5)
    for weight, number in zip(weights, y, strict=True):
        log_q += weight * (-0.5 * ((number - mu) / sd) ** 2 - log_sd)
    q = np.exp(log_q - log_q.max())
    q /= q.sum()
    moments = fitted.moments()
    assert_close(moments["mean"], (q * mu).sum(), 1e-6)
    assert_close(moments["variance"], (q * mu**2).sum() - (q * mu).sum() ** 2, 1e-4)
    assert_close(moments["noise_mean"], (q * sd**2).sum(), 1e-4)
    new = np.array([-1.0, 0.5, 4.0])
    densities = [(q * stats.norm.pdf(number, mu, sd)).sum() for number in new]
    assert_close(fitted.log_predictive(new).exp(), densities, 1e-6)


def wishart_posterior(x, weights):
    """Textbook parameters, from the weighted mean and scatter."""
    m0, kappa0, nu0 = np.array([0.2, 0.0, -0.3]), 0.7, 4.5
    n = weights.sum()
    mean = weights @ x / n
    scatter = (weights[:, None] * (x - mean)).T @ (x - mean)
    gap = (mean - m0)[:, None]
    scale = cases.SCALE + scatter + kappa0 * n / (kappa0 + n) * gap @ gap.T
    return (kappa0 * m0 + n * mean) / (kappa0 + n), kappa0 + n, nu0 + n, scale


def student(parameters, x):
    m, kappa, nu, scale = parameters
    dof = nu - len(m) + 1
    return stats.multivariate_t.logpdf(x, m, scale * (kappa + 1) / (kappa * dof), dof)


def test_normal_inverse_wishart(weights):
    fitted, x = posterior("normal_inverse_wishart", weights)
    expected = wishart_posterior(x, weights)
    for value, known in zip(fitted.standard().values(), expected, strict=True):
        assert_close(value, known)
    new = RANDOM.normal(size=(5, 3))
    assert_close(fitted.log_predictive(new), student(expected, new))
    known = stats.invwishart(expected[2], expected[3])
    assert_close(fitted.moments()["noise_mean"], known.mean())
    assert_close(fitted.moments()["noise_variance"], known.var())


def test_one_dimension_of_the_wishart_is_the_gamma():
    y = RANDOM.normal(size=9)
    one = NormalInverseGamma(0.3, 0.6, 1.2, 0.9).fit(y)
    other = type(CASES["normal_inverse_wishart"].family)([0.3], 0.6, 2.4, 1.8).fit(y)
    assert_close(one.loo_log_predictive(), other.loo_log_predictive())
    assert_close(one.kl(one.remove([1])), other.kl(other.remove([1])))


def test_linear_regression(weights):
    fitted, (x, y) = posterior("linear_regression", weights)
    precision = (weights[:, None] * x).T @ x / 0.4 + 0.7 * np.eye(4)
    mean = np.linalg.solve(precision, x.T @ (weights * y) / 0.4)
    assert_close(fitted.moments()["mean"], mean)
    assert_close(fitted.moments()["variance"], np.linalg.inv(precision))
    new = RANDOM.normal(size=(5, 4)), RANDOM.normal(size=5)
    sd = np.sqrt(np.einsum("na,ab,nb->n", new[0], np.linalg.inv(precision), new[0]) + 0.4)
    assert_close(fitted.log_predictive(new), stats.norm.logpdf(new[1], new[0] @ mean, sd))


def test_gaussian_mixture_given_responsibilities(weights):
    fitted, (x, r) = posterior("gaussian_mixture", weights)
    parts = [wishart_posterior(x, weights * r[:, k]) for k in range(2)]
    alpha = np.array([0.9, 1.6]) + weights @ r
    assert_close(fitted.standard()["mean"], [part[0] for part in parts])
    assert_close(fitted.standard()["scale"], [part[3] for part in parts])
    new = RANDOM.normal(size=(5, 3))
    density = sum(
        a * np.exp(student(p, new)) for a, p in zip(alpha / alpha.sum(), parts, strict=True)
    )
    assert_close(fitted.log_predictive(new), np.log(density))


def test_probabilistic_pca_equals_scikit_learn():
    random = np.random.default_rng(5)
    x = random.normal(size=(40, 6)) @ random.normal(size=(6, 6)) + random.normal(size=6)
    fitted = ProbabilisticPCA(6, 3).fit(x).remove(range(9))
    pca = PCA(3).fit(x[9:])
    # scikit-learn divides by N - 1, the largest likelihood by N
    pca.explained_variance_ = pca.explained_variance_ * 30 / 31
    pca.noise_variance_ = pca.noise_variance_ * 30 / 31
    assert_close(fitted.log_predictive(x), pca.score_samples(x))
    assert_close(fitted.moments()["variance"], pca.get_covariance())
    assert_close(fitted.standard()["noise_variance"], pca.noise_variance_)
    sign = np.sign(np.take_along_axis(pca.components_, abs(pca.components_).argmax(1)[:, None], 1))
    lengths = np.sqrt(pca.explained_variance_ - pca.noise_variance_)
    assert_close(fitted.standard()["weights"], (pca.components_ * sign).T * lengths)


def test_divergence_of_pca_is_the_likelihood_lost():
    x = np.random.default_rng(6).normal(size=(20, 4))
    fitted = ProbabilisticPCA(4, 2).fit(x)
    without = fitted.remove([0, 1, 2])
    lost = without.log_predictive(x[3:]).sum() - fitted.log_predictive(x[3:]).sum()
    assert_close(fitted.kl(without), lost)


@pytest.mark.parametrize("name", ["normal_inverse_gamma", "normal_inverse_wishart", "pca"])
def test_data_far_from_zero_with_the_origin_among_them(name):
    """A shift of data and origin changes nothing but the mean."""
    x = np.random.default_rng(7).normal(size=(30, 3))
    far = 2.0**30
    make = {
        "normal_inverse_gamma": lambda at: NormalInverseGamma(at, 1.0, 2.0, 1.0),
        "normal_inverse_wishart": lambda at: NormalInverseWishart([at] * 3),
        "pca": lambda at: ProbabilisticPCA(3, 1, at),
    }[name]
    x = x[:, 0] if name == "normal_inverse_gamma" else x
    x = (x + far) - far  # what is left of them there
    near, shifted = make(0.0).fit(x), make(far).fit(x + far)
    assert_close(
        shifted.remove([1, 2]).loo_log_predictive(), near.remove([1, 2]).loo_log_predictive(), 1e-6
    )
    assert_close(shifted.moments()["variance"], near.moments()["variance"])


def test_series_whole_numbers_of_numpy_and_no_data():
    """What users hold their data in, and none at all, which gives the prior."""
    numbers = pd.Series([1.0, 3.0, 4.0], index=[2, 0, 1])
    first, second = (NormalKnownVariance().fit(v) for v in (numbers, [1.0, 3.0, 4.0]))
    assert first.kl(second) == 0
    regression = LinearRegression(np.int64(2))
    assert regression.fit([]).natural["quadratic"].tolist() == [[-0.5, 0.0], [0.0, -0.5]]
    assert regression.fit([]).num_data == 0
