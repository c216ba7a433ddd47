"""The Kullback-Leibler divergence against integrals, closed forms and draws."""

import numpy as np
import pytest
from scipy import integrate, special, stats

from engram.errors import ArgumentError
from engram.families import (
    GaussianMixture,
    NormalInverseGamma,
    NormalInverseWishart,
    ProbabilisticPCA,
)
from family_cases import CASES


def pair(name):
    """A posterior, and the same without three examples."""
    posterior = CASES[name].family.fit(CASES[name].data(0, 12))
    return posterior, posterior.remove([1, 4, 8])


@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        ("beta_bernoulli", lambda p: stats.beta(p["a"], p["b"])),
        ("gamma_poisson", lambda p: stats.gamma(p["a"], scale=1 / p["b"])),
        ("gamma_exponential", lambda p: stats.gamma(p["a"], scale=1 / p["b"])),
        ("normal_known_variance", lambda p: stats.norm(p["mean"], p["variance"] ** 0.5)),
    ],
    ids=["beta", "gamma, counts", "gamma, durations", "normal"],
)
def test_one_parameter_by_integration(name, frozen):
    first, second = pair(name)
    p, q = (frozen({k: float(v) for k, v in s.standard().items()}) for s in (first, second))
    expected, _ = integrate.quad(
        lambda t: p.pdf(t) * (p.logpdf(t) - q.logpdf(t)),
        p.ppf(1e-14),
        p.isf(1e-14),
        epsabs=1e-12,
        limit=200,
    )
    assert abs(first.kl(second) - expected) < 1e-8


def test_dirichlet_in_closed_form():
    first, second = pair("dirichlet_categorical")
    p, q = (np.asarray(s.standard()["alpha"]) for s in (first, second))
    expected = special.gammaln(p.sum()) - special.gammaln(q.sum())
    expected += (special.gammaln(q) - special.gammaln(p)).sum()
    expected += (p - q) @ (special.digamma(p) - special.digamma(p.sum()))
    assert abs(first.kl(second) - expected) < 1e-10


def test_regression_in_closed_form():
    first, second = pair("linear_regression")
    (m1, c1), (m2, c2) = (map(np.asarray, s.moments().values()) for s in (first, second))
    expected = np.trace(np.linalg.solve(c2, c1)) - 4 + (m2 - m1) @ np.linalg.solve(c2, m2 - m1)
    expected += np.linalg.slogdet(c2)[1] - np.linalg.slogdet(c1)[1]
    assert abs(first.kl(second) - 0.5 * expected) < 1e-10


def wishart_log_ratio(one, other, draws=4000):
    """log q1 - log q2 at draws of (mu, Sigma) from q1."""
    random = np.random.default_rng(1)
    sigmas = stats.invwishart(float(one["dof"]), one["scale"]).rvs(draws, random_state=random)
    noise = np.einsum("nab,nb->na", np.linalg.cholesky(sigmas), random.normal(size=(draws, 3)))
    mus = one["mean"] + noise / one["kappa"] ** 0.5

    def log_density(s):
        gap = mus - s["mean"]
        solved = np.linalg.solve(sigmas, gap[..., None])[..., 0]
        logs = stats.invwishart(float(s["dof"]), s["scale"]).logpdf(np.moveaxis(sigmas, 0, -1))
        determinant = np.linalg.slogdet(2 * np.pi * sigmas / s["kappa"])[1]
        return logs - 0.5 * (s["kappa"] * (gap * solved).sum(1) + determinant)

    return log_density(one) - log_density(other)


def assert_near(value, *log_ratios):
    """The sum of independent means, within four standard errors."""
    error = sum(logs.var() / len(logs) for logs in log_ratios) ** 0.5
    assert error < 0.05
    assert abs(value - sum(logs.mean() for logs in log_ratios)) < 4 * error


def test_normal_inverse_wishart_by_draws():
    first, second = pair("normal_inverse_wishart")
    p, q = ({n: v.numpy() for n, v in s.standard().items()} for s in (first, second))
    assert_near(first.kl(second), wishart_log_ratio(p, q))


def test_gaussian_mixture_by_draws():
    first, second = pair("gaussian_mixture")
    p, q = ({n: v.numpy() for n, v in s.standard().items()} for s in (first, second))
    a, b = stats.dirichlet(p.pop("alpha")), stats.dirichlet(q.pop("alpha"))
    shares = a.rvs(20_000, random_state=0).T
    components = [
        wishart_log_ratio({n: v[k] for n, v in p.items()}, {n: v[k] for n, v in q.items()})
        for k in range(2)
    ]
    assert_near(first.kl(second), a.logpdf(shares) - b.logpdf(shares), *components)


@pytest.mark.parametrize("name", ["normal_inverse_gamma", "normal_inverse_wishart"])
def test_expected_statistics_are_those_of_the_textbook(name):
    """E of the inverse variance and of its logarithm, from the inverse Wishart."""
    posterior, _ = pair(name)
    p, expected = posterior.standard(), posterior.expected_statistics()
    if name == "normal_inverse_gamma":
        assert abs(-2 * expected["square"] - p["a"] / p["b"]) < 1e-10
        logs = np.log(float(p["b"])) - special.digamma(float(p["a"]))
    else:
        inverse = p["dof"] * np.linalg.inv(p["scale"])
        assert np.allclose(-2 * expected["outer"], inverse, atol=1e-10)
        halves = (float(p["dof"]) - np.arange(3)) / 2
        logs = np.linalg.slogdet(p["scale"])[1] - 3 * np.log(2) - special.digamma(halves).sum()
    assert abs(-2 * expected["shape"] - logs) < 1e-10


class TestPriorsWithOtherOrigins:
    """Natural parameters are measured from the prior's mean, which may differ."""

    points = np.random.default_rng(3).normal(size=(9, 3))

    def test_normal_inverse_wishart_by_draws(self):
        first = NormalInverseWishart([0.0, 0.0, 0.0], 0.7, 6.0).fit(self.points)
        second = NormalInverseWishart([1.0, -0.5, 2.0], 0.5, 7.0).fit(self.points)
        p, q = ({n: v.numpy() for n, v in s.standard().items()} for s in (first, second))
        assert_near(first.kl(second), wishart_log_ratio(p, q))

    def test_one_dimension_is_the_wishart_of_size_one(self):
        numbers = self.points[:, 0]
        gammas = [NormalInverseGamma(m, 0.5, 1.5, 2.0).fit(numbers) for m in (1.0, 5.0)]
        wisharts = [NormalInverseWishart([m], 0.5, 3.0, 4.0).fit(numbers) for m in (1.0, 5.0)]
        assert abs(gammas[0].kl(gammas[1]) - wisharts[0].kl(wisharts[1])) < 1e-9
        assert gammas[0].kl(gammas[1]) > 0.1

    def test_mixture_is_the_sum_over_components(self):
        shares = np.tile([1.0, 0.0], (9, 1))
        near, far = NormalInverseWishart([0.0] * 3), NormalInverseWishart([1.0, -0.5, 2.0])
        mixed = [GaussianMixture([1.0, 1.0], c).fit((self.points, shares)) for c in (near, far)]
        expected = near.fit(self.points).kl(far.fit(self.points)) + near.fit([]).kl(far.fit([]))
        assert abs(mixed[0].kl(mixed[1]) - expected) < 1e-9

    def test_origin_of_pca_changes_nothing(self):
        first, second = (ProbabilisticPCA(3, 1, origin=o).fit(self.points) for o in (0.0, 3.0))
        assert first.kl(second) < 1e-9
        assert abs(first.kl(second.remove([2])) - first.kl(first.remove([2]))) < 1e-9
        with pytest.raises(ArgumentError, match="1 components"):
            first.kl(ProbabilisticPCA(3, 2).fit(self.points))

    def test_nothing_to_compare_with(self):
        with pytest.raises(ArgumentError, match="posterior of a family"):
            NormalInverseGamma().fit([1.0]).kl(None)
