"""Wrong labels by what is estimated and what the training's own steps have said."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import engram
from engram.errors import DataError
from engram.sensitivity.label_issues import suspicion, weighed
from engram.sensitivity.result import Result

NUMBER = 80
WRONG = torch.arange(0, NUMBER, 10)
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(NUMBER, 5, generator=GENERATOR)
Y = (X[:, 0] + 0.3 * torch.randn(NUMBER, generator=GENERATOR) > 0).long()
Y[WRONG] = 1 - Y[WRONG]


def asked(named: int = NUMBER) -> tuple[Result, engram.Training]:
    """A net with BatchNorm and dropout whose steps name the first so many of the examples."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    training = engram.record(optimizer, model)
    loader = DataLoader(TensorDataset(torch.arange(NUMBER)), 16, shuffle=True)
    for _ in range(8):
        for (batch,) in loader:
            outputs = model(X[batch])
            known = batch < named
            if bool(known.any()):
                training.visit(batch[known], outputs[known])
            optimizer.zero_grad()
            functional.cross_entropy(outputs, Y[batch]).backward()
            optimizer.step()
    posterior = engram.laplace(
        model, (X, Y), training=training, structure="kronecker", progress=False
    )
    result = engram.sensitivities(
        model, (X, Y), posterior, estimator="linear", progress=False, diagnostics=False
    )
    return result, training


def test_a_result_has_the_losses_before_the_visits() -> None:
    result, training = asked()
    assert training.visits is not None
    torch.testing.assert_close(result.prequential, training.visits.prequential(Y))
    assert "prequential" in result.to_frame().columns
    assert set(result.top(8, by="prequential").index) & set(WRONG.tolist())


def test_issues_are_ranked_by_both_together() -> None:
    result, _ = asked()
    frame = engram.label_issues(result)
    chance = ((-result.loo_loss).exp() + (-result.prequential).exp()) / 2
    assert frame.index.tolist() == chance.argsort(stable=True).tolist()
    assert frame["suspicion"].is_monotonic_decreasing
    torch.testing.assert_close(
        torch.tensor(frame["suspicion"].to_numpy()), -chance.log()[torch.tensor(frame.index)]
    )
    found = set(frame.index[: len(WRONG)]) & set(WRONG.tolist())
    assert len(found) > len(WRONG) // 2


def test_without_visits_it_is_the_leave_one_out_loss() -> None:
    result, _ = asked(named=0)
    assert bool(result.prequential.isnan().all())
    frame = engram.label_issues(result)
    assert "prequential" not in frame.columns
    assert "prequential" not in result.to_frame().columns
    assert (frame["suspicion"] == frame["loo_loss"]).all()


def test_visits_of_other_data_are_not_taken_for_these() -> None:
    with pytest.raises(DataError, match="60 examples; got 80"):
        asked(named=60)


def test_it_is_saved_with_the_result(tmp_path: Path) -> None:
    result, _ = asked()
    loaded = engram.load(result.save(tmp_path))
    assert loaded.prequential.equal(result.prequential)
    pd.testing.assert_frame_equal(engram.label_issues(loaded), engram.label_issues(result))


def test_what_is_not_known_does_not_count() -> None:
    found = suspicion(torch.tensor([1.0, 3.0, 500.0]), torch.tensor([1.0, torch.nan, 2.0]))
    assert found.tolist() == pytest.approx([1.0, 3.0, 2 + math.log(2)])


@pytest.mark.parametrize("epochs", [4, 150])
def test_a_result_says_that_a_net_knows_its_data_by_heart(epochs: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    training = engram.record(optimizer, model)
    for _ in range(epochs):
        outputs = model(X)
        training.visit(torch.arange(NUMBER), outputs)
        optimizer.zero_grad()
        functional.cross_entropy(outputs, Y).backward()
        optimizer.step()
    posterior = engram.laplace(
        model, (X, Y), training=training, structure="kronecker", progress=False
    )
    result = engram.sensitivities(model, (X, Y), posterior, estimator="linear", progress=False)
    assert ("knows its data by heart" in repr(result)) == (epochs == 150)
    assert ("engram.replayed_level" in " ".join(result.basis.not_estimated)) == (epochs == 150)


def test_what_knows_no_more_than_guessing_has_no_say() -> None:
    """Weights are 1 - 1/2 and 1 - 1.5/2; what is not known of an example does not count."""
    rows = [1.0, 1.0, 1.0], [math.nan, 0.5, 2.5], [2.0, 9.0, 0.1]
    found = weighed([torch.tensor(row) for row in rows], 2.0)
    second, third = (
        math.log(0.75) - math.log(0.5 * math.exp(-1) + 0.25 * math.exp(-x)) for x in (0.5, 2.5)
    )
    assert found.tolist() == pytest.approx([1.0, second, third])
    none = weighed([torch.tensor([3.0, 5.0]), torch.tensor([5.0, 5.0])], 2.0)
    assert none[0] == pytest.approx(math.log(2) - math.log(math.exp(-3) + math.exp(-5)))


@pytest.mark.parametrize(("level", "joins"), [("caution", False), ("unreliable", True)])
def test_an_estimate_that_is_not_to_be_relied_on_is_joined_by_the_loss(
    level: str, joins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, _ = asked()
    monkeypatch.setitem(vars(result), "verdict", replace(result.verdict, level=level))
    frame = engram.label_issues(result).sort_index()
    wanted = suspicion(result.loo_loss, result.prequential)
    if joins:
        share = torch.tensor([float((Y == 0).sum()), float((Y == 1).sum())]) / NUMBER
        losses = [result.loo_loss, result.prequential, result.loss]
        wanted = weighed(losses, float(-(share * share.log()).sum()))
    torch.testing.assert_close(torch.tensor(frame["suspicion"].to_numpy()), wanted)
