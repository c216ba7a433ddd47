"""Removing equals fitting without: for every family, size, subset and weight, to 1e-10."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engram.core import equation
from engram.families import GaussianMixture
from family_cases import CASES, take

every_family = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
quick = settings(max_examples=15, deadline=None, derandomize=True)


def assert_same(first, second, tolerance=1e-10):
    """Equal within the tolerance of the largest entry; what is infinite is so in both."""
    assert first.keys() == second.keys()
    for name, value in first.items():
        other = second[name]
        finite = torch.isfinite(other)
        assert torch.equal(value[~finite], other[~finite]), name
        value, other = value[finite], other[finite]
        scale = max(1.0, float(other.abs().max()) if other.numel() else 1.0)
        assert torch.allclose(value, other, rtol=0, atol=tolerance * scale), name


def new_form(case, data):
    """What is predicted has no responsibilities."""
    return data[0] if isinstance(case.family, GaussianMixture) else data


@every_family
@quick
@given(extra=st.integers(1, 15), seed=st.integers(0, 1000), draw=st.data())
def test_removing_equals_fitting_the_rest(case, extra, seed, draw):
    num = case.smallest + extra
    data = case.data(seed, num)
    chosen = draw.draw(st.lists(st.integers(0, num - 1), min_size=1, max_size=extra, unique=True))
    kept = np.setdiff1d(np.arange(num), chosen)
    removed = case.family.fit(data).remove(chosen)
    refitted = case.family.fit(take(data, kept))
    assert_same(removed.natural, refitted.natural)
    assert_same(removed.standard(), refitted.standard(), 1e-9)
    assert_same(removed.moments(), refitted.moments(), 1e-9)
    assert removed.kl(refitted) < 1e-8


@every_family
@quick
@given(extra=st.integers(1, 15), seed=st.integers(0, 1000), draw=st.data())
def test_reweighting_equals_fitting_with_weights(case, extra, seed, draw):
    num = case.smallest + extra
    data = case.data(seed, num)
    chosen = draw.draw(st.lists(st.integers(0, num - 1), min_size=1, max_size=extra, unique=True))
    shares = draw.draw(st.lists(st.floats(-3.0, 1.0), min_size=len(chosen), max_size=len(chosen)))
    weights = np.ones(num)
    weights[chosen] -= shares
    reweighted = case.family.fit(data).remove(chosen, weights=shares)
    assert_same(reweighted.natural, case.family.fit(data, weights).natural)
    assert torch.allclose(reweighted.weights, torch.as_tensor(weights))


@every_family
def test_a_weight_of_two_is_the_example_twice(case):
    data = case.data(3, 9)
    doubled = case.family.fit(data).remove([4], weights=[-1.0])
    assert_same(doubled.natural, case.family.fit(take(data, [*range(9), 4])).natural)


@every_family
def test_removing_in_parts_and_the_rest(case):
    """What is left of an example is removed, whatever share was taken before."""
    posterior = case.family.fit(case.data(4, 12))
    parts = posterior.remove([2, 3], weights=[0.3, 0.9]).remove([3]).remove([2])
    assert_same(parts.natural, posterior.remove([2, 3]).natural)
    assert parts.weights.tolist() == [1.0, 1.0, 0.0, 0.0] + [1.0] * 8


@every_family
@quick
@given(seed=st.integers(0, 1000))
def test_loo_equals_refitting_every_time(case, seed):
    num = case.smallest + 5
    data = case.data(seed, num)
    loo = case.family.fit(data).loo_log_predictive()
    for i in range(num):
        rest = case.family.fit(take(data, np.arange(num) != i))
        own = new_form(case, take(data, [i]))
        assert abs(float(rest.log_predictive(own)) - float(loo[i])) < 1e-9 * max(1, abs(loo[i]))


@every_family
def test_loo_of_a_weighted_example_takes_out_what_is_left(case):
    num = case.smallest + 6
    data = case.data(6, num)
    posterior = case.family.fit(data).remove([0, 1, 2], weights=[0.4, 1.0, -1.5])
    loo = posterior.loo_log_predictive()
    for i in range(3):
        weights = posterior.weights.clone()
        weights[i] = 0
        own = new_form(case, take(data, [i]))
        expected = case.family.fit(data, weights).log_predictive(own)
        assert abs(float(expected) - float(loo[i])) < 1e-9 * max(1, abs(loo[i]))


@pytest.mark.parametrize(
    "name", [name for name in CASES if name not in ("gaussian_mixture", "probabilistic_pca")]
)
def test_the_predictive_density_is_a_ratio_of_normalisers(name):
    """log p(y | data) = A(lambda + lambda_y) - A(lambda) + h(y), for h the same everywhere."""
    case = CASES[name]
    posteriors = [case.family.fit(case.data(seed, 8)) for seed in (7, 8)]
    data = case.data(9, 6)
    for i in range(6):
        new = take(data, [i])
        base_measures = [
            float(posterior.log_predictive(new)) - partition_gain(posterior, new)
            for posterior in posteriors
        ]
        assert abs(base_measures[0] - base_measures[1]) < 1e-10


def partition_gain(posterior, new):
    """A(lambda + lambda_y) - A(lambda)."""
    family = posterior.family
    likelihoods = family.likelihoods(family.read(new))
    seen = equation.divided(posterior.natural, likelihoods, -torch.ones(1).double())
    return float(family.log_partition(seen) - family.log_partition(posterior.natural))


@every_family
def test_the_kl_is_zero_at_home_and_positive_elsewhere(case):
    posterior = case.family.fit(case.data(1, 14))
    without = posterior.remove([1, 5])
    assert posterior.kl(posterior) < 1e-12
    assert posterior.kl(without) > 1e-6
    assert without.kl(posterior) > 1e-6


@every_family
def test_the_original_posterior_stays(case):
    posterior = case.family.fit(case.data(1, 14))
    before = {name: value.clone() for name, value in posterior.natural.items()}
    posterior.remove([3])
    posterior.loo_log_predictive()
    posterior.kl(posterior)
    assert all(torch.equal(before[name], value) for name, value in posterior.natural.items())
    assert posterior.weights.eq(1).all()


@every_family
def test_arrays_lists_and_tensors_are_the_same(case):
    data = case.data(2, 9)
    as_list = tuple(p.tolist() for p in data) if isinstance(data, tuple) else data.tolist()
    as_tensor = (
        tuple(torch.as_tensor(p) for p in data)
        if isinstance(data, tuple)
        else torch.as_tensor(data)
    )
    expected = case.family.fit(data).natural
    assert_same(case.family.fit(as_list).natural, expected, 0)
    assert_same(case.family.fit(as_tensor).natural, expected, 0)


@pytest.mark.parametrize("name", [name for name in CASES if name != "probabilistic_pca"])
def test_no_data_give_the_prior(name):
    case = CASES[name]
    posterior = case.family.fit(take(case.data(0, 1), slice(0, 0)))
    assert_same(posterior.natural, case.family.prior(), 0)
    assert posterior.loo_log_predictive().shape == (0,)
    assert_same(case.family.fit(case.data(0, 5)).remove().natural, case.family.prior())
