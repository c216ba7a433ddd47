"""Ordinary CNNs that a tracker follows with the training time it records.

BatchNorm, most with dropout, a few thousand images, a tenth of the labels wrong in training and
test data alike; five of the runs have no dropout and are trained until they overfit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional

import engram
from benchmarks.practical import data, nets
from benchmarks.practical.loop import Setting, Watcher, cosine, flipped
from benchmarks.practical.settings import adamw, sgd

RECORDED, SOME, WALK = "recorded", "recorded, 1,000 examples", "along the checkpoints"
NUM_SOME = 1000
FASHION = partial(data.fashion, 3000, data.uniform)
FEW_FASHION = partial(data.fashion, 2000, data.uniform)
CIFAR, FEW_CIFAR = partial(data.cifar, 3000, data.uniform), partial(data.cifar, 2000, data.uniform)


def adam(model: nn.Module) -> optim.Optimizer:
    """Adam with a coupled weight decay."""
    return optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-4)


@dataclass(frozen=True)
class NetRun:
    """A training, and the epochs after which it is looked at.

    Args:
        setting: net, data and optimizer.
        every: epochs between updates, and between those along the checkpoints.
        words: for the record.
    """

    setting: Setting
    every: tuple[int, int]
    words: str


def run(
    split: Callable[[], data.Split],
    net: Callable[[], nn.Module],
    optimizer: Callable[[nn.Module], optim.Optimizer],
    epochs: int,
    **given: Any,
) -> Setting:
    """A setting."""
    return Setting(split=split, net=net, optimizer=optimizer, epochs=epochs, **given)


FASHION_NET, CIFAR_NET = nets.fashion_cnn, nets.cifar_cnn
NETS: dict[str, NetRun] = {
    "fmnist-cnn-adamw": NetRun(
        run(FASHION, partial(FASHION_NET, 0.3), adamw(2e-3, 1e-2), 12), (2, 6), "AdamW"
    ),
    "fmnist-cnn-adam": NetRun(run(FASHION, partial(FASHION_NET, 0.3), adam, 12), (2, 6), "Adam"),
    "fmnist-cnn-sgd": NetRun(
        run(FASHION, partial(FASHION_NET, 0.3), sgd(0.05, 5e-4), 12, schedule=cosine),
        (2, 6),
        "SGD, momentum, cosine",
    ),
    "cifar-cnn-adamw": NetRun(
        run(CIFAR, partial(CIFAR_NET, 0.3), adamw(2e-3, 1e-2), 12, augment=flipped),
        (2, 12),
        "AdamW, images flipped at random",
    ),
    "fmnist-cnn-adamw-overfit": NetRun(
        run(FEW_FASHION, partial(FASHION_NET, 0.0), adamw(2e-3, 1e-2), 24), (2, 8), "AdamW"
    ),
    "fmnist-cnn-adam-overfit": NetRun(
        run(FEW_FASHION, partial(FASHION_NET, 0.0), adam, 24), (2, 8), "Adam"
    ),
    "fmnist-cnn-sgd-overfit": NetRun(
        run(FEW_FASHION, partial(FASHION_NET, 0.0), sgd(0.05, 5e-4), 24), (2, 8), "SGD, momentum"
    ),
    "cifar-cnn-adamw-overfit": NetRun(
        run(FEW_CIFAR, partial(CIFAR_NET, 0.0), adamw(2e-3, 1e-2), 14), (2, 14), "AdamW"
    ),
    "cifar-cnn-sgd-overfit": NetRun(
        run(FEW_CIFAR, partial(CIFAR_NET, 0.0), sgd(0.05, 5e-4), 14), (2, 14), "SGD, momentum"
    ),
}


class Followed(Watcher):
    """Trackers beside a training, and the test loss with as many wrong labels."""

    def __init__(self, followed: NetRun, split: data.Split) -> None:
        self.run, self.split = followed, split
        self.rows: list[dict[str, float]] = []
        self.seconds: dict[str, list[float]] = {}
        self.began, self.outside = time.process_time(), 0.0

    def started(self, optimizer: optim.Optimizer, model: nn.Module) -> None:
        settings: Mapping[str, dict[str, Any]] = {
            RECORDED: {},
            SOME: {"examples": NUM_SOME},
            WALK: {"estimator": "trajectory"},
        }
        self.trackers = {
            kind: engram.Tracker(model, optimizer, self.split.data, **given)
            for kind, given in settings.items()
        }
        self.began = time.process_time()

    def visited(self, indices: Tensor, outputs: Tensor) -> None:
        training = self.trackers[WALK].training
        assert training is not None
        training.visit(indices, outputs)

    def epoch_ended(self, epoch: int, model: nn.Module) -> None:
        entered = time.process_time()
        often, seldom = self.run.every
        chosen = [RECORDED, SOME] if epoch == 1 or epoch % often == 0 else []
        chosen += [WALK] if epoch == 1 or epoch % seldom == 0 else []
        if chosen:
            row = {"epoch": float(epoch)} | _tested(model, self.split)
            for kind in chosen:
                row |= self._updated(kind, epoch)
            self.rows.append(row)
        self.outside += time.process_time() - entered

    def _updated(self, kind: str, epoch: int) -> dict[str, float]:
        began = time.process_time()
        result = self.trackers[kind].update(step=epoch)
        self.seconds.setdefault(kind, []).append(time.process_time() - began)
        assert result is not None
        found = {f"estimate {kind}": self.trackers[kind].history.records[-1].estimate}
        return found if kind == SOME else found | {"train": result.train_nll}


def _tested(model: nn.Module, split: data.Split) -> dict[str, float]:
    model.eval()
    with torch.no_grad():
        outputs = torch.cat([model(part) for part in split.test_inputs.split(1000)])
    model.train()
    return {
        "test": float(functional.cross_entropy(outputs, split.test_given)),
        "accuracy": float((outputs.argmax(1) == split.test_right).float().mean()),
    }


def follow_net(name: str, seed: int) -> dict[str, Any]:
    """Train one of the nets and look at it; costs are processor time in epochs."""
    followed = NETS[name]
    split = followed.setting.split()
    watcher = Followed(followed, split)
    followed.setting.train(seed, watcher)
    epochs = followed.setting.epochs
    epoch = (time.process_time() - watcher.began - watcher.outside) / epochs
    return {
        "settings": {
            "epochs": epochs,
            "num_data": len(split.given),
            "optimizer": followed.words,
            "batch_size": followed.setting.batch_size,
        },
        "rows": watcher.rows,
        "cost": {kind: sum(s) / len(s) / epoch for kind, s in watcher.seconds.items()},
    }
