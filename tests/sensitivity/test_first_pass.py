"""Two stages: losses of all examples, estimates of the largest and of a sample of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import engram
from engram.errors import ArgumentError, RunFolderError
from engram.sensitivity import first_pass

N, SHARE = 203, 0.1


def problem() -> tuple[nn.Module, Any, engram.Posterior]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3)
    ).double()
    data = (torch.randn(N, 4).double(), torch.arange(N) % 3)
    return model, data, engram.laplace(model, data, structure="kronecker", prior_precision=2.0)


@pytest.mark.parametrize("part", [17, 64, 1000])
def test_the_top_is_exact_and_the_others_have_their_loss(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_pass, "SAMPLE", 40)
    model, data, posterior = problem()
    frame = engram.score(model, data, posterior, tmp_path, part=part, top=SHARE).to_frame()
    whole = engram.sensitivities(model, data, posterior).to_frame()
    assert list(frame.index) == list(range(N))
    np.testing.assert_allclose(frame["loss"], whole["loss"], rtol=1e-12)
    largest = set(whole.sort_values("loss", ascending=False).index[: round(SHARE * N)])
    assert set(frame.index[frame["stage"] == "top"]) == largest
    assert (frame["stage"] == "sample").sum() == 40
    known = frame["stage"] != "loss"
    for column in ("loo_loss", "score", "flagged"):
        np.testing.assert_allclose(
            frame.loc[known, column].astype(float), whole.loc[known, column].astype(float)
        )
    assert frame.loc[~known, ["loo_loss", "score"]].isna().all().all()


def test_the_mean_is_that_of_all_where_all_others_are_drawn(tmp_path: Path) -> None:
    model, data, posterior = problem()
    scores = engram.score(model, data, posterior, tmp_path, part=50, top=SHARE)
    result = engram.sensitivities(model, data, posterior)
    assert abs(scores.loo_nll - result.loo_nll) < 1e-12 > abs(scores.train_nll - result.train_nll)


def test_the_mean_is_right_on_average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_pass, "SAMPLE", 60)
    model, data, posterior = problem()
    scores = engram.score(model, data, posterior, tmp_path, top=SHARE)
    whole = engram.sensitivities(model, data, posterior).to_frame()
    others = whole.loc[scores.to_frame()["stage"] != "top"]
    increase = others["loo_loss"] - others["loss"]
    error = len(others) / N * increase.std() / 60**0.5
    assert abs(scores.loo_nll - whole["loo_loss"].mean()) < 4 * error


def test_shares_wait_for_the_losses_of_the_others(tmp_path: Path) -> None:
    model, data, posterior = problem()

    def call(number: int) -> engram.Scores:
        return engram.score(model, data, posterior, tmp_path, part=50, top=SHARE, share=(number, 2))

    assert call(0).missing == [0, 1, 2, 3, 4]  # losses alone: the largest are not known yet
    assert call(1).missing == [0, 2, 4]
    found = call(0)
    assert found.missing == []
    whole = engram.score(model, data, posterior, tmp_path / "one", part=80, top=SHARE)
    np.testing.assert_allclose(found.to_frame()["loo_loss"], whole.to_frame()["loo_loss"])


def test_along_a_record_the_level_is_that_of_the_estimated(tmp_path: Path) -> None:
    model, data, _ = problem()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    training = engram.record(optimizer, model)
    for _ in range(40):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data[0]), data[1]).backward()
        optimizer.step()
    posterior = engram.laplace(model, data, structure="kronecker", training=training)
    frame = engram.score(model, data, posterior, tmp_path, part=64, top=SHARE).to_frame()
    assert frame.loc[frame["stage"] != "loss", "loo_loss"].notna().all()
    assert not any(name.startswith("readout") for name in frame)


def test_what_is_refused(tmp_path: Path) -> None:
    model, data, posterior = problem()
    with pytest.raises(ArgumentError, match="a top between 0 and 1"):
        engram.score(model, data, posterior, tmp_path, top=2)
    engram.score(model, data, posterior, tmp_path, top=SHARE)
    with pytest.raises(RunFolderError, match="other top"):
        engram.score(model, data, posterior, tmp_path, top=0.2)
