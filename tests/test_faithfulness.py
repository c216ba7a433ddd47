"""What the faithfulness page claims at its top follows from the numbers below it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.faithfulness.__main__ import merged
from benchmarks.faithfulness.bars import SECTIONS, bars
from benchmarks.faithfulness.estimates import Estimate, measure, metrics
from benchmarks.faithfulness.limits import limited
from benchmarks.faithfulness.ours import DEFAULT, KRONECKER, METHODS, REFINED
from benchmarks.faithfulness.table import best, shortfalls


def truth() -> Any:
    score = torch.tensor([0.1, 0.2, 0.4, 0.8], dtype=torch.float64)
    return SimpleNamespace(
        score=score, increase=2 * score, deviation=torch.stack([score, -score], 1)
    )


def problem(default: tuple[float, float], peer: tuple[float, float]) -> dict[str, Any]:
    rows = [dict(zip(("score_spearman", "score_pearson"), r, strict=True)) for r in (default, peer)]
    return {"methods": {DEFAULT: rows[0]}, "peers": {"peer": rows[1], "broken": {"error": "E"}}}


def test_metrics_of_the_truth_itself_doubled() -> None:
    known = truth()
    found = metrics(Estimate(known.score**2, 2 * known.increase, 3 * known.deviation), known)
    assert found["score_spearman"] == pytest.approx(1.0)
    assert found["score_pearson"] == pytest.approx(
        float(torch.corrcoef(torch.stack([known.score, known.score**2]))[0, 1])
    )
    assert found["deviation_pearson"] == pytest.approx(1.0)
    assert found["increase_ratio"] == pytest.approx(2.0)
    assert found["loo_error"] == pytest.approx(float(known.increase.mean()))


def test_a_single_number_says_nothing_about_the_size_of_the_increase() -> None:
    known = truth()
    found = metrics(Estimate(known.score), known)
    assert found["increase_pearson"] == pytest.approx(1.0)
    assert found["increase_ratio"] is None
    assert found["loo_error"] is None


def test_a_method_that_fails_is_a_row_with_its_first_line() -> None:
    def broken(given: Any) -> Estimate:
        raise RuntimeError("no such layer\nmore")

    assert measure(broken, SimpleNamespace()) == {"error": "RuntimeError: no such layer"}
    infinite = torch.tensor([1.0, float("inf"), 0.0, 1.0])
    row = measure(lambda given: Estimate(infinite), SimpleNamespace(truth=truth()))
    assert row == {"error": "ValueError: 1 scores are not finite"}


@pytest.mark.parametrize(
    ("default", "peer", "count"),
    [
        ((0.9, 0.9), (0.8, 0.8), 0),
        ((0.9, 0.9), (0.8, 0.95), 1),
        ((0.9, 0.9), (0.9, 0.9), 2),  # as good is not ahead
    ],
)
def test_default_is_ahead_only_where_every_peer_is_behind_in_both(
    default: tuple[float, float], peer: tuple[float, float], count: int
) -> None:
    assert len(shortfalls(problem(default, peer))) == count


def test_best_is_closest_to_the_truth_not_largest() -> None:
    rows = {"high": {"increase_ratio": 1.5, "loo_error": 0.1}, "low": {"increase_ratio": 0.9}}
    rows["low"]["loo_error"] = -0.05
    assert best(rows, "increase_ratio") == "low"
    assert best(rows, "loo_error") == "low"


def test_what_misses_a_bar_is_bold_and_nothing_else() -> None:
    assert {section.row for section in SECTIONS} <= set(METHODS)
    row = {
        "score_spearman": 0.9949,
        "score_pearson": 0.96,
        "increase_pearson": 0.5,
        "increase_ratio": 0.86,
    }
    done = [
        {
            "title": "Some",
            "regime": "converged",
            "default_structure": "full",
            "methods": {DEFAULT: row, REFINED: row, KRONECKER: {"error": "none | here"}},
        },
        {
            "title": "Large",
            "regime": "converged",
            "default_structure": "kronecker",
            "methods": {DEFAULT: row, REFINED: row, KRONECKER: row},
        },
        {"title": "Other", "regime": "early-stopped", "methods": {}},
    ]
    text = bars(done)
    assert "| Some | 0.9949 | **0.9600** | **0.5000** | 0.86 |" in text
    assert "| Some | **0.9949** | **0.9600** | 0.5000 | **0.86** |" in text
    assert "| Some | none / here |  |  |  |" in text
    assert "Other" not in text
    large = text.split("where that is Kronecker factors")[1].split("###")[0]
    assert "| Large | 0.9949 | 0.9600 | **0.5000** | 0.86 |" in large
    assert "Some" not in large


def test_a_run_of_some_settings_keeps_what_an_earlier_one_has_measured() -> None:
    def found(setting: str, **rest: Any) -> dict[str, Any]:
        return {"setting": setting, "regime": "converged", **rest}

    earlier = {(n, "converged"): found(n, run=1) for n in ("usps", "digits")}
    new = [found("questions", error="ended"), found("usps", run=2), found("digits", error="ended")]
    assert merged(earlier, new) == [
        found("digits", run=1),
        found("usps", run=2),
        found("questions", error="ended"),
    ]


def forever() -> None:
    while True:
        pass


def test_a_method_that_takes_too_long_or_too_much_is_stopped() -> None:
    with pytest.raises(TimeoutError, match="processor time"), limited(seconds=0.05):
        forever()
    with pytest.raises(RuntimeError, match="memory"), limited(60.0, size=2**28):
        torch.empty(2**30, dtype=torch.uint8)
    assert len(torch.empty(2**30, dtype=torch.uint8)) == 2**30
