"""The verdict that every result carries."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

import engram
from engram.trust.aspects import Aspect
from engram.trust.judge import judge, rules_of
from engram.trust.thresholds import LEVERAGE, OWN_RULES
from engram.trust.verdict import LEVELS, Rule, Verdict
from retraining_problems import PRIOR_PRECISION, RIDGE, ridge_problem
from trust_problems import DELTA, judged, trained, untrained

RULE = Rule("signal", 0.1, 0.5, "something is off", "Do something.")


def test_ridge_is_good():
    model, x, y = ridge_problem(60)
    result, _ = judged(
        model, (x, y), "full", PRIOR_PRECISION, likelihood=RIDGE, estimator="corrected"
    )
    assert result.verdict.level == "good"
    assert result.verdict.reasons == ()
    assert result.verdict.counts == {"good": 60, "caution": 0, "unreliable": 0}
    assert "verdict               good" in repr(result)


def test_an_exact_model_may_have_any_leverage():
    x = np.random.default_rng(0).normal(size=(20, 16))
    y = x.sum(1) + np.random.default_rng(1).normal(size=20)
    result = engram.from_estimator(Ridge(alpha=0.01).fit(x, y), x, y)
    assert result.diagnostics.effective_parameters > 16
    assert result.verdict.level == "good"
    assert result.verdict.counts["good"] == 20


def test_a_converged_net_is_good():
    model, data = trained()
    result, _ = judged(model, data, "full", DELTA, estimator="corrected")
    assert result.verdict.level == "good"


def test_an_untrained_net_is_unreliable():
    model, data = untrained()
    result, _ = judged(model, data, "full", 1.0)
    verdict = result.verdict
    assert verdict.level == "unreliable"
    assert verdict.reasons[0].signal == "convergence"
    assert "Train" in verdict.reasons[0].remedy
    assert set(verdict.level_names) == {"unreliable"}


@pytest.mark.parametrize("factor", [0.01, 100.0])
def test_a_wrong_prior_is_named_and_the_right_one_found(factor):
    model, data = trained()
    result, _ = judged(model, data, "full", factor * DELTA)
    assert "prior_mismatch" in {reason.signal for reason in result.verdict.reasons}
    assert result.diagnostics.fitting_prior == pytest.approx(DELTA, rel=1e-4)
    assert result.diagnostics.fitting_gradient < 1e-4


def test_an_example_can_be_worse_than_its_run():
    model, data = trained()
    result, _ = judged(model, data, "full", DELTA, estimator="corrected")
    leverage = result.leverage.clone()
    leverage[3], leverage[5] = LEVERAGE.caution + 0.01, LEVERAGE.unreliable + 0.01
    flagged = result.flagged.clone()
    flagged[7] = True
    changed = replace(result, leverage=leverage, flagged=flagged)
    names = changed.verdict.level_names
    assert (names[3], names[5], names[7]) == ("caution", "unreliable", "unreliable")
    assert changed.verdict.level == "good"


def test_an_example_is_never_better_than_its_run():
    verdict = Verdict.of([RULE], {"signal": 0.2}, torch.tensor([0, 1, 2], dtype=torch.int8))
    assert verdict.level == "caution"
    assert verdict.level_names == ["caution", "caution", "unreliable"]


def test_the_worst_reason_comes_first():
    other = replace(RULE, signal="other")
    verdict = Verdict.of(
        [RULE, other], {"signal": 0.2, "other": 0.6}, torch.zeros(2, dtype=torch.int8)
    )
    assert [reason.level for reason in verdict.reasons] == ["unreliable", "caution"]
    assert repr(verdict).splitlines()[0].startswith("verdict               unreliable")
    assert "Do something." in repr(verdict)


def test_last_layer_says_that_the_rest_is_fixed():
    model, data = trained()
    result, _ = judged(model, data, "last_layer", DELTA)
    assert result.diagnostics.parameters_covered == pytest.approx(18 / 43)
    assert "parameters_fixed" in {reason.signal for reason in result.verdict.reasons}


def test_saved_and_loaded_alike(tmp_path):
    model, data = trained()
    result, _ = judged(model, data, "diagonal", 100 * DELTA)
    again = engram.load(result.save(tmp_path / "run"))
    assert repr(again.verdict) == repr(result.verdict)
    assert torch.equal(again.verdict.levels, result.verdict.levels)


def test_rules_are_ordered_and_say_what_to_do():
    for rule in OWN_RULES:
        assert 0 <= rule.caution <= rule.unreliable
        assert rule.text
        assert rule.remedy.endswith(".")
    assert LEVELS == ("good", "caution", "unreliable")


def test_a_remedy_never_names_a_structure_that_is_already_there():
    model, data = trained()
    result, _ = judged(model, data, "full", DELTA)
    crowded = replace(
        result, diagnostics=replace(result.diagnostics, effective_parameters=float(result.num_data))
    )
    (reason,) = [r for r in judge(crowded).reasons if r.signal == "mean_leverage"]
    assert "richer structure" not in reason.remedy
    assert "refine" in reason.remedy
    other, _ = judged(model, data, "diagonal", DELTA)
    remedies = {r.signal: r.remedy for r in rules_of(other)}
    assert "richer structure" in remedies["mean_leverage"]


def test_ranking_size_and_mean_are_judged_each_by_itself():
    sizes = replace(RULE, about=("size", "mean"))
    order = replace(RULE, signal="other", about=("ranking",))
    verdict = Verdict.of(
        [sizes, order], {"signal": 0.2, "other": 0.0}, torch.zeros(2, dtype=torch.int8)
    )
    levels = verdict.ranking.level, verdict.size.level, verdict.mean.level
    assert levels == ("good", "caution", "caution")
    assert verdict.line == "ranking good, sizes within 3 times, mean LOO within a factor 2"
    assert verdict.line in repr(verdict)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (1.62, "sizes about 1.6 times too large"),
        (0.4, "sizes about 2.5 times too small"),
        (50.0, "sizes more than 10 times too large"),
        (0.0, "sizes more than 10 times too small"),
        (1.05, "sizes within 3 times"),
        (float("nan"), "sizes within 3 times"),
    ],
)
def test_a_size_is_said_in_words(value, words):
    assert Aspect("size", "caution", value).text == words


def test_an_example_has_the_reasons_of_its_run_and_its_own():
    sizes = replace(RULE, about=("size",))
    verdict = Verdict.of([sizes], {"signal": 0.2}, torch.tensor([0, 2], dtype=torch.int8))
    plain, held = verdict.of_example(0), verdict.of_example(1)
    assert (plain.level, held.level) == ("caution", "unreliable")
    assert [reason.signal for reason in plain.reasons] == ["signal"]
    assert [reason.signal for reason in held.reasons] == ["example", "signal"]
    assert (held.ranking.level, held.size.level) == ("good", "unreliable")


def test_a_number_that_is_none_in_one_example_is_no_reason_against_another():
    lost = replace(RULE.reason(0.6), signal="not_finite")
    own = torch.tensor([0, 2], dtype=torch.int8)
    verdict = Verdict.from_reasons([], own, [lost])
    assert verdict.of_example(0).reasons == ()
    assert [reason.signal for reason in verdict.of_example(1).reasons] == ["not_finite"]


def test_a_remedy_is_printed_once():
    reasons = [Rule(name, 0.1, 0.5, f"{name} is off", "Do this.").reason(0.2) for name in "ab"]
    text = repr(Verdict.from_reasons(reasons, torch.zeros(1, dtype=torch.int8)))
    assert text.count("Do this.") == 1
    assert "b is off (b 0.2). The same helps." in text
