"""The chain against the dense joint Gaussian, and against statsmodels' Kalman smoother."""

import numpy as np
import pytest
import torch
from scipy import stats
from statsmodels.tsa.statespace.kalman_smoother import KalmanSmoother

import family_cases as cases
from engram.families import LinearStateSpace
from engram.families.linear_state_space import solve_chain
from family_cases import CASES, NUM_TIMES, STATE_SPACE


def dense_posterior(times, rows, weights):
    """Mean and covariance of all states, conditioned by the textbook formula for Gaussians."""
    mean, covariance = [cases.INITIAL_MEAN], np.zeros((2 * NUM_TIMES, 2 * NUM_TIMES))
    covariance[:2, :2] = cases.INITIAL_COVARIANCE
    for t in range(1, NUM_TIMES):
        now, before = slice(2 * t, 2 * t + 2), slice(2 * t - 2, 2 * t)
        mean.append(cases.TRANSITION @ mean[-1])
        covariance[now, : 2 * t] = cases.TRANSITION @ covariance[before, : 2 * t]
        covariance[: 2 * t, now] = covariance[now, : 2 * t].T
        covariance[now, now] = (
            cases.TRANSITION @ covariance[before, before] @ cases.TRANSITION.T
            + cases.TRANSITION_NOISE
        )
    held = weights > 0
    select = np.zeros((3 * held.sum(), 2 * NUM_TIMES))
    noise = np.zeros((len(select), len(select)))
    for row, (t, weight) in enumerate(zip(times[held], weights[held], strict=True)):
        select[3 * row : 3 * row + 3, 2 * t : 2 * t + 2] = cases.EMISSION
        noise[3 * row : 3 * row + 3, 3 * row : 3 * row + 3] = cases.EMISSION_NOISE / weight
    mean = np.concatenate(mean)
    gain = np.linalg.solve(select @ covariance @ select.T + noise, select @ covariance).T
    mean = mean + gain @ (rows[held].ravel() - select @ mean)
    return mean, covariance - gain @ select @ covariance


def test_reweighting_equals_conditioning_the_dense_joint():
    times, rows = CASES["linear_state_space"].data(0, 14)
    shares = np.array([1.0, 1.0, 0.4, -0.5])
    fitted = STATE_SPACE.fit((times, rows)).remove([0, 3, 6, 9], weights=shares)
    weights = np.ones(14)
    weights[[0, 3, 6, 9]] -= shares
    mean, covariance = dense_posterior(times, rows, weights)
    standard = fitted.standard()
    blocks = covariance.reshape(NUM_TIMES, 2, NUM_TIMES, 2).transpose(0, 2, 1, 3)
    steps = np.arange(NUM_TIMES)
    assert np.allclose(standard["mean"].numpy().ravel(), mean, atol=1e-10)
    assert np.allclose(standard["covariance"].numpy(), blocks[steps, steps], atol=1e-10)
    assert np.allclose(
        standard["cross_covariance"].numpy(), blocks[steps[:-1], steps[1:]], atol=1e-10
    )


def test_kl_equals_that_of_the_dense_joint():
    times, rows = CASES["linear_state_space"].data(1, 10)
    fitted = STATE_SPACE.fit((times, rows))
    without = np.ones(10)
    without[[2, 5]] = 0
    (m1, c1), (m2, c2) = (dense_posterior(times, rows, w) for w in (np.ones(10), without))
    expected = 0.5 * (
        np.trace(np.linalg.solve(c2, c1))
        - len(m1)
        + (m2 - m1) @ np.linalg.solve(c2, m2 - m1)
        + np.linalg.slogdet(c2)[1]
        - np.linalg.slogdet(c1)[1]
    )
    assert abs(fitted.kl(fitted.remove([2, 5])) - expected) < 1e-10


def test_loo_equals_the_dense_predictive():
    times, rows = CASES["linear_state_space"].data(2, 9)
    loo = STATE_SPACE.fit((times, rows)).loo_log_predictive()
    for i in range(9):
        weights = np.ones(9)
        weights[i] = 0
        mean, covariance = dense_posterior(times, rows, weights)
        own = slice(2 * times[i], 2 * times[i] + 2)
        spread = cases.EMISSION @ covariance[own, own] @ cases.EMISSION.T + cases.EMISSION_NOISE
        expected = stats.multivariate_normal.logpdf(rows[i], cases.EMISSION @ mean[own], spread)
        assert abs(float(loo[i]) - expected) < 1e-10


def test_removal_equals_statsmodels_with_missing_values():
    random = np.random.default_rng(3)
    rows = random.normal(size=(NUM_TIMES, 3))
    missing = [1, 2, 7]
    fitted = STATE_SPACE.fit(rows).remove(missing)
    smoother = KalmanSmoother(k_endog=3, k_states=2)
    smoother.bind(np.where(np.isin(np.arange(NUM_TIMES), missing)[:, None], np.nan, rows))
    smoother["design"], smoother["obs_cov"] = cases.EMISSION, cases.EMISSION_NOISE
    smoother["transition"], smoother["selection"] = cases.TRANSITION, np.eye(2)
    smoother["state_cov"] = cases.TRANSITION_NOISE
    smoother.initialize_known(cases.INITIAL_MEAN, cases.INITIAL_COVARIANCE)
    smoothed = smoother.smooth()
    assert np.allclose(fitted.moments()["mean"].numpy(), smoothed.smoothed_state.T, atol=1e-10)
    covariances = np.moveaxis(smoothed.smoothed_state_cov, -1, 0)
    assert np.allclose(fitted.moments()["variance"].numpy(), covariances, atol=1e-10)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33])
def test_every_length_of_a_chain(length):
    generator = torch.Generator().manual_seed(length)
    dense = torch.eye(2 * length, dtype=torch.float64) * 6
    upper = torch.randn(length - 1, 2, 2, generator=generator, dtype=torch.float64)
    for t in range(length - 1):
        dense[2 * t : 2 * t + 2, 2 * t + 2 : 2 * t + 4] = upper[t]
        dense[2 * t + 2 : 2 * t + 4, 2 * t : 2 * t + 2] = upper[t].T
    linear = torch.randn(length, 2, generator=generator, dtype=torch.float64)
    blocks = dense.reshape(length, 2, length, 2).permute(0, 2, 1, 3)
    steps = torch.arange(length)
    solution = solve_chain(blocks[steps, steps], upper, linear)
    inverse = torch.linalg.inv(dense).reshape(length, 2, length, 2).permute(0, 2, 1, 3)
    assert torch.allclose(solution.mean.ravel(), torch.linalg.solve(dense, linear.ravel()))
    assert torch.allclose(solution.covariance, inverse[steps, steps])
    assert torch.allclose(solution.cross, inverse[steps[:-1], steps[1:]])
    assert torch.allclose(solution.log_determinant, torch.logdet(dense))


def test_more_outputs_than_states_and_several_of_one_time():
    wide = LinearStateSpace(2, [[0.5]], 1.0, [[1.0], [2.0], [3.0]], 0.5, [0.0], 2.0)
    times, rows = [1, 1, 1], np.random.default_rng(0).normal(size=(3, 3))
    fitted = wide.fit((times, rows))
    rest = wide.fit(([1, 1], rows[1:]))
    assert torch.allclose(fitted.loo_log_predictive()[:1], rest.log_predictive(([1], rows[:1])))
