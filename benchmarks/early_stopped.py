"""Nets that were stopped early, against true trainings without every single example.

Truth: the same training again, from the same first weights with the same batches, in which the
loss of one example has weight 0; for all examples at once, as a stack of nets.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from scipy.stats import pearsonr, spearmanr
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

import engram
from benchmarks.data import data_file
from benchmarks.records import RESULTS, conditions, table, write
from benchmarks.timing import environment

NUM_DATA, BATCH_SIZE, WIDTH, CLASSES = 400, 40, 16, 10
WRONG = 0.05  # of the labels
SEEDS = (0, 1, 2)  # of examples, wrong labels, first weights and batches
# What is aimed at in every setting: Spearman and Pearson of the score, and the mean increase
BARS = {"along the training, full": (0.98, 0.97), "along the training, Kronecker": (0.96, 0.94)}
NEAR = 0.25  # of the true mean increase
PART = 100  # nets of a stack that are trained at a time: memory
Parameters = list[nn.Parameter]


@dataclass(frozen=True)
class Setting:
    """A training that ends before a minimum.

    Args:
        title: for the table.
        load: all images [M, I] and labels [M].
        optimizer: of the parameters.
        epochs: of training.
        cosine: whether the learning rate falls to 0 along a cosine.
    """

    title: str
    load: Callable[[], tuple[np.ndarray, np.ndarray]]
    optimizer: Callable[[Parameters], Optimizer]
    epochs: int
    cosine: bool = False

    def data(self, seed: int) -> tuple[Tensor, Tensor]:
        """Some of the examples, with some of the labels wrong."""
        images, labels = self.load()
        draw = np.random.default_rng(seed)
        chosen = draw.permutation(len(images))[:NUM_DATA]
        targets = labels[chosen].astype(np.int64)
        wrong = draw.random(NUM_DATA) < WRONG
        targets[wrong] = (targets[wrong] + draw.integers(1, CLASSES, wrong.sum())) % CLASSES
        return torch.tensor(images[chosen], dtype=torch.float64), torch.tensor(targets)

    def batches(self, seed: int) -> list[Tensor]:
        """Positions of the examples of every step."""
        generator = torch.Generator().manual_seed(seed)
        orders = [torch.randperm(NUM_DATA, generator=generator) for _ in range(self.epochs)]
        return [batch for order in orders for batch in order.split(BATCH_SIZE)]


def _digits() -> tuple[np.ndarray, np.ndarray]:
    images, labels = load_digits(return_X_y=True)
    return images / 16, labels


def _pooled(name: str) -> tuple[np.ndarray, np.ndarray]:
    with np.load(data_file(name)) as arrays:
        images, labels = arrays["x_train"][:20_000] / 255, arrays["y_train"][:20_000]
    return images.reshape(-1, 14, 2, 14, 2).mean((2, 4)).reshape(len(images), -1), labels


def _sgd(decay: float) -> Callable[[Parameters], Optimizer]:
    return lambda p: SGD(p, lr=0.05, momentum=0.9, weight_decay=decay / NUM_DATA)


def _adam(rate: float, decay: float) -> Callable[[Parameters], Optimizer]:
    return lambda p: Adam(p, lr=rate, weight_decay=decay / NUM_DATA)


SETTINGS: dict[str, Setting] = {
    "sgd-5": Setting("digits, SGD with momentum, 5 epochs", _digits, _sgd(0.0), 5),
    "sgd-80": Setting("digits, SGD with momentum, 80 epochs, delta 0.1", _digits, _sgd(0.1), 80),
    "adam-80": Setting("digits, Adam, 80 epochs, delta 0.1", _digits, _adam(3e-3, 0.1), 80),
    "mnist": Setting(
        "MNIST, Adam, 40 epochs, delta 0.1", lambda: _pooled("mnist.npz"), _adam(3e-3, 0.1), 40
    ),
    "fashion": Setting(
        "Fashion-MNIST, Adam, 15 epochs, cosine",
        lambda: _pooled("fmnist.npz"),
        _adam(5e-3, 0.0),
        15,
        cosine=True,
    ),
}


def net(inputs: int, seed: int) -> nn.Sequential:
    """The untrained net."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = nn.Linear(inputs, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)
        return nn.Sequential(*layers).double()


def steps(
    setting: Setting, optimizer: Optimizer, seed: int, loss: Callable[[Tensor], Tensor]
) -> None:
    """The training loop, with a loss of the positions of a batch."""
    batches = setting.batches(seed)
    schedule = CosineAnnealingLR(optimizer, len(batches)) if setting.cosine else None
    for batch in batches:
        optimizer.zero_grad()
        loss(batch).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()


def trained(setting: Setting, seed: int) -> tuple[nn.Sequential, engram.Training]:
    """The net with all examples, and the record of its training."""
    x, y = setting.data(seed)
    model = net(x.shape[1], seed)
    optimizer = setting.optimizer(list(model.parameters()))
    training = engram.record(optimizer, model)
    steps(setting, optimizer, seed, lambda batch: cross_entropy(model(x[batch]), y[batch]))
    training.stop()
    return model, training


def outputs_without(setting: Setting, seed: int, left_out: Tensor) -> Tensor:
    """Outputs [M, K] of each example of the net that was trained without it."""
    x, y = setting.data(seed)
    first = net(x.shape[1], seed)
    stack = [
        nn.Parameter(p.detach().repeat(len(left_out), *[1] * p.dim())) for p in first.parameters()
    ]

    def outputs(inputs: Tensor) -> Tensor:
        hidden = torch.tanh(torch.baddbmm(stack[1][:, None], inputs, stack[0].mT))
        return torch.baddbmm(stack[3][:, None], hidden, stack[2].mT)

    def loss(batch: Tensor) -> Tensor:
        found = outputs(x[batch].expand(len(left_out), -1, -1))
        each = cross_entropy(found.flatten(0, 1), y[batch].repeat(len(left_out)), reduction="none")
        kept = batch[None, :] != left_out[:, None]
        return (each.view(kept.shape) * kept).sum() / len(batch)

    steps(setting, setting.optimizer(stack), seed, loss)
    with torch.no_grad():
        return outputs(x[left_out][:, None])[:, 0]


@dataclass(frozen=True)
class Truth:
    """What leaving each example out does: L1 norm of its prediction's change, and of its loss."""

    score: Tensor
    increase: Tensor


def truth(setting: Setting, seed: int, model: nn.Module) -> Truth:
    """True trainings without every example."""
    x, y = setting.data(seed)
    parts = torch.arange(NUM_DATA).split(PART)
    without = torch.cat([outputs_without(setting, seed, part) for part in parts])
    with torch.no_grad():
        found = model(x)
    score = (without.softmax(1) - found.softmax(1)).abs().sum(1)
    losses = [cross_entropy(f, y, reduction="none") for f in (without, found)]
    return Truth(score, losses[0] - losses[1])


def _estimated(
    model: nn.Module, data: tuple[Tensor, Tensor], training: engram.Training | None, **how: str
) -> engram.Result:
    estimator = how.pop("estimator", "auto")
    posterior = engram.laplace(model, data, training=training, progress=False, **how)
    return engram.sensitivities(model, data, posterior, estimator=estimator, progress=False)


WAYS: dict[str, Callable[..., engram.Result]] = {
    "without the record": lambda m, d, t: _estimated(m, d, None),
    "without the record, Kronecker": lambda m, d, t: _estimated(m, d, None, structure="kronecker"),
    "training time, full": lambda m, d, t: _estimated(
        m, d, t, structure="full", estimator="corrected"
    ),
    "training time, Kronecker": lambda m, d, t: _estimated(
        m, d, t, structure="kronecker", estimator="linear"
    ),
    "along the training, full": lambda m, d, t: _estimated(m, d, t, structure="full"),
    "along the training, Kronecker": lambda m, d, t: _estimated(m, d, t, structure="kronecker"),
}


def compared(result: engram.Result, true: Truth) -> dict[str, float]:
    """Correlations with the truth, and the estimated mean increase over the true one."""
    increase = result.loo_loss - result.loss
    return {
        "spearman": float(spearmanr(result.score, true.score)[0]),
        "pearson": float(pearsonr(result.score, true.score)[0]),
        "increase": float(pearsonr(increase, true.increase)[0]),
        "ratio": float(increase.mean() / true.increase.mean()),
    }


def measure(setting: Setting, seed: int) -> dict[str, Any]:
    """All ways on one training."""
    model, training = trained(setting, seed)
    data = setting.data(seed)
    true = truth(setting, seed, model)
    found: dict[str, Any] = {"ways": {}, "seconds": {}}
    for name, way in WAYS.items():
        start = time.perf_counter()
        result = way(model, data, training)
        found["seconds"][name] = time.perf_counter() - start
        found["ways"][name] = compared(result, true)
    found |= {"loss": float(result.loss.mean()), "true increase": float(true.increase.mean())}
    return found


def cell(runs: list[dict[str, Any]], way: str) -> str:
    """Spearman / Pearson and the ratio of means, averages over the seeds and the spread."""
    lines = [run["ways"][way] for run in runs]
    spearman, pearson, ratio = (
        [line[k] for line in lines] for k in ("spearman", "pearson", "ratio")
    )
    spread = f"{min(ratio):.2f}-{max(ratio):.2f}"
    return f"{mean(spearman):.3f} / {mean(pearson):.3f}, {mean(ratio):.2f}x ({spread})"


def missed(runs: dict[str, Any]) -> str:
    """Where the averages over the seeds stay below what is aimed at, in words."""
    found = []
    for way, bars in BARS.items():
        for name, lines in runs.items():
            spearman, pearson, ratio = (
                mean(run["ways"][way][k] for run in lines) for k in ("spearman", "pearson", "ratio")
            )
            if spearman < bars[0] or pearson < bars[1] or abs(ratio - 1) > NEAR:
                found.append(
                    f"- {way}, {SETTINGS[name].title}: {spearman:.3f} / {pearson:.3f}, {ratio:.2f}x"
                )
    return "\n".join(found) or "- nowhere"


def page(record: dict[str, Any]) -> str:
    """The Markdown page."""
    runs = record["settings"]
    header = ["way", *(SETTINGS[name].title for name in runs)]
    rows = [[way, *(cell(runs[name], way) for name in runs)] for way in WAYS]
    losses = ", ".join(
        f"{SETTINGS[name].title}: training loss {mean(r['loss'] for r in found):.2f}, true mean "
        f"increase {mean(r['true increase'] for r in found):.3f}"
        for name, found in runs.items()
    )
    return f"""# Nets that were stopped early

{conditions(record["environment"])} Written by `python -m benchmarks.early_stopped`.

{NUM_DATA} images, an MLP with {WIDTH} hidden units, {WRONG:.0%} of the labels wrong, batches of
{BATCH_SIZE}, {len(record["seeds"])} seeds (of images, labels, first weights and batches). The truth
of every example: the same training again from the same first weights with the same batches, in
which its loss has weight 0. Score: Spearman / Pearson with the truth over all {NUM_DATA} examples;
then the mean estimated increase of the loss over the true one, with the smallest and the largest of
the seeds. {losses}.

{table(header, rows)}

Aimed at along the training: Spearman / Pearson of 0.98 / 0.97 with full matrices and 0.96 / 0.94
with Kronecker factors, and a mean increase within {NEAR:.0%}. Missed, in averages over the seeds:

{missed(runs)}
"""


def main() -> None:
    """All settings and seeds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.early_stopped", description=__doc__)
    parser.add_argument("--settings", nargs="*", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS))
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the two files")
    chosen = parser.parse_args()
    found: dict[str, Any] = {}
    for name in chosen.settings:
        found[name] = [measure(SETTINGS[name], seed) for seed in chosen.seeds]
        for way in WAYS:
            print(f"{name:8s} {way:32s} {cell(found[name], way)}", flush=True)
    record = {"environment": environment(0), "seeds": chosen.seeds, "settings": found}
    write(chosen.output, "early-stopped", record, page(record))


if __name__ == "__main__":
    main()
