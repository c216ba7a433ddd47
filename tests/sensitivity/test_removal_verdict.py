"""The verdict on leaving a group out: from measured signals, and beside training again."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import engram
from engram.models import fit_linear, remove_group
from engram.sensitivity.group_steps import Matrix
from engram.sensitivity.removal_verdict import Grounds, removal_verdict
from engram.sensitivity.step_signals import StepSignals
from retraining_problems import PRIOR_PRECISION, RIDGE, classifier, minimised, ridge_problem

GROUPS = Path(__file__).parents[2] / "docs" / "results" / "groups.json"
MATRICES = {"factors": Matrix.ALL, "gauss_newton": Matrix.STOPPED, "replay": None}
REPLAYED, STEPPED, AT_MINIMUM = None, Matrix.STOPPED, Matrix.WITHOUT_HESSIAN


def level(matrix: Matrix | None, signals: StepSignals | None, stopped: bool, **facts: bool) -> str:
    known = {"exact": False, "held": False, "finite": True} | facts
    return removal_verdict(Grounds(matrix, signals, stopped, **known)).level


@pytest.mark.parametrize(
    ("matrix", "signals", "stopped", "expected"),
    [
        (REPLAYED, StepSignals(0.0), True, "good"),
        (REPLAYED, StepSignals(0.02), True, "caution"),
        (REPLAYED, StepSignals(0.06), True, "unreliable"),
        (REPLAYED, StepSignals(math.nan), True, "unreliable"),
        (STEPPED, StepSignals(-0.1, 0.4, 0.8), True, "caution"),  # one step of a stopped training
        (STEPPED, StepSignals(-0.1, 1.2, 0.8), True, "unreliable"),
        (STEPPED, StepSignals(-0.1, 0.4, -0.1), True, "unreliable"),
        (AT_MINIMUM, StepSignals(0.01, 0.9, 0.9, 0.0), False, "good"),
        (AT_MINIMUM, StepSignals(0.01, 0.9, 0.9, 0.4), False, "caution"),
        (AT_MINIMUM, StepSignals(0.01, 0.9, 0.9, 2.0), False, "unreliable"),
        (AT_MINIMUM, StepSignals(0.01, 0.9, -0.1, 0.0), False, "caution"),
        (Matrix.ALL, StepSignals(0.01, 0.9, 1.9, 0.0), False, "unreliable"),
        (Matrix.FACTORS, StepSignals(0.01, 2.0, 0.9, 0.0), False, "caution"),
        (None, None, False, "caution"),  # the paper's form, about which nothing is known
    ],
)
def test_levels(
    matrix: Matrix | None, signals: StepSignals | None, stopped: bool, expected: str
) -> None:
    assert level(matrix, signals, stopped) == expected


def test_a_sign_is_not_called_right_where_the_step_is_not_to_be_believed() -> None:
    found = removal_verdict(
        Grounds(STEPPED, StepSignals(-0.1, 1.2, 0.8), True, exact=False, held=False, finite=True)
    )
    assert found.level == "unreliable"
    assert found.line.startswith("sign mostly right, size not to be used")
    cautious = removal_verdict(
        Grounds(STEPPED, StepSignals(-0.1, 0.2, 0.8), True, exact=False, held=False, finite=True)
    )
    assert (cautious.level, cautious.ranking.text) == ("caution", "sign right")


def test_what_is_exact_is_good_and_what_was_held_is_not() -> None:
    assert level(None, None, False, exact=True) == "good"
    assert level(AT_MINIMUM, StepSignals(0.0, 0.1, 1.0, 0.0), False, held=True) == "unreliable"
    assert level(AT_MINIMUM, StepSignals(0.0, 0.1, 1.0, 0.0), False, finite=False) == "unreliable"


def measured() -> list[tuple[dict[str, Any], bool]]:
    """Removals of the groups benchmark, and whether one is off by a factor 3 or in sign."""
    stored = json.loads(GROUPS.read_text())
    found = []
    for row in stored["rows"]:
        off = False
        for what in ("own", "test"):
            truth, error = stored["truth"][row["case"]][f"{row['group']}/{what}"]
            clear = abs(truth) > 2 * error
            off |= clear and not 1 / 3 <= row[what] / truth <= 3
        found.append((row, off))
    return found


def test_wrong_removals_of_the_benchmark_are_flagged_and_replays_are_not() -> None:
    caught, wrong, replays = 0, 0, []
    for row, off in measured():
        signals = StepSignals(row["rise"], row["leverage"], row["agreement"])
        found = level(MATRICES[row["way"]], signals, True)
        wrong, caught = wrong + off, caught + (off and found != "good")
        if row["way"] == "replay":
            replays.append(found)
    assert wrong > 30
    assert caught >= 0.9 * wrong
    assert replays.count("good") == len(replays)


def test_ridge_without_a_group_is_good_and_prints() -> None:
    model, x, y = ridge_problem(60)
    posterior = engram.laplace(
        model, (x, y), likelihood=RIDGE, structure="full", prior_precision=PRIOR_PRECISION
    )
    removal = engram.remove(model, (x, y), posterior, [3, 4, 9], estimator="corrected")
    assert removal.signals is not None
    assert removal.signals.agreement == pytest.approx(1, rel=1e-6)
    assert removal.signals.drift == pytest.approx(0, abs=1e-9)
    assert removal.verdict.level == "good"
    assert not removal.flagged
    assert repr(removal).splitlines()[1:] == [
        "verdict               good",
        "  sign right, size within 3 times, its own loss within 3 times",
    ]


def test_a_net_that_was_stopped_without_a_record_is_told_to_record() -> None:
    model, x, y = classifier()
    delta, group = 0.3, [0, 3, 6, 9]
    early = engram.laplace(model, (x, y), structure="full", prior_precision=delta)
    removal = engram.remove(model, (x, y), early, group)
    assert removal.signals is not None
    assert removal.delta is not None
    slope = _slope(model, x, y, delta, removal.delta)
    own = _slope(model, x[group], y[group], 0.0, removal.delta)
    assert removal.signals.drift == pytest.approx(abs(slope / own), rel=1e-6)
    assert removal.verdict.level == "unreliable"
    reason = next(r for r in removal.verdict.reasons if r.signal == "drift")
    assert "replay=True" in reason.remedy
    assert "not at a minimum" in repr(removal)
    minimised(model, x, y, torch.ones(36).double(), delta)
    late = engram.laplace(model, (x, y), structure="full", prior_precision=delta)
    settled = engram.remove(model, (x, y), late, group)
    assert "drift" not in {reason.signal for reason in settled.verdict.reasons}


def _slope(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, delta: float, step: dict[str, torch.Tensor]
) -> float:
    """Of the regularised sum of the losses along a step, by autograd."""
    loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
    value = loss + 0.5 * delta * sum(p.square().sum() for p in model.parameters())
    gradients = torch.autograd.grad(value, list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    return sum(float((g * step[n]).sum()) for n, g in zip(names, gradients, strict=True))


def test_closed_models_and_classes_have_verdicts() -> None:
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    fit = fit_linear(x, x.sum(1) + 1)
    assert remove_group(fit, [1, 2]).verdict.level == "good"
    model, inputs, labels = classifier()
    posterior = engram.laplace(model, (inputs, labels), structure="full", prior_precision=0.3)
    classes = engram.remove_classes(model, (inputs, labels), posterior)
    assert list(classes.verdicts) == [0, 1, 2]
    assert list(classes.to_frame()["verdict"]) == [v.level for v in classes.verdicts.values()]
    paper = engram.remove(model, (inputs, labels), posterior, [0], estimator="paper")
    assert [reason.signal for reason in paper.verdict.reasons] == ["signals"]
