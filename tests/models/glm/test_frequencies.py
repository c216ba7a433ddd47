"""Rows that stand for several examples, or for none, against the same examples written out."""

import numpy as np
import pytest
import statsmodels.api as sm
import torch

import engram
from drawn_responses import BINARY, COUNTS, X, Y
from engram.errors import PosteriorError
from engram.models import (
    fit_glm,
    fit_linear,
    glm_measures,
    linear_measures,
    read,
    remove_group,
    sensitivities_of,
)

RANDOM = np.random.default_rng(8)
FREQUENCIES = np.r_[RANDOM.integers(1, 4, 38), 0, 1]
ROWS = np.repeat(np.arange(40), FREQUENCIES)
FAMILIES = {
    "gaussian": (sm.families.Gaussian(), Y),
    "binomial": (sm.families.Binomial(), BINARY),
    "poisson": (sm.families.Poisson(), COUNTS),
    "gamma": (sm.families.Gamma(sm.families.links.Log()), np.exp(0.3 * Y)),
}


def both(name):
    """The fit with frequencies, and that of all examples."""
    family, targets = FAMILIES[name]
    design = sm.add_constant(X)
    short = sm.GLM(targets, design, family=family, freq_weights=FREQUENCIES).fit(tol=1e-13)
    long = sm.GLM(targets[ROWS], design[ROWS], family=family).fit(tol=1e-13)
    return read(short), read(long)


@pytest.mark.parametrize("name", FAMILIES)
def test_one_of_the_examples_of_a_row_is_left_out(name):
    short, long = both(name)
    left, right = sensitivities_of(short), sensitivities_of(long)
    first = np.searchsorted(ROWS, np.arange(40))
    used = np.flatnonzero(FREQUENCIES)
    for column in ("deviation", "loss", "loo_loss", "leverage"):
        ours, theirs = getattr(left, column)[used], getattr(right, column)[first[used]]
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-8, err_msg=column)
    assert left.train_nll == pytest.approx(right.train_nll, rel=1e-9)
    assert left.loo_nll == pytest.approx(right.loo_nll, rel=1e-6)
    assert left.diagnostics.effective_parameters == pytest.approx(
        right.diagnostics.effective_parameters, rel=1e-7
    )
    assert left.num_examples == right.num_data == short.posterior.num_data
    assert list(left.to_frame()["count"]) == FREQUENCIES.tolist()
    assert f"{len(ROWS)} examples in 40 rows" in repr(left)
    steps, full = short.parameter_deviation(), long.parameter_deviation()
    np.testing.assert_allclose(steps[used], full[first[used]], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["binomial", "gaussian"])
def test_groups_and_whole_rows(name):
    short, long = both(name)
    rows = [int(i) for i in np.flatnonzero(FREQUENCIES > 1)[:2]]
    first = np.searchsorted(ROWS, rows)
    one = remove_group(short, rows).delta["coefficients"]
    np.testing.assert_allclose(one, remove_group(long, first).delta["coefficients"], atol=1e-8)
    whole = remove_group(short, rows, shares=FREQUENCIES[rows].astype(float))
    copies = np.flatnonzero(np.isin(ROWS, rows))
    expected = remove_group(long, copies).delta["coefficients"]
    np.testing.assert_allclose(whole.delta["coefficients"], expected, atol=1e-8)
    again = short.without(rows)
    np.testing.assert_allclose(again.coefficients, short.coefficients + one, atol=1e-6)
    assert float(again.objective.design.counts.sum()) == len(ROWS) - 2
    if name == "binomial":
        with pytest.raises(PosteriorError, match="no weight below 0"):
            remove_group(short, rows, shares=FREQUENCIES[rows] + 0.5)


def test_measures_are_those_of_one_example():
    for name, measures in (("binomial", glm_measures), ("gaussian", linear_measures)):
        short, long = both(name)
        used = np.flatnonzero(FREQUENCIES)
        first = np.searchsorted(ROWS, used)
        left, right = measures(short), measures(long)
        for column in ("leverage", "cooks_distance", "dfbetas"):
            ours, theirs = getattr(left, column)[used], getattr(right, column)[first]
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-8, err_msg=column)


def test_rows_of_weight_0_do_not_count():
    weights = np.r_[np.ones(38), 0.0, 0.0]
    for with_zeros, without in (
        (fit_linear(X, Y, weights=weights), fit_linear(X[:38], Y[:38])),
        (fit_glm(X, BINARY, weights=weights), fit_glm(X[:38], BINARY[:38])),
    ):
        left, right = sensitivities_of(with_zeros), sensitivities_of(without)
        assert with_zeros.posterior.num_data == 38
        assert left.num_examples == 38
        assert left.train_nll == pytest.approx(right.train_nll, rel=1e-12)
        assert left.loo_nll == pytest.approx(right.loo_nll, rel=1e-9)
        assert torch.equal(left.deviation[38:], torch.zeros(2, 1).double())


def test_counts_are_saved(tmp_path):
    result = sensitivities_of(both("binomial")[0])
    loaded = engram.load(result.save(tmp_path / "run"))
    assert torch.equal(loaded.counts, result.counts)
    assert loaded.loo_nll == result.loo_nll
