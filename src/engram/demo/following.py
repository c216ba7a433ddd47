"""The net while it trains: the test loss as a tracker estimates it, beside the measured one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

import engram
from engram.demo.digits import Digits
from engram.demo.findings import loss_with_flips
from engram.demo.settings import Settings
from engram.demo.training import adam, outputs, train


@dataclass(frozen=True)
class Moment:
    """One look at the net; losses in nats per example.

    Args:
        epoch: of the training.
        train: loss on the training data, with the labels as given.
        estimated: leave-one-out, from the training data alone.
        measured: on test data, labels flipped at the same rate.
        accuracy: on test data with their right labels.
    """

    epoch: int
    train: float
    estimated: float
    measured: float
    accuracy: float


def tracker_of(model: nn.Module, data: Digits, settings: Settings) -> engram.Tracker:
    """A tracker with the Kronecker-factored curvature of each moment.

    The whole training set is one batch here, so that Adam's own state holds the square of the
    mean gradient, which says nothing about the curvature near a minimum.
    """
    return engram.Tracker(
        model,
        adam(model, len(data.labels), settings),
        data.train,
        posterior="kronecker",
        prior_precision=settings.prior_precision,
    )


def follow(
    tracker: engram.Tracker, data: Digits, settings: Settings, every: int
) -> Iterator[Moment]:
    """Train the tracker's model, and look at it every so many epochs."""
    model = tracker.model
    losses = train(model, *data.train, settings, settings.epochs, tracker.optimizer)
    for epoch, _ in enumerate(losses, 1):
        if epoch % every:
            continue
        tracker.update(step=epoch)
        record = tracker.history.records[-1]
        logits = outputs(model, data.test_inputs)
        right = logits.argmax(1) == data.test_labels
        yield Moment(
            epoch=epoch,
            train=record.train,
            estimated=record.estimate,
            measured=loss_with_flips(logits, data.test_labels, settings.flipped_share),
            accuracy=float(right.float().mean()),
        )
