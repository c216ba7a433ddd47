"""Numbers that are none make a verdict: unreliable, how many, and what to do."""

import math
from dataclasses import replace

import pytest
import torch

import engram
from engram.engine.gradient_accumulator import GradientAccumulator
from engram.trust.judge import FINITE
from trust_problems import DELTA, judged, trained

NAN, INFINITY = float("nan"), float("inf")


@pytest.fixture(scope="module")
def good():
    model, data = trained()
    result, posterior = judged(model, data, "full", DELTA, estimator="corrected")
    assert result.verdict.level == "good"
    return model, data, result, posterior


def with_lost(result, name, rows, value):
    column = getattr(result, name).clone()
    column[rows] = value
    return replace(result, **{name: column})


@pytest.mark.parametrize("value", [NAN, INFINITY, -INFINITY])
@pytest.mark.parametrize("name", FINITE)
def test_one_lost_example_spoils_the_run_and_itself(good, name, value):
    verdict = with_lost(good[2], name, [5], value).verdict
    assert verdict.level == "unreliable"
    assert verdict.reasons[0].signal == "not_finite"
    assert "1 of 36 examples" in verdict.reasons[0].text
    assert "prior_precision" in verdict.reasons[0].remedy
    assert verdict.levels[5] == 2
    assert verdict.counts["unreliable"] == 1


def test_all_scores_lost(good):
    verdict = with_lost(good[2], "score", slice(None), NAN).verdict
    assert verdict.level == "unreliable"
    assert verdict.counts["unreliable"] == 36


def test_leverages_that_were_not_computed_say_nothing(good):
    result = good[2]
    assert with_lost(result, "leverage", [3], NAN).verdict.level == "good"
    assert with_lost(result, "leverage", [3], INFINITY).verdict.level == "unreliable"
    lost = replace(result, diagnostics=replace(result.diagnostics, leverages_lost=2))
    assert lost.verdict.level == "unreliable"


def test_a_gradient_that_is_no_number_is_not_converged(good):
    lost = replace(good[2], diagnostics=replace(good[2].diagnostics, relative_gradient=NAN))
    assert lost.verdict.level == "unreliable"
    assert "convergence" in [reason.signal for reason in lost.verdict.reasons]


def test_an_assessment_of_it_is_no_better(good):
    model, data, result, posterior = good
    lost = with_lost(result, "score", [0, 1], NAN)
    found = engram.assess(model, data, lost, posterior, sample=36, progress=False)
    assert found.level == "unreliable"
    assert "not_finite" in {reason.signal for reason in found.reasons}
    assert (found.levels[:2] == 2).all()


def test_a_verification_says_that_nothing_can_be_compared(good):
    model, data, result, _ = good
    lost = with_lost(result, "score", slice(None), NAN)
    check = engram.verify(model, data, lost, sample=4, refits=2, progress=False)
    assert check.sentence.startswith("Trained again without each of 4 examples: 4 of the scores")
    assert math.isnan(check.score.spearman.value)
    assert math.isnan(check.score.pearson.value)
    assert check.truth.score.isfinite().all()


def test_the_relative_gradient_of_no_number_is_none():
    total = GradientAccumulator()
    total.add("w", torch.tensor([NAN]))
    weights = {"w": torch.ones(1)}
    share, left = total.fitting_share(weights, lambda name: 1.0)
    assert share != share
    assert left != left


def test_the_summary_is_of_the_scores_that_are_numbers(good):
    result = good[2]
    largest = int(result.score.argmax())
    lost = with_lost(result, "score", [largest], NAN)
    known = torch.cat([result.score[:largest], result.score[largest + 1 :]])
    line = next(line for line in repr(lost).split("\n") if line.startswith("score"))
    assert f"median {float(known.median()):.3g}, largest {float(known.max()):.3g} " in line
    assert line.endswith("NaN for 1 others")
    assert "NaN for every example" in repr(with_lost(result, "score", slice(None), NAN))


def test_what_to_do_about_a_model_in_closed_form():
    inputs = torch.tensor([[0.0], [0.0], [0.0], [0.0], [1.0]])  # the last alone has a slope
    fit = engram.models.fit_glm(inputs, torch.tensor([1.0, 3.0, 2.0, 4.0, 5.0]), "poisson")
    result = engram.models.sensitivities_of(fit)
    reason = next(r for r in result.verdict.reasons if r.signal == "not_finite")
    assert "penalty > 0" in reason.remedy
    assert "prior_precision" not in reason.remedy
    assert not any("engram.refine" in r.remedy for r in result.verdict.reasons)


@pytest.mark.parametrize("value", [NAN, INFINITY])
@pytest.mark.parametrize("rows", [[3], slice(None)])
def test_a_page_of_what_is_lost(good, tmp_path, rows, value):
    lost = good[2]
    for name in ("score", "loss", "loo_loss"):
        lost = with_lost(lost, name, rows, value)
    assert "unreliable" in lost.report(tmp_path / "page.html").read_text()


def test_a_page_shows_marks_that_would_turn_the_writing(good, tmp_path):
    basis = replace(good[2].basis, loss_unit="nats\x1b[31m\u202e<b>")
    page = replace(good[2], basis=basis).report(tmp_path / "page.html").read_text()
    assert r"nats\x1b[31m\u202e&lt;b&gt;" in page
    assert "\u202e" not in page
    assert "\x1b" not in page
