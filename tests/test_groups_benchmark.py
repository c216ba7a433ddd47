"""What the page of the groups counts as right."""

from __future__ import annotations

import pytest
import torch
from benchmarks.groups.page import judged, page, summary, true_changes
from benchmarks.groups.settings import Source
from benchmarks.timing import environment


def test_true_changes_are_means_with_standard_errors() -> None:
    losses = torch.tensor([[1.0, 2.0], [1.0, 2.2], [1.0, 1.8], [1.0, 2.0]])
    found = true_changes({"a/own": losses, "a/rest": losses, "seconds": torch.zeros(4)})
    mean, error = found.pop("a/own")
    assert mean == pytest.approx(1.0)
    assert error == pytest.approx(float(torch.tensor([1.0, 1.2, 0.8, 1.0]).std()) / 2)
    assert not found


def test_counts() -> None:
    row = {"case": "net", "group": "a", "seed": 0, "way": "replay", "flagged": False}
    cost = {"trainings": 0.5, "seconds_over_training": 0.6, "fit_over_training": 0.1}
    rows = [
        row | cost | {"own": 1.5, "test": -0.1},
        row | cost | {"own": 2.5, "test": 0.1, "seed": 1},
    ]
    other = [one | {"way": way, "trainings": None} for one in rows for way in ("factors",)]
    flagged = [one | {"way": "gauss_newton", "flagged": True} for one in rows]
    truth = {"net": {"a/own": (1.0, 0.1), "a/test": (-0.1, 0.2)}}
    known = environment(seed=0)
    record = {"rows": rows + other + flagged, "truth": truth, "seeds": [0, 1], "environment": known}
    expected = {"clear": True, "sign": True, "size": False, "flagged": False}
    assert judged(rows[1], "own", (1.0, 0.1)) == expected
    assert summary(record, "replay", "own")[2:] == ["2 of 2", "1 of 2", "0", "2 of 2", "1 of 2"]
    assert summary(record, "replay", "test")[2:] == ["0 of 0", "0 of 0", "0", "0 of 0", "0 of 0"]
    assert summary(record, "gauss_newton", "own")[4:] == ["2", "0 of 0", "0 of 0"]
    text = page(record)
    assert "+1.50 / -0.100 |" in text
    assert "+2.50 / +0.100 *" in text
    assert "not flagged:\nreplay, net, a, seed 1 (own, 2.50 of it); factors, net, a, seed 1" in text


def test_a_source_has_its_wrong_labels_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.groups import settings
    from benchmarks.practical.data import Split

    images, labels = torch.zeros(90, 1, 2, 2), torch.arange(90) % 10
    whole = Split(images, labels, labels, images[:5], labels[:5], labels[:5])
    monkeypatch.setattr(settings, "fashion", lambda count, mislabel: whole)
    source = Source(80, 40, 35, skipped=10)
    split = source.split()
    assert split.wrong.nonzero()[:, 0].tolist() == list(range(35))
    groups = source.groups()
    assert len(groups["half of it"]) == 20
    assert set(groups["half of it"].tolist()) < set(groups["source"].tolist())
    assert all(
        (split.given[groups[name]] == number).all() for name, number in settings.CLASSES.items()
    )
