"""The tracker as a callback of ``transformers.Trainer``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from engram.batches import Data
from engram.errors import ArgumentError
from engram.tracking.extras import require
from engram.tracking.tracker import Tracker

if TYPE_CHECKING:
    TrainerCallback = object
else:
    TrainerCallback = require("transformers", "transformers").TrainerCallback

FOLDER = "engram"  # inside a checkpoint


class TrackerCallback(TrainerCallback):
    """Estimates at the end of epochs; its history is saved with the trainer's checkpoints.

    ``loo_nll`` and ``train_nll`` go to the trainer's log history. The usual trainer has two
    parameter groups with different weight decays, so give a ``prior_precision``.

    Args:
        data: the training data, in fixed order; the trainer's own if not given.
        every: epochs between updates.
        stop: end the training when the tracker says so.
        settings: of :class:`engram.Tracker`.
    """

    def __init__(
        self, data: Data | None = None, *, every: int = 1, stop: bool = False, **settings: Any
    ) -> None:
        if every < 1:
            raise ArgumentError("every to be at least 1", repr(every), "use every=1")
        self.data, self.every, self.stop, self.settings = data, every, stop, settings
        self.tracker: Tracker | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Model, optimizer and loader exist now; a resumed run finds its history."""
        data = self.data
        if data is None:
            loader = parts["train_dataloader"]
            data = DataLoader(
                loader.dataset,
                batch_size=args.per_device_train_batch_size,
                collate_fn=loader.collate_fn,
            )
        optimizer = parts["optimizer"]
        plain = getattr(optimizer, "optimizer", optimizer)
        self.tracker = Tracker(parts["model"], plain, data, **self.settings)
        saved = _checkpoint(args, state) / FOLDER
        if state.global_step > 0 and saved.is_dir():
            self.tracker.resume(saved)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Update, log and stop."""
        epoch = round(state.epoch)
        if self.tracker is None or epoch % self.every:
            return
        self.tracker.update(step=epoch)
        record = self.tracker.history.records[-1]
        entry = {"loo_nll": record.estimate, "train_nll": record.train}
        state.log_history.append({**entry, "epoch": state.epoch, "step": state.global_step})
        if self.stop and self.tracker.should_stop:
            control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Beside the weights of the checkpoint."""
        if self.tracker is not None and len(self.tracker.history):
            self.tracker.save(_checkpoint(args, state) / FOLDER)


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
