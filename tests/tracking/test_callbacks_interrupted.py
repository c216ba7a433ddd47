"""Callbacks in trainings that skip batches, stop with an exception, or are told of too little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import engram
from engram.errors import ModelMismatchError
from engram.tracking.index_check import Indexed
from streamed import BATCH, NUM_DATA, backward, build, data

pl = pytest.importorskip("lightning.pytorch")
SKIPPED, BROKEN = 1, 4  # numbers of training steps


class Net(pl.LightningModule):  # type: ignore[misc, name-defined]
    """Skips one batch, and fails at another if asked to."""

    def __init__(self, error: type[BaseException] | None = None, optimizers: int = 1) -> None:
        super().__init__()
        self.net, _ = build()
        self.error, self.count, self.optimizers_wanted = error, 0, optimizers

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.net(x)
        return output

    def training_step(self, batch: Any, number: int) -> Tensor | None:
        _, x, y = batch
        self.count += 1
        loss = functional.cross_entropy(self(x), y)
        if self.count == BROKEN and self.error is not None:
            raise self.error
        return None if self.count == SKIPPED + 1 else loss

    def configure_optimizers(self) -> Any:
        settings = {"lr": 0.05, "weight_decay": 0.01}
        parts = self.net if self.optimizers_wanted == 1 else self.net[0]
        return torch.optim.Adam(parts.parameters(), **settings)


def fitted(model: Net, callback: Any, folder: Path) -> None:
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    trainer.fit(model, DataLoader(Indexed(data()), batch_size=BATCH))


def callback(**settings: Any) -> Any:
    from engram.tracking.integrations.lightning import TrackerCallback

    return TrackerCallback(data(), indices=lambda batch: batch[0], **settings)


def untouched(model: Net) -> bool:
    return not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_batch_that_is_skipped_is_not_visited(tmp_path: Path) -> None:
    model, watching = Net(), callback()
    fitted(model, watching, tmp_path)
    assert watching.tracker is not None
    assert watching.tracker.history.to_frame()["examples"].tolist() == [BATCH, NUM_DATA]
    assert untouched(model)


def test_a_second_fit_goes_on_in_the_history(tmp_path: Path) -> None:
    model, watching = Net(), callback()
    fitted(model, watching, tmp_path)
    fitted(model, watching, tmp_path)
    assert watching.tracker is not None
    assert watching.tracker.history.to_frame().index.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_training_that_breaks_leaves_nothing_and_can_go_on(
    tmp_path: Path, error: type[BaseException]
) -> None:
    model, watching = Net(error), callback()
    with pytest.raises((error, SystemExit)):
        fitted(model, watching, tmp_path)
    assert untouched(model)
    assert torch.overrides._get_current_function_mode() is None
    assert watching.tracker is not None
    before = len(watching.tracker.history)
    fitted(model, watching, tmp_path)
    assert watching.tracker is not None
    assert len(watching.tracker.history) == before + 2
    assert untouched(model)


def test_an_optimizer_of_some_parameters_is_not_taken_for_that_of_all(tmp_path: Path) -> None:
    with pytest.raises(ModelMismatchError, match=r"without net\.2\.weight"):
        fitted(Net(optimizers=2), callback(), tmp_path)


def test_a_listener_that_fails_loses_nothing() -> None:
    model, optimizer = build()
    tracker = engram.Tracker(model, optimizer, data())

    def full(record: Any, scores: Tensor) -> None:
        raise OSError("disk full")

    tracker.listeners.append(full)
    for batch in torch.arange(NUM_DATA).split(BATCH)[:-1]:
        with tracker.step(batch):
            backward(model, batch)
        optimizer.step()
    with pytest.raises(OSError, match="disk full"), tracker.step(torch.arange(16, 24)):
        backward(model, torch.arange(16, 24))
    assert len(tracker.history) == 1
    assert tracker.last_epoch is not None
    assert tracker.last_epoch.seen == NUM_DATA
    with pytest.raises(OSError, match="disk full"):
        tracker.update()
    assert len(tracker.history) == 2
    tracker.listeners.clear()
    assert tracker.update() is not None
    assert isinstance(model, nn.Module)
