"""The comparison of benchmarks.ratios, which is not run here: it takes minutes."""

import json

from benchmarks.ratios import RESULTS, grown, page


def test_a_ratio_more_than_a_tenth_larger_is_told() -> None:
    then = {"pass": 1.0, "fit": 2.0, "gone": 1.0}
    found = grown({"pass": 1.05, "fit": 2.4, "new": 9.0}, then)
    assert list(found) == ["fit"]
    assert abs(found["fit"] - 0.2) < 1e-12


def test_the_page_is_the_one_of_the_record() -> None:
    record = json.loads((RESULTS / "ratios.json").read_text())
    assert (RESULTS / "ratios.md").read_text() == page(record).rstrip() + "\n"
