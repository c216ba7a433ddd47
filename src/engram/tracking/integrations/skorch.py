"""The tracker as a skorch callback."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from engram.core.arguments import whole
from engram.core.data.batches import Data
from engram.core.optional import require
from engram.errors import ArgumentError
from engram.tracking.tracker import Tracker

if TYPE_CHECKING:
    Callback = object
else:
    Callback = require("skorch.callbacks", "skorch").Callback


class TrackerCallback(Callback):
    """Estimates at the end of epochs: ``loo_nll`` and ``train_nll`` stand in ``net.history``.

    Other callbacks that come after it can follow them: ``EarlyStopping(monitor="loo_nll")``, with
    ``train_split=None``, stops without validation data.

    Args:
        data: the training data, in fixed order; what the net is fitted to if not given.
        every: epochs between updates; between them the last estimate is repeated.
        stop: end the training when the tracker says so.
        settings: of :class:`engram.Tracker`.
    """

    def __init__(
        self,
        data: Data | None = None,
        every: int = 1,
        stop: bool = False,
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.data, self.every, self.stop, self.settings = data, every, stop, settings

    def initialize(self) -> TrackerCallback:
        """A net that is initialised again begins a new history."""
        whole("every", self.every)
        self.tracker_: Tracker | None = None
        return self

    def on_epoch_begin(self, net: Any, dataset_train: Any = None, **kwargs: Any) -> None:
        """Module, optimizer and the data of the training are known now."""
        if self.tracker_ is None or self.tracker_.optimizer is not net.optimizer_:
            _check_logits(net)
            data = dataset_train if self.data is None else self.data
            self.tracker_ = Tracker(net.module_, net.optimizer_, data, **(self.settings or {}))

    def on_epoch_end(self, net: Any, **kwargs: Any) -> None:
        """Update, record and stop."""
        assert self.tracker_ is not None
        epoch = len(net.history)
        if (epoch - 1) % self.every == 0:
            self.tracker_.update(step=epoch)
        latest = self.tracker_.history.records[-1]
        net.history.record("loo_nll", latest.estimate)
        net.history.record("train_nll", latest.train)
        if self.stop and self.tracker_.should_stop:
            raise KeyboardInterrupt  # which is how skorch's callbacks end a training

    def on_train_end(self, net: Any, **kwargs: Any) -> None:
        """Take everything off the module and the optimizer; the history stays."""
        if self.tracker_ is not None:
            self.tracker_.close()


def _check_logits(net: Any) -> None:
    """A likelihood is about logits; with NLLLoss skorch's modules give probabilities."""
    if isinstance(net.criterion_, nn.NLLLoss):
        raise ArgumentError(
            "a module that gives logits, with criterion=torch.nn.CrossEntropyLoss",
            "NLLLoss, for which skorch's modules give probabilities",
            "leave the softmax out of the module, and pass criterion=nn.CrossEntropyLoss",
        )
