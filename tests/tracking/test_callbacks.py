"""The tracker inside the loops of other libraries, and TensorBoard, each the real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import engram
from engram.core.optional import require
from engram.errors import ArgumentError, MissingExtraError
from engram.tracking.index_check import Indexed

NUM_DATA = 12


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_DATA, 4, generator=generator)
    return x, (x[:, 0] > 0).long()


def test_a_library_that_is_missing_is_named_with_its_extra() -> None:
    with pytest.raises(MissingExtraError, match=r"pip install it.*extra 'thing'"):
        require("no_such_library.part", "thing")


def lightning_run(folder: Path, callback: Any, epochs: int, accumulate: int = 1, **fit: Any) -> Any:
    pl = pytest.importorskip("lightning.pytorch")

    class Net(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.net(x)
            return output

        def training_step(self, batch: Any, number: int) -> Tensor:
            *_, x, y = batch
            return functional.cross_entropy(self(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.05, weight_decay=0.01)

    loader = DataLoader(Indexed(data()), batch_size=4)
    trainer = pl.Trainer(
        max_epochs=epochs,
        accumulate_grad_batches=accumulate,
        accelerator="cpu",
        logger=False,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback, pl.callbacks.ModelCheckpoint(folder, filename="last", save_last=True)],
    )
    trainer.fit(Net(), loader, **fit)
    return trainer


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_lightning_resumes_with_the_same_history(
    tmp_path: Path, streamed: bool, kept: bool
) -> None:
    pytest.importorskip("lightning.pytorch")
    from engram.tracking.integrations.lightning import TrackerCallback

    def callback(name: str = "scores") -> TrackerCallback:
        indices = (lambda batch: batch[0]) if streamed else None
        folder = tmp_path / name if kept else None
        return TrackerCallback(data(), indices=indices, folder=folder)

    whole = callback("whole scores")
    lightning_run(tmp_path / "whole", whole, 4)
    lightning_run(tmp_path / "parts", callback(), 2)
    second = callback()
    trainer = lightning_run(
        tmp_path / "parts", second, 4, ckpt_path=tmp_path / "parts" / "last.ckpt"
    )
    assert whole.tracker is not None
    assert second.tracker is not None
    expected, found = whole.tracker.history.to_frame(), second.tracker.history.to_frame()
    assert list(found.index) == [0, 1, 2, 3]
    assert found["estimate"].tolist() == pytest.approx(expected["estimate"].tolist(), rel=1e-6)
    assert float(trainer.callback_metrics["loo_nll"]) == pytest.approx(found["estimate"].iloc[-1])
    assert found["streamed"].all() == streamed


def test_lightning_streams_with_accumulated_batches(tmp_path: Path) -> None:
    pytest.importorskip("lightning.pytorch")
    from engram.tracking.integrations.lightning import TrackerCallback

    callback = TrackerCallback(data(), indices=lambda batch: batch[0])
    lightning_run(tmp_path, callback, 2, accumulate=3)
    assert callback.tracker is not None
    assert callback.tracker.history.to_frame().index.tolist() == [0, 1]


@pytest.mark.parametrize("streamed", [False, True])
def test_lightning_records_by_itself(tmp_path: Path, streamed: bool) -> None:
    pytest.importorskip("lightning.pytorch")
    from engram.tracking.integrations.lightning import TrackerCallback

    callback = TrackerCallback(data(), indices=(lambda batch: batch[0]) if streamed else None)
    trainer = lightning_run(tmp_path, callback, 4)
    assert callback.tracker is not None
    training = callback.tracker.training
    assert training is not None
    assert training.num_steps == trainer.global_step == 12
    named = training.of(trainer.lightning_module)
    assert named.segments(2)[-1].end == 12
    assert (named.visits is not None) == streamed
    if named.visits is not None:
        assert named.visits.count.tolist() == [4] * NUM_DATA


def test_lightning_holds_examples_out_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("lightning.pytorch")
    from engram.tracking.integrations.lightning import TrackerCallback

    def callback() -> TrackerCallback:
        return TrackerCallback(data(), indices=lambda batch: batch[0], held_out=4)

    whole, second = callback(), callback()
    lightning_run(tmp_path / "whole", whole, 4)
    lightning_run(tmp_path / "parts", callback(), 2)
    lightning_run(tmp_path / "parts", second, 4, ckpt_path=tmp_path / "parts" / "last.ckpt")
    assert whole.tracker is not None
    assert second.tracker is not None
    expected, found = whole.tracker.history.to_frame(), second.tracker.history.to_frame()
    assert found["estimate"].tolist() == pytest.approx(expected["estimate"].tolist(), rel=1e-5)
    untold = TrackerCallback(data(), held_out=4)
    with pytest.raises(ArgumentError, match="every step of the training inside"):
        lightning_run(tmp_path / "untold", untold, 1)


def test_lightning_stops_when_the_tracker_says_so(tmp_path: Path) -> None:
    pytest.importorskip("lightning.pytorch")
    from engram.tracking.integrations.lightning import TrackerCallback

    callback = TrackerCallback(data(), stop=True, patience=1, prior_precision=1e-3)
    trainer = lightning_run(tmp_path, callback, 300)
    assert callback.tracker is not None
    assert callback.tracker.should_stop
    assert trainer.current_epoch < 300


def transformers_run(
    folder: Path, callback: Any, epochs: int, resume: bool | str | None = None, **settings: Any
) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.DistilBertConfig(
        vocab_size=20, dim=8, n_layers=1, n_heads=2, hidden_dim=8, num_labels=2, dropout=0.0,
        attention_dropout=0.0, seq_classif_dropout=0.0, max_position_embeddings=8,
    )  # fmt: skip
    model = transformers.DistilBertForSequenceClassification(config)
    words = torch.randint(0, 20, (NUM_DATA, 6), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": w, "labels": y} for w, y in zip(words, data()[1], strict=True)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), num_train_epochs=epochs, per_device_train_batch_size=4,
        save_strategy="epoch", use_cpu=True, disable_tqdm=True, seed=0,
        lr_scheduler_type="constant", **{"report_to": [], **settings},
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
    callback.attach(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_transformers_resumes_with_the_same_history(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers.Trainer needs it")
    from engram.tracking.integrations.transformers import TrackerCallback

    whole = TrackerCallback(prior_precision=1.0)
    trainer = transformers_run(tmp_path / "whole", whole, 3)
    logged = [entry["loo_nll"] for entry in trainer.state.log_history if "loo_nll" in entry]
    transformers_run(tmp_path / "parts", TrackerCallback(prior_precision=1.0), 2)
    second = TrackerCallback(prior_precision=1.0)
    transformers_run(tmp_path / "parts", second, 3, resume=True)
    assert whole.tracker is not None
    assert second.tracker is not None
    expected, found = whole.tracker.history.to_frame(), second.tracker.history.to_frame()
    assert list(found.index) == [1, 2, 3]
    assert expected["estimate"].tolist() == pytest.approx(logged)
    assert found["estimate"].tolist() == pytest.approx(expected["estimate"].tolist(), rel=1e-5)
    checkpoint = max((tmp_path / "parts").glob("checkpoint-*"))
    elsewhere = TrackerCallback(prior_precision=1.0, checkpoint=checkpoint)
    transformers_run(tmp_path / "elsewhere", elsewhere, 4, resume=str(checkpoint))
    assert elsewhere.tracker is not None
    assert elsewhere.tracker.history.to_frame().index.tolist() == [1, 2, 3, 4]


def test_transformers_records_by_itself(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers.Trainer needs it")
    from engram.tracking.integrations.transformers import TrackerCallback

    callback = TrackerCallback(prior_precision=1.0)
    trainer = transformers_run(tmp_path, callback, 2)
    assert callback.tracker is not None
    training = callback.tracker.training
    assert training is not None
    assert training.num_steps == trainer.state.global_step == 6
    assert training.of(trainer.model).segments(1)[0].end == 6


def test_transformers_in_mixed_precision_tells_its_loggers(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers.Trainer needs it")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from engram.tracking.integrations.transformers import TrackerCallback

    callback = TrackerCallback(prior_precision=1.0)
    transformers_run(
        tmp_path, callback, 2, bf16=True, report_to=["tensorboard"], logging_strategy="epoch"
    )
    assert callback.tracker is not None
    assert all(record.finite for record in callback.tracker.history)
    (events,) = tmp_path.glob("**/events.out*")
    seen = EventAccumulator(str(events)).Reload().Tags()["scalars"]
    assert {"train/loo_nll", "train/train_nll", "train/loss"} <= set(seen)


def test_tensorboard_has_the_losses(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=0.1)
    tracker = engram.Tracker(model, optimizer, TensorDataset(*data()), validation=data())
    with SummaryWriter(str(tmp_path)) as writer:
        tracker.to_tensorboard(writer)
        for step in range(3):
            functional.cross_entropy(model(data()[0]), data()[1]).backward()
            optimizer.step()
            tracker.update(step=step)
    events = EventAccumulator(str(tmp_path), size_guidance={"histograms": 0}).Reload()
    frame = tracker.history.to_frame()
    for name, column in {"loo_nll": "estimate", "validation_nll": "validation"}.items():
        written = [event.value for event in events.Scalars(f"engram/{name}")]
        assert written == pytest.approx(frame[column].tolist(), rel=1e-6)
    assert len(events.Histograms("engram/score")) == 3
    with pytest.raises(ArgumentError, match="SummaryWriter"):
        tracker.to_tensorboard("folder")
