"""The tracker as a Lightning callback."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import nn

from engram.core.arguments import whole
from engram.core.data.batches import Data
from engram.core.optional import require
from engram.tracking.tracker import Tracker

if TYPE_CHECKING:
    Callback = object
else:
    Callback = require("lightning.pytorch", "lightning").Callback


class TrackerCallback(Callback):
    """Estimates at the end of epochs, or streams; its history is part of Lightning's checkpoints.

    Logged for loggers and other callbacks: ``loo_nll`` and ``train_nll``.

    Args:
        data: the training data, in fixed order.
        model: picks the net out of the LightningModule; the module itself if not given.
        indices: picks the examples' indices out of a batch; given, every training step is
            streamed, and otherwise the data is gone through at the end of epochs.
        every: epochs between updates.
        stop: end the training when the tracker says so.
        settings: of :class:`engram.Tracker`.
    """

    def __init__(
        self,
        data: Data,
        *,
        model: Callable[[Any], nn.Module] | None = None,
        indices: Callable[[Any], Any] | None = None,
        every: int = 1,
        stop: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__()
        every = whole("every", every)
        self.data, self.model, self.indices = data, model, indices
        self.every, self.stop, self.settings = every, stop, settings
        self.tracker: Tracker | None = None
        self._state: dict[str, Any] | None = None
        self._step = ExitStack()
        self._before = 0  # epochs of earlier calls of fit with this callback

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """The optimizers exist now."""
        if self.tracker is not None and self.tracker.optimizer is trainer.optimizers[0]:
            return
        model = pl_module if self.model is None else self.model(pl_module)
        state = self._state if self.tracker is None else self.tracker.state_dict()
        self.tracker = Tracker(model, _plain(trainer.optimizers[0]), self.data, **self.settings)
        if state is not None:
            self.tracker.load_state_dict(state)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """A fit that counts from 0 once more goes on in the history where the last one ended."""
        assert self.tracker is not None
        self._before = max(0, self.tracker.history.number(None) - trainer.current_epoch)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """A streamed step begins."""
        if self.indices is not None and self.tracker is not None:
            step = self.tracker.step(
                self.indices(batch),
                scale=1 / trainer.accumulate_grad_batches,  # Lightning divides the loss by it
                epoch=self._before + trainer.current_epoch,
            )
            self._step.enter_context(step)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """The streamed step has its gradients, and the weights have not moved yet."""
        self._step.close()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A batch that Lightning skipped has no backward pass: its step is forgotten."""
        if self.tracker is not None:
            self.tracker.leave_step()
        self._step.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave a step that did not come to its end, without judging it."""
        self._step.__exit__(type(exception), exception, exception.__traceback__)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Update, log and stop."""
        if self.tracker is None or (trainer.current_epoch + 1) % self.every:
            return
        number = self._before + trainer.current_epoch
        if self.indices is None:
            self.tracker.update(step=number)
        else:
            self.tracker.finish_epoch(step=number)
        record = self.tracker.history.records[-1]
        pl_module.log_dict({"loo_nll": record.estimate, "train_nll": record.train})
        if self.stop and self.tracker.should_stop:
            trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        """The tracker's state, for Lightning's checkpoint."""
        return {} if self.tracker is None else self.tracker.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state of a checkpoint until the tracker is made, with the optimizers."""
        self._state = state_dict or None


def _plain(optimizer: Any) -> Any:
    """The optimizer inside Lightning's or Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
