"""What to do is told with what it takes, by the time that the recorded training took."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

import engram
from engram.trust.remedies import REFITS, certify, go_along, record, replay, truth
from engram.trust.thresholds import ALONG_RULES, along_rules


def test_times_are_those_of_so_many_trainings():
    assert f"{REFITS + 1} times (about 6 min)" in certify(10.0)
    assert "(about 11 min)" in certify(10.0)  # the truth of every example, by 64
    assert "(about 11 min)" in truth(10.0)
    assert "(about 10 s)" in record(10.0)
    assert "(about 7 s)" in replay(10.0)
    assert not any("about" in remedy(None) for remedy in (certify, truth, record, replay))


def test_the_rules_along_a_training_differ_in_nothing_else():
    for with_time, without in zip(along_rules(60.0), ALONG_RULES, strict=True):
        assert "(about " in with_time.remedy
        assert replace(with_time, remedy=without.remedy) == without


def recorded_digits() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], engram.Training]:
    torch.manual_seed(0)
    data = torch.randn(60, 4), torch.randint(0, 3, (60,))  # there is nothing to be learnt
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    training = engram.record(optimizer, model)
    for _ in range(30):
        for batch in torch.randperm(60).split(20):
            training.visit(batch, outputs := model(data[0][batch]))
            optimizer.zero_grad()
            nn.functional.cross_entropy(outputs, data[1][batch]).backward()
            optimizer.step()
    return model.eval(), data, training


def test_results_and_removals_of_a_record_are_told_with_its_time():
    model, data, training = recorded_digits()
    given = {"structure": "kronecker", "training": training, "progress": False}
    posterior = engram.laplace(model, data, **given)
    result = engram.sensitivities(model, data, posterior, estimator="linear", progress=False)
    assert result.basis.training_seconds == training.seconds
    remedies = {reason.remedy for reason in result.verdict.reasons}
    assert any(remedy.startswith("Leave out estimator=") for remedy in remedies)
    assert record(training.seconds) not in remedies  # it is recorded
    assert go_along(False, training.seconds) == record(training.seconds)
    removal = engram.remove(model, data, posterior, range(5), estimator="linear", progress=False)
    assert removal.training_seconds == training.seconds
    assert replay(training.seconds) in {reason.remedy for reason in removal.verdict.reasons}
