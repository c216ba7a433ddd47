"""The net is followed while it trains."""

import pytest

from engram.demo.digits import Settings, digits, network, outputs
from engram.demo.findings import follow, loss_with_flips, tracker_of

SETTINGS = Settings(num_train=200, hidden=6, prior_precision=3.0, epochs=60)


def test_estimates_stand_beside_what_was_measured():
    data, model = digits(SETTINGS), network(SETTINGS)
    tracker = tracker_of(model, data, SETTINGS)
    moments = list(follow(tracker, data, SETTINGS, 20))
    assert [moment.epoch for moment in moments] == [20, 40, 60]
    frame = tracker.history.to_frame()
    assert [moment.estimated for moment in moments] == frame["estimate"].tolist()
    logits = outputs(model, data.test_inputs)
    assert moments[-1].measured == pytest.approx(loss_with_flips(logits, data.test_labels, 0.05))
    assert moments[-1].train < moments[0].train
