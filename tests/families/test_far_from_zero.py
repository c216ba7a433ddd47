"""Leave-one-out far from the prior, and at any scale, against arithmetic of 60 digits."""

import mpmath
import numpy as np
import pytest
import torch

from engram.errors import PosteriorError
from engram.families import (
    GaussianMixture,
    LinearRegression,
    LinearStateSpace,
    NormalInverseGamma,
    NormalInverseWishart,
    NormalKnownVariance,
    ProbabilisticPCA,
    VariationalGaussianMixture,
)

RANDOM = np.random.default_rng(5)
POINTS = RANDOM.normal(size=(9, 3))
ORIGINS, SCALES = [0.0, 1e3, 1e6], [1e-6, 1.0, 1e6]
everywhere = pytest.mark.parametrize("origin", ORIGINS)
at_any_scale = pytest.mark.parametrize("scale", SCALES)


@pytest.fixture(autouse=True)
def digits():
    with mpmath.workdps(60):
        yield


def exact(values):
    return mpmath.matrix(np.asarray(values, dtype=float).tolist())


def student(mean, kappa, dof, scale, data, weights, point):
    """log p(point | data) of a normal-inverse-Wishart with weighted data."""
    weights = [mpmath.mpf(float(weight)) for weight in weights]
    size, m, total = len(mean), exact(mean), mpmath.fsum(weights)
    kappa, dof = mpmath.mpf(kappa), mpmath.mpf(dof)
    centre = kappa * m / (kappa + total)
    for weight, x in zip(weights, data, strict=True):
        centre += weight * exact(x) / (kappa + total)
    spread = exact(scale) + kappa * (m - centre) * (m - centre).T
    for weight, x in zip(weights, data, strict=True):
        spread += weight * (exact(x) - centre) * (exact(x) - centre).T
    count, free = kappa + total, dof + total - size + 1
    spread *= (count + 1) / (count * free)
    off = exact(point) - centre
    square = (off.T * mpmath.lu_solve(spread, off))[0]
    gammas = mpmath.loggamma((free + size) / 2) - mpmath.loggamma(free / 2)
    norm = size * mpmath.log(free * mpmath.pi) + mpmath.log(mpmath.det(spread))
    return gammas - norm / 2 - (free + size) / 2 * mpmath.log(1 + square / free)


def assert_loo(posterior, expected, tolerance=1e-9):
    found = posterior.loo_log_predictive()
    for i, value in enumerate(expected):
        assert float(found[i]) == pytest.approx(float(value), abs=tolerance, rel=tolerance)


@everywhere
@at_any_scale
@pytest.mark.parametrize("prior", [0.0, 1.0])
@pytest.mark.parametrize("kappa", [1.0, 1e-8])
def test_normal_inverse_wishart(origin, scale, prior, kappa):
    points = origin + scale * POINTS
    mean, spread = np.full(3, prior * origin), scale**2 * np.eye(3)
    posterior = NormalInverseWishart(mean, kappa, 5.0, torch.tensor(spread)).fit(points)
    rest = [np.delete(points, i, 0) for i in range(2)]
    expected = [student(mean, kappa, 5.0, spread, rest[i], [1.0] * 8, points[i]) for i in range(2)]
    assert_loo(posterior, expected)
    fresh = posterior.remove([0]).log_predictive(points[:1])
    assert float(fresh) == pytest.approx(float(expected[0]), abs=1e-8)


@everywhere
@at_any_scale
@pytest.mark.parametrize("kappa", [1.0, 1e-10])
def test_normal_inverse_gamma(origin, scale, kappa):
    numbers = origin + scale * POINTS[:, 0]
    posterior = NormalInverseGamma(0.0, kappa, 1.5, scale**2).fit(numbers)
    columns = numbers[:, None]
    expected = [
        student(
            [0.0], kappa, 3.0, [[2 * scale**2]], np.delete(columns, i, 0), [1.0] * 8, columns[i]
        )
        for i in range(2)
    ]
    assert_loo(posterior, expected)


@everywhere
@at_any_scale
def test_mixture(origin, scale):
    points = origin + scale * np.r_[POINTS, POINTS + 30]
    shares = np.repeat([[0.9, 0.1], [0.2, 0.8]], 9, axis=0)
    spread = scale**2 * np.eye(3)
    component = NormalInverseWishart([0.0] * 3, 0.5, 5.0, torch.tensor(spread))
    posterior = GaussianMixture([1.0, 2.0], component).fit((points, shares))
    rest, left = points[1:], shares[1:]
    densities = [
        student([0.0] * 3, 0.5, 5.0, spread, rest, left[:, k], points[0]) for k in range(2)
    ]
    alpha = [1.0 + left[:, 0].sum(), 2.0 + left[:, 1].sum()]
    terms = [a * mpmath.exp(d) for a, d in zip(alpha, densities, strict=True)]
    assert_loo(posterior, [mpmath.log(sum(terms) / sum(alpha))])


def grid():
    """Points that stay exact when they are moved by a power of two."""
    return np.round(RANDOM.normal(size=(12, 3)) * 64) / 64


@pytest.mark.parametrize("shift", [2.0**10, 2.0**20, 2.0**30])
def test_what_does_not_depend_on_the_origin(shift):
    points = grid()
    families = [
        lambda o: ProbabilisticPCA(3, 1),
        lambda o: NormalInverseWishart([o] * 3, 0.7),
        lambda o: VariationalGaussianMixture(
            GaussianMixture([1.0, 1.0], NormalInverseWishart([o] * 3, 0.7))
        ),
    ]
    for make in families:
        near, far = make(0.0).fit(points), make(shift).fit(points + shift)
        assert torch.allclose(near.loo_log_predictive(), far.loo_log_predictive(), rtol=1e-9)
    moved = ProbabilisticPCA(3, 1).fit(points + shift)
    half = ProbabilisticPCA(3, 1).fit(points + shift, np.r_[np.ones(9), np.zeros(3)])
    near = [ProbabilisticPCA(3, 1).fit(points, np.r_[np.ones(9), np.full(3, w)]) for w in (1, 0)]
    assert moved.kl(half) == pytest.approx(near[0].kl(near[1]), rel=1e-6)


def test_divergence_between_origins():
    """Fits to data near and far from the prior are measured from different points."""
    prior = NormalInverseWishart([0.0] * 3, 0.7, 5.0)
    points = grid() + 2.0**12
    whole, part = prior.fit(points), prior.fit(points).remove([1, 2])
    rest = prior.fit(np.delete(points, [1, 2], 0))
    assert whole.kl(rest) == pytest.approx(whole.kl(part), rel=1e-6)
    assert part.kl(rest) < 1e-6
    number = NormalInverseGamma(0.0, 0.7).fit(points[:, 0])
    rest = NormalInverseGamma(0.0, 0.7).fit(points[2:, 0])
    assert number.kl(rest) == pytest.approx(number.kl(number.remove([0, 1])), rel=1e-6)


def gaussian_loo(inputs, targets, noise, precision, i):
    """log p(y_i | rest) of a linear regression with known noise."""
    kept = [k for k in range(len(targets)) if k != i]
    rows, y = exact(inputs[kept]), exact(targets[kept, None])
    matrix = exact(precision * np.eye(inputs.shape[1])) + rows.T * rows / mpmath.mpf(noise)
    own = exact(inputs[i][:, None])
    mean = mpmath.lu_solve(matrix, rows.T * y / mpmath.mpf(noise))
    variance = (own.T * mpmath.lu_solve(matrix, own))[0] + mpmath.mpf(noise)
    off = mpmath.mpf(float(targets[i])) - (own.T * mean)[0]
    return -(off**2 / variance + mpmath.log(2 * mpmath.pi * variance)) / 2


@everywhere
@at_any_scale
def test_known_variance(origin, scale):
    numbers = origin + scale * POINTS[:, 0]
    precision = 1 / (9 * max(scale, origin) ** 2)
    posterior = NormalKnownVariance(scale**2, 0.0, 1 / precision).fit(numbers)
    expected = [gaussian_loo(np.ones((9, 1)), numbers, scale**2, precision, i) for i in range(2)]
    assert_loo(posterior, expected, 1e-5 if origin >= 1e9 * scale else 1e-8)


@everywhere
@at_any_scale
def test_linear_regression_is_right_or_refused(origin, scale):
    inputs = np.c_[np.ones(9), origin + scale * POINTS[:, 0]]
    targets = POINTS[:, 1] + 0.5 * POINTS[:, 0]
    for noise, precision in ((0.3, 1e-4), (1e-3, 1e-9)):
        expected = [gaussian_loo(inputs, targets, noise, precision, i) for i in range(2)]
        family = LinearRegression(2, noise, precision)
        if origin >= 1e5 * scale and precision < 1e-6:  # products of columns, nearly the same
            with pytest.raises(PosteriorError, match="centre"):
                family.fit((inputs, targets))
        else:
            assert_loo(family.fit((inputs, targets)), expected, 1e-6)


@everywhere
@at_any_scale
def test_state_space(origin, scale):
    """A walk that is observed, as a regression on its independent steps."""
    count = 6
    values = origin + scale * POINTS[:count, :1]
    walk = LinearStateSpace(
        count, [[1.0]], 0.5 * scale**2, [[1.0]], scale**2, [origin], 2 * scale**2
    )
    steps = np.tril(np.ones((count, count))) * scale
    steps[:, 0] *= np.sqrt(2)
    steps[:, 1:] *= np.sqrt(0.5)
    expected = [gaussian_loo(steps, values[:, 0] - origin, scale**2, 1.0, i) for i in range(2)]
    assert_loo(walk.fit(values), expected, 1e-3 if origin >= 1e9 * scale else 1e-8)
