"""The numbers to expect of nets that were stopped, and what a verdict makes of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

import engram
from engram.sensitivity.basis import Basis
from engram.sensitivity.course import Course
from engram.sensitivity.result import Result
from engram.trust.aspects import Expected
from engram.trust.expectation import (
    AGREEMENT,
    ALONG,
    ALONG_UNNAMED,
    AT_THE_END,
    AT_THE_END_UNNAMED,
    FEATURES,
    KEPT,
    NOT_RECORDED,
    ONE,
    PREDICTORS,
    RATIO,
    VISITS,
    Predictor,
)
from engram.trust.judge import expected_of, figures_of, foreseen, predictor_of, rules_of
from engram.trust.thresholds import ALONG_RULES, end_rules
from retraining_problems import PRIOR_PRECISION, RIDGE, ridge_problem
from trust_problems import DELTA, judged, trained, untrained


def test_a_predictor_is_linear_and_the_mean_follows_from_the_size():
    predictor = Predictor({ONE: 0.5, AGREEMENT: 1.0}, {ONE: math.log(2.0)})
    expected = predictor.expected({ONE: 1.0, AGREEMENT: 0.3, RATIO: math.log(3.0)})
    assert expected.ranking == pytest.approx(math.tanh(0.8))
    assert expected.size == pytest.approx(2.0)
    # loss 1, leave-one-out 3: an increase of 2 that should be 1, so that 3 stands for 2
    assert expected.mean == pytest.approx(1.5)


def test_what_is_not_known_is_not_foretold():
    expected = Predictor({AGREEMENT: 1.0}, {AGREEMENT: 1.0}).expected(
        {AGREEMENT: math.nan, RATIO: 1.0}
    )
    assert math.isnan(expected.ranking)
    assert math.isnan(expected.size)
    assert math.isnan(expected.mean)


def test_predictors_take_figures_that_a_result_has():
    for predictor in PREDICTORS.values():
        assert set(predictor.ranking) | set(predictor.size) <= set(FEATURES)


def test_how_far_off_is_a_factor_either_way():
    assert foreseen(Expected(0.9, 4.0, 0.5)) == {
        "expected_ranking": pytest.approx(0.1),
        "expected_size": 4.0,
        "expected_mean": 2.0,
    }


def stopped(
    result: Result, agreement: float = 0.9, visits: float = math.nan, **facts: bool
) -> Result:
    """The result, as if its training had been recorded; without visits where none are given."""
    course = Course(0.5, 0.3, agreement, 1.0, visits, visits)
    basis = replace(result.basis, **{"stopped": True, "along": True} | facts)
    return replace(result, basis=basis, diagnostics=replace(result.diagnostics, course=course))


def test_each_way_has_its_own_predictor():
    model, data = trained()
    full, _ = judged(model, data, "full", DELTA)
    factors, _ = judged(model, data, "kronecker", DELTA)
    assert predictor_of(full) is None
    assert predictor_of(stopped(full)) is None  # nor of walks with full matrices
    assert "stopped" in {reason.signal for reason in stopped(full).verdict.reasons}
    assert predictor_of(stopped(factors, visits=0.9)) is ALONG
    assert predictor_of(stopped(factors)) is ALONG_UNNAMED
    assert predictor_of(stopped(factors, visits=0.9, along=False)) is AT_THE_END
    assert predictor_of(stopped(factors, along=False)) is AT_THE_END_UNNAMED
    early, data = untrained()
    assert predictor_of(judged(early, data, "full", 1.0)[0]) is NOT_RECORDED
    assert rules_of(stopped(factors))[:3] == ALONG_RULES
    assert rules_of(stopped(factors, along=False))[:1] == end_rules(named=False)
    diagonal, _ = judged(early, data, "diagonal", 1.0)
    assert predictor_of(diagonal) is None  # the study has none of those


def test_a_bias_before_batch_normalisation_is_no_reason_against_a_recorded_training():
    model, data = trained()
    result = stopped(judged(model, data, "kronecker", DELTA)[0])
    fixed = replace(result, diagnostics=replace(result.diagnostics, parameters_covered=0.9))
    assert "parameters_fixed" not in {reason.signal for reason in fixed.verdict.reasons}


def test_readouts_that_disagree_make_it_worse():
    model, data = trained()
    result, _ = judged(model, data, "kronecker", DELTA)
    steady, torn = stopped(result, 0.95), stopped(result, 0.2)
    assert figures_of(torn)[AGREEMENT] == 0.2
    assert expected_of(steady).ranking > expected_of(torn).ranking
    order = ("good", "caution", "unreliable")
    assert order.index(torn.verdict.size.level) > order.index(steady.verdict.size.level)
    assert torn.verdict.ranking.value == pytest.approx(expected_of(torn).ranking)


def test_a_training_that_ranked_examples_otherwise_makes_it_worse():
    model, data = trained()
    result, _ = judged(model, data, "kronecker", DELTA)
    alike, other = stopped(result, visits=0.97), stopped(result, visits=0.5)
    assert figures_of(other)[VISITS] == figures_of(other)[KEPT] == 0.5
    assert expected_of(alike).ranking > expected_of(other).ranking
    assert expected_of(alike).size < expected_of(other).size
    assert other.verdict.level != "good"
    at_the_end = stopped(result, visits=0.97, along=False).verdict
    assert (at_the_end.size.level, at_the_end.mean.level) == ("caution", "caution")


def test_a_regression_has_no_such_numbers_and_says_to_look():
    model, x, y = ridge_problem(60)
    result, _ = judged(model, (x, y), "kronecker", PRIOR_PRECISION, likelihood=RIDGE)
    assert not result.classifies
    recorded = stopped(result)
    assert math.isnan(expected_of(recorded).size)
    reasons = {reason.signal: reason for reason in recorded.verdict.reasons}
    assert reasons["stopped"].about == ("size", "mean")


def test_sizes_from_the_end_alone_are_never_good():
    model, data = trained()
    ended = stopped(judged(model, data, "kronecker", DELTA)[0], along=False).verdict
    assert ended.size.level == ended.mean.level == "caution"
    assert "engram.record(optimizer, model, loader=loader)" in repr(ended).replace("\n    ", " ")


def digits_by_heart(prior_precision: float) -> Result:
    """Softmax regression of 20 examples at its minimum, by the net's way."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(20, 5, generator=generator).double()
    y = (x @ torch.randn(5, 3, generator=generator).double()).argmax(1)
    model = nn.Sequential(nn.Linear(5, 3)).double()
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=500, tolerance_grad=1e-9, line_search_fn="strong_wolfe"
    )

    def closure():
        optimizer.zero_grad()
        squares = sum((p**2).sum() for p in model.parameters())
        loss = functional.cross_entropy(model(x), y, reduction="sum")
        value = loss + prior_precision / 2 * squares
        value.backward()
        return value

    optimizer.step(closure)
    posterior = engram.laplace(
        model, (x, y), structure="full", prior_precision=prior_precision, progress=False
    )
    return engram.sensitivities(model, (x, y), posterior, progress=False)


def test_a_linear_model_that_knows_its_examples_by_heart_is_not_called_good():
    weak, strong = digits_by_heart(0.01).verdict, digits_by_heart(3.0).verdict
    assert weak.size.level != "good"
    assert "by_heart" in {reason.signal for reason in weak.reasons}
    assert strong.level == "good"


def test_a_basis_of_earlier_versions_has_not_gone_along():
    assert not Basis().along
