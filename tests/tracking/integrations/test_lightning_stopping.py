"""Lightning's own early stopping, on our estimate and without validation data."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

pl = pytest.importorskip("lightning.pytorch")


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, number):
        x, y = batch
        return functional.cross_entropy(self(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1, weight_decay=0.01)


def test_early_stopping_monitors_loo_nll(tmp_path):
    from lightning.pytorch.callbacks import EarlyStopping

    from engram.tracking.integrations.lightning import TrackerCallback

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 4, generator=generator)
    y = (x[:, 0] + torch.randn(40, generator=generator) > 0).long()
    tracking = TrackerCallback((x, y))
    stopping = EarlyStopping(monitor="loo_nll", patience=3, check_on_train_epoch_end=True)
    trainer = pl.Trainer(
        max_epochs=100,
        accelerator="cpu",
        logger=False,
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[tracking, stopping],
    )
    trainer.fit(Net(), DataLoader(TensorDataset(x, y), batch_size=10))
    estimates = [record.estimate for record in tracking.tracker.history.records]
    assert 3 < len(estimates) < 100
    assert stopping.stopped_epoch == len(estimates) - 1
    assert float(stopping.best_score) == pytest.approx(min(estimates), rel=1e-5)
