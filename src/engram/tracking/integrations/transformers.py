"""The tracker as a callback of ``transformers.Trainer``."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from engram.core.arguments import whole
from engram.core.data.batches import Data
from engram.core.optional import require
from engram.tracking.tracker import Tracker

if TYPE_CHECKING:
    TrainerCallback = object
else:
    TrainerCallback = require("transformers", "transformers").TrainerCallback

FOLDER = "engram"  # inside a checkpoint


class TrackerCallback(TrainerCallback):
    """Estimates at the end of epochs; its history is saved with the trainer's checkpoints.

    ``loo_nll`` and ``train_nll`` go to the trainer's log history, and with :meth:`attach` to its
    loggers too. The usual trainer has two parameter groups with different weight decays, so give a
    ``prior_precision``. Where it trains in mixed precision, the estimate is that of the weights in
    full precision.

    Args:
        data: the training data, in fixed order; the trainer's own if not given.
        every: epochs between updates.
        stop: end the training when the tracker says so.
        checkpoint: the folder that the run resumes from, where it is not in ``output_dir``.
        settings: of :class:`engram.Tracker`.
    """

    def __init__(
        self,
        data: Data | None = None,
        *,
        every: int = 1,
        stop: bool = False,
        checkpoint: str | Path | None = None,
        **settings: Any,
    ) -> None:
        every = whole("every", every)
        self.data, self.every, self.stop, self.settings = data, every, stop, settings
        self.checkpoint = checkpoint
        self.tracker: Tracker | None = None
        self.trainer: Any = None

    def attach(self, trainer: Any) -> TrackerCallback:
        """Join a ``transformers.Trainer``; its loggers get the numbers of every update."""
        trainer.add_callback(self)
        self.trainer = trainer
        return self

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
        if state.global_step > 0:
            self._resume(self.tracker, args, state)

    def _resume(self, tracker: Tracker, args: Any, state: Any) -> None:
        given = (self.checkpoint, args.resume_from_checkpoint)
        named = [Path(place) for place in given if isinstance(place, (str, Path))]
        places = [place / FOLDER for place in (*named, _checkpoint(args, state))]
        saved = next((place for place in places if place.is_dir()), None)
        if saved is not None:
            tracker.resume(saved)
            return
        warnings.warn(
            f"the run resumes, but there is no history in {', '.join(map(str, places))}; it starts "
            "anew. Name the folder that the run resumes from with TrackerCallback(checkpoint=...)",
            stacklevel=2,
        )

    def on_epoch_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Update, log and stop."""
        epoch = round(state.epoch)
        if self.tracker is None or epoch % self.every:
            return
        self.tracker.update(step=epoch)
        record = self.tracker.history.records[-1]
        self._log({"loo_nll": record.estimate, "train_nll": record.train}, state, control)
        if self.stop and self.tracker.should_stop:
            control.should_training_stop = True

    def _log(self, entry: dict[str, float], state: Any, control: Any) -> None:
        if self.trainer is None:
            state.log_history.append({**entry, "epoch": state.epoch, "step": state.global_step})
            return
        wanted = control.should_log
        self.trainer.log(entry)
        control.should_log = wanted  # this entry does not stand for the trainer's own

    def on_save(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Save the tracker beside the weights of the checkpoint."""
        if self.tracker is not None:
            self.tracker.save(_checkpoint(args, state) / FOLDER)


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
