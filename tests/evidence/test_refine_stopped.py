"""Refining the result of a net that was stopped: by its record, by a part of it, and by a loop."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import engram
from engram.errors import ArgumentError
from engram.retraining.recipes import FromStart, Replay
from recorded_training import fit, net, recorded

CHOSEN = [2, 5]


@pytest.fixture(scope="module")
def stopped():
    model, data, training = recorded()
    posterior = engram.laplace(model, data, training=training, progress=False)
    result = engram.sensitivities(model, data, posterior, progress=False)
    return model, data, training, posterior, result


def refined(stopped, **settings):
    model, data, _, posterior, result = stopped
    return engram.refine(
        model, data, result, posterior, **{"indices": CHOSEN, "progress": False, **settings}
    )


def test_a_replay_is_the_training_without_the_example(stopped, tmp_path):
    model, data, training, _, result = stopped
    found = refined(stopped, train=training)
    for example in CHOSEN:
        again = engram.replay(model, data, training, [example], progress=False)
        with torch.no_grad():
            outputs = again(data[0][example : example + 1])
        loss = functional.cross_entropy(outputs, data[1][example : example + 1])
        assert float(found.loo_loss[example]) == pytest.approx(float(loss), rel=1e-5)
    others = torch.ones(len(data[1]), dtype=torch.bool)
    others[CHOSEN] = False
    assert torch.equal(found.loo_loss[others], result.loo_loss[others])
    assert found.to_frame()["obtained"].value_counts().to_dict() == {"estimate": 38, "replay": 2}
    assert "2 by replay; the others are estimates" in repr(found)
    assert engram.load(found.save(tmp_path)).obtained.tolist() == found.obtained.tolist()


def test_a_part_of_the_record_begins_at_a_checkpoint(stopped):
    model, data, training, _, _ = stopped
    half = Replay(training, start=0.5)
    found = refined(stopped, train=half, indices=[2])
    again = engram.replay(model, data, training, [2], start=training.num_steps // 2, progress=False)
    with torch.no_grad():
        expected = functional.cross_entropy(again(data[0][2:3]), data[1][2:3])
    assert float(found.loo_loss[2]) == pytest.approx(float(expected), rel=1e-5)
    assert repr(half) == "replay of 15 steps of AdamW from 50% on"


def test_a_loop_from_new_first_weights(stopped):
    found = refined(stopped, train=FromStart(fit, net))
    assert found.to_frame()["obtained"].value_counts()["retrain"] == 2


def test_a_certificate_of_a_part_says_so(stopped):
    model, data, training, _, result = stopped
    part = Replay(training, start=0.5)
    found = engram.certify(model, data, result, train=part, refits=8, progress=False)
    assert found.way == "replay of a part"
    assert any("still in the weights" in note for note in found.notes())


def test_a_way_is_asked_for(stopped):
    with pytest.raises(ArgumentError, match=r"a solve assumes a minimum; got none.*train=training"):
        refined(stopped)
    with pytest.raises(ArgumentError, match="the record of the training, to replay; got none"):
        refined(stopped, method="replay")
    with pytest.raises(ArgumentError, match="a start from 0 to less than 1"):
        Replay(stopped[2], start=1.0)
    with pytest.raises(ArgumentError, match="a recorded training; got"):
        Replay("training")


def test_a_training_without_weight_decay_is_walked_and_repeated_too():
    """Its prior precision is 0, which only recipes have no minimum with."""
    model, data, training = recorded(decay=0.0)
    posterior = engram.laplace(model, data, training=training, progress=False)
    result = engram.sensitivities(model, data, posterior, progress=False)
    quiet = {"progress": False}
    for train in (training, FromStart(fit, net)):
        assert engram.certify(model, data, result, train=train, refits=8, **quiet).loo_nll > 0
        check = engram.verify(model, data, result, train=train, sample=6, **quiet)
        assert check.deterministic
        again = engram.refine(model, data, result, posterior, indices=CHOSEN, train=train, **quiet)
        assert int((again.obtained > 0).sum()) == len(CHOSEN)
    with pytest.raises(ArgumentError, match=r"positive prior precision.*0 for all"):
        engram.verify(model, data, result, train="newton", sample=6, **quiet)
