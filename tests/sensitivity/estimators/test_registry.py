"""The estimators by name, and which one a posterior gets."""

import pytest

from cases import MLP
from engram.errors import ArgumentError
from engram.sensitivity.estimators import ESTIMATORS, FROM_VARIANCE, default_estimator
from fitted import posterior, sensitivities

HESSIAN_PRIOR = 20.0  # with which the Hessian of the small net is positive definite
DEFAULTS = {
    ("full", "hessian"): "newton",
    ("last_layer", "hessian"): "newton",
    ("kronecker", "ggn"): "downdated",
    ("full", "ggn"): "corrected",
    ("last_layer", "ggn"): "corrected",
    ("ekfac", "ggn"): "linear",
    ("diagonal", "ggn"): "linear",
    ("isotropic", "ggn"): "linear",
}


@pytest.mark.parametrize(("structure", "curvature"), DEFAULTS)
def test_every_posterior_has_its_rule(structure, curvature):
    fitted = posterior("mlp", structure, curvature, HESSIAN_PRIOR)
    name = DEFAULTS[structure, curvature]
    assert default_estimator(fitted) == name
    assert sensitivities(MLP, fitted).basis.estimator == name


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name not in FROM_VARIANCE])
def test_rules_that_need_more_than_a_variance_refuse_other_posteriors(name):
    with pytest.raises(ArgumentError, match=f'{ESTIMATORS[name].asks_for} for estimator="{name}"'):
        sensitivities(MLP, posterior("mlp", "diagonal"), estimator=name)


def test_names_are_those_of_the_rules():
    assert {name: rule.name for name, rule in ESTIMATORS.items()} == {n: n for n in ESTIMATORS}
    assert FROM_VARIANCE == ("linear", "corrected", "iterated", "paper")
