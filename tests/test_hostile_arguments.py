"""Every public function with arguments that mean nothing: a typed error, or a finite answer.

Whatever happens, model, data and surroundings are as before.
"""

import math
from contextlib import suppress
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

import engram
from engram.errors import EngramError, NonFiniteError
from refusal import Refusal
from snapshot import differences, snapshot

QUIET = {"progress": False}
HOSTILE = [
    None,
    True,
    -1,
    0,
    math.nan,
    1e308,
    "x",
    [],
    [1, 2, 3],
    np.array([1, 2]),
    torch.tensor([0.5, 0.5]),
    2**70,
    object(),
]


@cache
def setting():
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    data = torch.randn(9, 4).double(), torch.arange(9) % 3
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=0.1)
    nn.functional.cross_entropy(model(data[0]), data[1]).backward()
    optimizer.step()
    fitted = engram.laplace(
        model, data, structure="full", curvature="ggn", prior_precision=1.0, **QUIET
    )
    result = engram.sensitivities(model, data, fitted, **QUIET)
    return model, data, fitted, result, optimizer


def laplace(**given):
    model, data, *_ = setting()
    return engram.laplace(model, data, **QUIET, **{"prior_precision": 1.0, **given})


def sensitivities(**given):
    model, data, fitted, *_ = setting()
    return engram.sensitivities(model, data, fitted, **QUIET, **given).loo_loss


def iterated(**given):
    return sensitivities(estimator="iterated", **given)


def remove(**given):
    model, data, fitted, *_ = setting()
    found = engram.remove(model, data, fitted, **{"indices": [0, 1], **given}, **QUIET)
    return found.group.loss_without


def remove_classes(**given):
    model, data, fitted, *_ = setting()
    return engram.remove_classes(model, data, fitted, **QUIET, **given)[0].group.loss_without


def influence(**given):
    model, data, fitted, *_ = setting()
    return engram.influence(model, data, data, fitted, **QUIET, **given)


def prediction_variance(**given):
    model, data, fitted, *_ = setting()
    return engram.prediction_variance(model, data[0], fitted, **QUIET, **given)


def calibrate(**given):
    model, data, fitted, *_ = setting()
    return engram.calibrate(model, data, fitted, **QUIET, **given)


def assess(**given):
    model, data, fitted, result, _ = setting()
    return engram.assess(model, data, result, fitted, **QUIET, **given)


def refine(**given):
    model, data, fitted, result, _ = setting()
    return engram.refine(model, data, result, fitted, **QUIET, **given).loo_loss


def verify(**given):
    model, data, _, result, _ = setting()
    return engram.verify(model, data, result, **{"sample": 3, "train": "lbfgs", **given}, **QUIET)


def retrain(**given):
    model, data, *_ = setting()
    settings = {"indices": [0], "train": "lbfgs", **given}
    return engram.retrain(model, data, **settings, **QUIET).loo_loss


def moved(model, data):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * len(data[0])


def subsets(**given):
    model, data, *_ = setting()
    settings = {"train": moved, "subsets": 6, "keep": 0.5, **given}
    return engram.retrain(lambda: model, data, **settings, **QUIET).losses


def posterior_of(**given):
    model, *_, optimizer = setting()
    return engram.posterior_of(optimizer, model, **{"num_data": 9, **given})


def second_moment(**given):
    return posterior_of(**given)


def tracker(**given):
    model, data, *_, optimizer = setting()
    return engram.Tracker(model, optimizer, data, **given)


def patient(**given):
    return tracker(posterior="diagonal", prior_precision=1.0, **given)


def update(**given):
    return tracker(posterior="diagonal", prior_precision=1.0).update(**given)


def tune(**given):
    model, data, *_ = setting()
    settings = {"train": lambda model, delta: None, "prior_precisions": [1.0], **given}
    return engram.tune(model, data, **settings, **QUIET)


def top(**given):
    return setting()[3].top(**given)


def gaussian(**given):
    return engram.likelihoods.Gaussian(**given)


ARGUMENTS = {
    laplace: "seed tolerance batch_size prior_precision structure curvature likelihood",
    sensitivities: "seed rounds batch_size estimator",
    iterated: "rounds",
    remove: "indices weights batch_size estimator at evaluate_on",
    remove_classes: "batch_size estimator at evaluate_on",
    influence: "batch_size",
    prediction_variance: "batch_size",
    calibrate: "probes relative_residual seed batch_size match curvature",
    assess: "sample iterations seed batch_size",
    refine: "relative_residual batch_size method curvature indices",
    verify: "sample seed refits train",
    retrain: "indices groups classes train refits seed prior_precision evaluate_on likelihood",
    subsets: "subsets keep train seed workers evaluate_on likelihood indices",
    posterior_of: "num_data likelihood prior_precision reduction training_batch_size tolerance",
    second_moment: "second_moment",
    tracker: "prior_precision posterior average estimator samples reduction validation held_out",
    patient: "patience",
    update: "samples step seed rounds batch_size",
    tune: "prior_precisions train posterior estimator likelihood validation",
    top: "count by",
    gaussian: "noise_variance",
}
PAIRS = [(function, name) for function, names in ARGUMENTS.items() for name in names.split()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("function", "name"), PAIRS, ids=[f"{f.__name__}-{name}" for f, name in PAIRS]
)
def test_typed_error_or_finite_answer(function, name):
    model, data, *_ = setting()
    before, rows = snapshot(model), [t.clone() for t in data]
    for value in HOSTILE:
        try:
            found = function(**{name: value})
        except EngramError:
            found = None
        if isinstance(found, torch.Tensor):
            assert torch.isfinite(found).all(), value
    assert differences(before, snapshot(model)) == []
    assert all(torch.equal(a, b) for a, b in zip(data, rows, strict=True))


@pytest.mark.parametrize(
    ("function", "settings"),
    [
        (laplace, {"seed": np.int64(3), "batch_size": np.int32(2)}),
        (sensitivities, {"rounds": np.uint8(2), "estimator": "iterated", "seed": np.int64(1)}),
        (remove, {"indices": [np.int64(1)], "weights": np.array([0.5])}),
        (assess, {"sample": np.int64(4), "iterations": np.int16(2)}),
        (retrain, {"indices": np.array([1]), "refits": np.int64(2), "seed": np.int64(1)}),
        (posterior_of, {"num_data": np.int64(9), "prior_precision": np.float32(0.5)}),
        (top, {"count": np.int64(3)}),
        (gaussian, {"noise_variance": np.float32(0.5)}),
    ],
)
def test_numbers_of_numpy_are_numbers(function, settings):
    assert function(**settings) is not None


@pytest.mark.parametrize("weight", [1e308, -1e308, 1e300])
@pytest.mark.parametrize("estimator", ["linear", "corrected", "paper"])
def test_weights_that_overflow(weight, estimator):
    """A finite effect, or an error that names the weights."""
    with suppress(NonFiniteError):
        assert torch.isfinite(remove(weights=[weight, 1.0], estimator=estimator)).all()


def test_a_weight_that_overflows_is_named():
    with Refusal(NonFiniteError, "weights"):
        remove(weights=[1e308, 1.0], estimator="paper")


@pytest.mark.parametrize("estimator", ["linear", "paper"])
@pytest.mark.parametrize("weight", [1e308, 1e150, 1e9, -1e9, -1e150])
def test_weights_beyond_what_first_order_can_see(weight, estimator):
    """A finite number of no meaning: flagged, or refused where it overflows."""
    model, data, fitted, *_ = setting()
    given = {"indices": [0, 1], "weights": [weight, 1.0], "estimator": estimator}
    with suppress(NonFiniteError):
        assert engram.remove(model, data, fitted, **given, **QUIET).flagged
    for usual in (1.0, -1.0, 1.1, -1.5):
        small = {**given, "weights": [usual, 0.5]}
        assert not engram.remove(model, data, fitted, **small, **QUIET).flagged
