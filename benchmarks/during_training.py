"""The estimate of the test loss while a net trains, beside the loss on the test set."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from ivon import IVON
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR
from tqdm import tqdm

import engram
from benchmarks import during_training_page
from benchmarks.data import Images, train_and_test
from benchmarks.during_training_nets import NETS, follow_net
from benchmarks.nets import lenet5, small_mlp
from benchmarks.records import RESULTS, write
from benchmarks.timing import environment

BUILD = {"lenet5": lenet5, "mlp-32-16": small_mlp}
HESSIAN_START = 0.1
# squared gradients as Adam keeps them, and scaled from batches to single examples
BOTH = ("optimizer", "optimizer, per example")
# a twin of the training that leaves some examples out: a twentieth, and enough for their mean
PATH, FOLLOWED, SHARE = "followed", 1000, 20
ALL = (*BOTH, PATH)


@dataclass(frozen=True)
class Run:
    """One training at the paper's settings; the posteriors are read or fitted at each update."""

    data: str
    net: str
    optimizer: str
    rates: tuple[float, float]
    prior_precision: float
    batch_size: int
    epochs: int
    posteriors: tuple[str, ...] = ("optimizer",)
    every: int = 2  # epochs between evaluations
    num_data: int = 60_000


RUNS = {
    "fmnist-lenet5-ivon": Run("fmnist", "lenet5", "ivon", (0.1, 0.0), 60.0, 256, 20),
    "mnist-mlp-ivon": Run("mnist", "mlp-32-16", "ivon", (1e-2, 1e-4), 80.0, 256, 20),
    "mnist-lenet5-ivon": Run("mnist", "lenet5", "ivon", (1e-2, 1e-4), 60.0, 256, 20),
    "mnist-mlp-adam-32": Run("mnist", "mlp-32-16", "adam", (1e-3, 0.0), 80.0, 32, 20, BOTH),
    "mnist-mlp-adam-8": Run("mnist", "mlp-32-16", "adam", (1e-3, 0.0), 80.0, 8, 8, BOTH),
    "mnist-lenet5-adam-32": Run("mnist", "lenet5", "adam", (1e-3, 0.0), 60.0, 32, 10, BOTH),
    "fmnist-lenet5-adam-32": Run("fmnist", "lenet5", "adam", (1e-3, 0.0), 60.0, 32, 10, BOTH),
    "fmnist-lenet5-adamw": Run("fmnist", "lenet5", "adamw", (1e-3, 1e-3), 60.0, 256, 20, BOTH),
    "fmnist-lenet5-adamw-long": Run(
        "fmnist", "lenet5", "adamw", (1e-3, 1e-3), 60.0, 256, 60, (PATH,), 3
    ),
    "fmnist-lenet5-adamw-overfit": Run(
        "fmnist", "lenet5", "adamw", (1e-3, 1e-3), 10.0, 256, 120, ALL, 4, 10_000
    ),
    "fmnist-lenet5-adamw-overfit-5000": Run(
        "fmnist", "lenet5", "adamw", (1e-3, 1e-3), 10.0, 256, 160, ALL, 4, 5_000
    ),
    "mnist-mlp-adamw-overfit": Run(
        "mnist", "mlp-32-16", "adamw", (1e-3, 1e-3), 10.0, 256, 160, ALL, 4, 5_000
    ),
}


def make_optimizer(run: Run, model: nn.Module, num_data: int) -> optim.Optimizer:
    """Weight decay is delta / N, since the loss is a mean."""
    rate, decay = run.rates[0], run.prior_precision / num_data
    if run.optimizer == "ivon":
        return IVON(
            model.parameters(),
            lr=rate,
            ess=num_data,
            hess_init=HESSIAN_START,
            beta2=0.99999,
            weight_decay=decay,
        )
    kinds: dict[str, type[optim.Optimizer]] = {"adam": optim.Adam, "adamw": optim.AdamW}
    return kinds[run.optimizer](model.parameters(), lr=rate, weight_decay=decay)  # type: ignore[call-arg]


def train_epoch(
    model: nn.Module,
    optimizer: optim.Optimizer,
    batches: Iterator[Any],
    tracker: engram.Tracker | None,
) -> None:
    """One epoch over shuffled batches, told to the tracker that follows examples."""
    for indices, inputs, targets in batches:
        optimizer.zero_grad()
        around: Any = nullcontext() if tracker is None else tracker.twin_step(indices, targets)
        if isinstance(optimizer, IVON):
            around = optimizer.sampled_params(train=True)
        with around:
            functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def shuffled(data: Images, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, ...]]:
    """Batches in a new order, each example once."""
    order = torch.randperm(len(data.targets), generator=generator)
    for some in order.split(size):
        yield some, data.inputs[some], data.targets[some]


def figures_on(model: nn.Module, test: Images) -> dict[str, float]:
    """Mean negative log likelihood in nats, and accuracy."""
    with torch.no_grad():
        outputs = torch.cat([model(part) for part in test.inputs.split(1000)])
    return {
        "test": float(functional.cross_entropy(outputs, test.targets)),
        "accuracy": float((outputs.argmax(1) == test.targets).float().mean()),
    }


def follow(name: str, seed: int) -> dict[str, Any]:
    """Train, and estimate at the first epoch and at every few after it."""
    run = RUNS[name]
    train, test = train_and_test(run.data)
    torch.manual_seed(seed)
    model = BUILD[run.net](10)
    num_data = run.num_data
    train = Images(*train.first(num_data), train.source)
    optimizer = make_optimizer(run, model, num_data)
    steps = run.epochs * math.ceil(num_data / run.batch_size)
    schedule = CosineAnnealingLR(optimizer, run.epochs, eta_min=run.rates[1])
    trackers = {
        kind: engram.Tracker(
            model,
            optimizer,
            train.first(num_data),
            posterior="optimizer",
            prior_precision=run.prior_precision,
            training_batch_size=run.batch_size,
            second_moment="example" if kind == BOTH[1] else "batch",
            held_out=max(FOLLOWED, num_data // SHARE) if kind == PATH else None,
        )
        for kind in run.posteriors
    }
    generator = torch.Generator().manual_seed(seed)
    rows, started = [], time.perf_counter()
    for epoch in tqdm(range(1, run.epochs + 1), name):
        batches = shuffled(train, run.batch_size, generator)
        train_epoch(model, optimizer, batches, trackers.get(PATH))
        schedule.step()
        if epoch > 1 and epoch % run.every:
            continue
        row: dict[str, float] = {"epoch": epoch} | figures_on(model, test)
        for kind, tracker in trackers.items():
            result = tracker.update(step=epoch)
            row |= {f"estimate {kind}": tracker.history.records[-1].estimate}
            row |= {"train": math.nan if result is None else result.train_nll}
        rows.append(row)
        tqdm.write(f"{name} {row}")
    seconds = time.perf_counter() - started
    return {"settings": asdict(run), "steps": steps, "rows": rows, "seconds": seconds}


def main() -> None:
    """Follow the runs that were asked for; the others keep their place in the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.during_training")
    parser.add_argument("--runs", nargs="+", choices=[*RUNS, *NETS], default=[*RUNS, *NETS])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    path = chosen.output / "during_training.json"
    for name in chosen.runs:
        record: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"runs": {}}
        followed = (follow_net if name in NETS else follow)(name, chosen.seed)
        label = f"{name}, seed {chosen.seed}" if name in NETS else name
        record["runs"][label] = followed | {"environment": environment(chosen.seed)}
        write(chosen.output, "during_training", record, during_training_page.page(record))
        during_training_page.picture(record, chosen.output / "during_training.png")


if __name__ == "__main__":
    main()
