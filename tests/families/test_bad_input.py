"""What a family has no meaning for gets an error that says so, never NaN."""

import numpy as np
import pytest

from engram.errors import (
    ArgumentError,
    DataError,
    EngramError,
    NonFiniteError,
    PosteriorError,
    TargetError,
)
from engram.families import (
    BetaBernoulli,
    DirichletCategorical,
    GammaPoisson,
    LinearRegression,
    LinearStateSpace,
    NormalInverseGamma,
    NormalInverseWishart,
    NormalKnownVariance,
    ProbabilisticPCA,
)
from family_cases import CASES, SCALE, take

every_family = pytest.mark.parametrize("case", CASES.values(), ids=CASES)

SUPPORT = {
    "a label 2": ("beta_bernoulli", [0, 1, 2], "labels 0 or 1; got 2 at 2"),
    "half a label": ("beta_bernoulli", [0.5], "labels 0 or 1; got 0.5 at 0"),
    "a negative count": ("gamma_poisson", [3, -1], "counts 0, 1, 2, ...; got -1 at 1"),
    "half a count": ("gamma_poisson", [1.5], "counts 0, 1, 2, ...; got 1.5 at 0"),
    "no exposure": ("gamma_poisson", ([1, 2], [1.0, 0.0]), "positive exposures; got 0 at 1"),
    "no duration": ("gamma_exponential", [1.0, 0.0], "positive durations; got 0 at 1"),
    "a class too many": ("dirichlet_categorical", [0, 4], "from 0 to 3; got 4 at 1"),
    "a negative class": ("dirichlet_categorical", [-1], "from 0 to 3; got -1 at 0"),
    "a share above 1": (
        "gaussian_mixture",
        ([[0.0, 0.0, 0.0]], [[1.5, -0.5]]),
        r"responsibilities in \[0, 1\]; got 1.5 at \(0, 0\)",
    ),
    "a time too late": (
        "linear_state_space",
        ([11], [[0.0, 0.0, 0.0]]),
        "times from 0 to 10; got 11 at 0",
    ),
}


@pytest.mark.parametrize(("name", "data", "message"), SUPPORT.values(), ids=SUPPORT)
def test_outside_the_support(name, data, message):
    with pytest.raises(TargetError, match=message):
        CASES[name].family.fit(data)


SHAPES = {
    "lengths": ("linear_regression", (np.zeros((3, 4)), np.zeros(2)), "one length; got 3 and 2"),
    "exposures": ("gamma_poisson", ([1, 2], [1.0]), "one length; got 2 and 1"),
    "times": ("linear_state_space", ([1], np.zeros((2, 3))), "one length; got 1 and 2"),
    "shares": ("gaussian_mixture", (np.zeros((2, 3)), [[1.0, 0.0]]), "one length; got 2 and 1"),
    "shares that do not sum to 1": (
        "gaussian_mixture",
        (np.zeros((1, 3)), [[0.3, 0.3]]),
        "sum to 1 for each example; got 0.6 at 0",
    ),
    "width": ("normal_inverse_wishart", np.zeros((5, 2)), r"\(N, 3\); got shape \(5, 2\)"),
    "no pair": ("linear_regression", np.zeros((5, 4)), r"a pair \(inputs, targets\)"),
    "three arrays": ("linear_state_space", ([1], [2], [3]), "a pair"),
    "matrix": ("normal_inverse_gamma", np.zeros((5, 2)), "one number per example"),
    "words": ("normal_known_variance", ["a", "b"], "an array of numbers"),
    "ragged": ("normal_inverse_wishart", [[1.0, 2.0, 3.0], [1.0]], "an array of numbers"),
}


@pytest.mark.parametrize(("name", "data", "message"), SHAPES.values(), ids=SHAPES)
def test_wrong_shapes(name, data, message):
    with pytest.raises(DataError, match=message):
        CASES[name].family.fit(data)


@every_family
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_values(case, value):
    data = case.data(0, 9)
    parts = [np.array(p, dtype=float) for p in (data if isinstance(data, tuple) else (data,))]
    parts[-1].reshape(-1)[-1] = value
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        case.family.fit(tuple(parts) if isinstance(data, tuple) else parts[0])


@every_family
@pytest.mark.parametrize(
    ("indices", "weights", "message"),
    [
        ([9], None, "indices from 0 to 8; got 9, out of range"),
        ([-1], None, "out of range"),
        ([1, 1], None, "each index once; got 1 repeated"),
        ([], None, "at least one index"),
        ([0.5], None, "integer indices"),
        ([True] * 9, None, "indices as integers; got a mask"),
        ("a", None, "integer indices"),
        ([1, 2], [1.0], "2 finite weights"),
        ([1], [np.nan], "1 finite weights"),
        ([1], ["a"], "a list of weights"),
    ],
)
def test_which_examples(case, indices, weights, message):
    posterior = case.family.fit(case.data(0, 9))
    with pytest.raises(ArgumentError, match=message):
        posterior.remove(indices, weights)


@every_family
def test_an_example_is_removed_once(case):
    without = case.family.fit(case.data(0, 9)).remove([3])
    with pytest.raises(ArgumentError, match="example 3, of which nothing is left"):
        without.remove([2, 3])


@every_family
def test_more_than_can_be_removed(case):
    posterior = case.family.fit(case.data(0, 9))
    with pytest.raises(PosteriorError, match="take out less"):
        posterior.remove(range(9), weights=[50.0] * 9)
    with pytest.raises(PosteriorError):
        case.family.fit(case.data(0, 9), weights=[-50.0] * 9)


@every_family
def test_leave_one_out_without_a_proper_rest(case):
    """A posterior may be proper only because one example counts a lot."""
    data = case.data(0, 2 if case.smallest == 0 else 9)
    repeated = take(data, [0, 0] if case.smallest == 0 else [*range(9), 8])
    weights = [-3.0, 30.0] if case.smallest == 0 else [1.0] * 8 + [-3.0, 30.0]
    posterior = case.family.fit(repeated, weights)
    try:
        loo = posterior.loo_log_predictive()
    except PosteriorError as error:
        assert "without example" in str(error)  # noqa: PT017
    else:
        assert loo.isfinite().all()


def test_leave_one_out_names_the_example():
    posterior = BetaBernoulli(1.0, 1.0).fit([1, 1], [-3.0, 30.0])
    with pytest.raises(PosteriorError, match="none without example 1"):
        posterior.loo_log_predictive()
    mixture = CASES["gaussian_mixture"]
    data = take(mixture.data(0, 1), [0, 0])
    with pytest.raises(PosteriorError, match="none without example 1"):
        mixture.family.fit(data, [-3.0, 30.0]).loo_log_predictive()


@every_family
def test_weights_of_a_fit(case):
    data = case.data(0, 9)
    with pytest.raises(DataError, match="9 weights, one per example"):
        case.family.fit(data, [1.0])
    with pytest.raises(NonFiniteError, match="finite weights"):
        case.family.fit(data, [np.nan] * 9)


@every_family
def test_sums_that_overflow(case):
    data = case.data(0, 9)
    with pytest.raises(PosteriorError):
        case.family.fit(data, weights=[1e308] * 9)


def test_components_without_noise():
    family = ProbabilisticPCA(4, 2)
    x = np.random.default_rng(0).normal(size=(5, 4))
    with pytest.raises(PosteriorError, match="vary in more directions"):
        family.fit(x[:3])
    with pytest.raises(PosteriorError, match="some data, since there is no prior; got none"):
        family.fit(np.zeros((0, 4)))
    with pytest.raises(PosteriorError, match="vary in more directions"):
        family.fit(x).remove([0, 1])
    with pytest.raises(PosteriorError, match="without example"):
        family.fit(x[:4]).loo_log_predictive()


def test_different_families_do_not_compare():
    first, second = (
        CASES[n].family.fit(CASES[n].data(0, 9)) for n in ("gamma_poisson", "gamma_exponential")
    )
    with pytest.raises(ArgumentError, match="two posteriors of one family, GammaPoisson"):
        first.kl(second)
    with pytest.raises(ArgumentError, match="of one size"):
        LinearRegression(1).fit(([], [])).kl(LinearRegression(2).fit(([], [])))


@pytest.mark.parametrize(
    "make",
    [
        lambda: BetaBernoulli(0.0, 1.0),
        lambda: GammaPoisson(1.0, -1.0),
        lambda: NormalKnownVariance(np.nan),
        lambda: NormalKnownVariance(1.0, np.inf),
        lambda: NormalInverseGamma(0.0, 1.0, "a"),
        lambda: DirichletCategorical([1.0, 0.0]),
        lambda: DirichletCategorical([]),
        lambda: NormalInverseWishart([0.0, 0.0], dof=0.5),
        lambda: NormalInverseWishart([0.0, 0.0], scale=SCALE),
        lambda: NormalInverseWishart([0.0, 0.0], scale=[[1.0, 2.0], [2.0, 1.0]]),
        lambda: NormalInverseWishart([0.0, 0.0], scale=[[1.0, 0.5], [0.0, 1.0]]),
        lambda: LinearRegression(0),
        lambda: LinearRegression(2, prior_precision=-1.0),
        lambda: ProbabilisticPCA(3, 3),
        lambda: ProbabilisticPCA(3, 1, [0.0, 1.0]),
        lambda: NormalKnownVariance(1.0, [0.0, 1.0]),
        lambda: LinearStateSpace(0, [[1.0]], 1.0, [[1.0]], 1.0, [0.0]),
        lambda: LinearStateSpace(2, [[1.0, 0.0]], 1.0, [[1.0]], 1.0, [0.0]),
        lambda: LinearStateSpace(2, [[1.0]], 0.0, [[1.0]], 1.0, [0.0]),
    ],
)
def test_priors_that_are_none(make):
    with pytest.raises(EngramError, match="What to do"):
        make()
