"""The regulariser chosen by ``engram.tune``, beside the one that the test set would choose."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR

import engram
from benchmarks.data import train_and_test
from benchmarks.during_training import BUILD, shuffled
from benchmarks.records import RESULTS, against, conditions, table, write
from benchmarks.timing import environment

BAR = 3.0  # per cent of the best test loss on the grid
GRID = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


@dataclass(frozen=True)
class Run:
    """A net and how many images it sees, trained with Adam from the weights before."""

    data: str
    net: str
    num_data: int
    epochs: int
    batch_size: int = 128
    rate: float = 2e-3


RUNS = {
    "fmnist-mlp-5000": Run("fmnist", "mlp-32-16", 5_000, 60),
    "fmnist-mlp-60000": Run("fmnist", "mlp-32-16", 60_000, 8),
    "mnist-mlp-5000": Run("mnist", "mlp-32-16", 5_000, 60),
    "mnist-lenet5-5000": Run("mnist", "lenet5", 5_000, 20),
}


def trainer(run: Run, data: Any, seed: int) -> Any:
    """``train(model, prior_precision)`` as ``engram.tune`` calls it."""
    generator = torch.Generator().manual_seed(seed)

    def train(model: nn.Module, prior_precision: float) -> None:
        decay = prior_precision / run.num_data
        optimizer = torch.optim.Adam(model.parameters(), run.rate, weight_decay=decay)
        schedule = CosineAnnealingLR(optimizer, run.epochs)
        for _ in range(run.epochs):
            for _, inputs, targets in shuffled(data, run.batch_size, generator):
                optimizer.zero_grad()
                functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
            schedule.step()

    return train


def measure(name: str, seed: int) -> dict[str, Any]:
    """Tune one net; the test loss is recorded and plays no part."""
    run = RUNS[name]
    train, test = train_and_test(run.data)
    few: tuple[Tensor, Tensor] = train.first(run.num_data)
    torch.manual_seed(seed)
    started = time.perf_counter()
    tuning = engram.tune(
        BUILD[run.net](10),
        few,
        trainer(run, type(train)(*few, train.source), seed),
        GRID,
        estimator="linear",
        validation=test.first(len(test.targets)),
    )
    frame = tuning.to_frame()
    best = float(frame["validation"].min())
    return {
        "settings": asdict(run),
        "rows": frame.reset_index().to_dict("records"),
        "chosen": tuning.prior_precision,
        "best by test": float(frame["validation"].idxmin()),
        "excess": 100 * (tuning.best.validation / best - 1),
        "seconds": time.perf_counter() - started,
    }


def page(record: dict[str, Any]) -> str:
    """The Markdown page."""
    rows = []
    for name, found in record["runs"].items():
        chosen = next(r for r in found["rows"] if r["prior_precision"] == found["chosen"])
        rows.append(
            [
                name,
                f"{found['chosen']:g}",
                f"{found['best by test']:g}",
                f"{chosen['estimate']:.4f}",
                f"{chosen['validation']:.4f}",
                against(found["excess"], BAR) + " %",
            ]
        )
    header = ["run", "chosen", "best by test", "estimate there", "test loss there", "excess"]
    return f"""# The regulariser, chosen without validation data

`engram.tune` over prior precisions {", ".join(f"{value:g}" for value in GRID)}, K-FAC posterior,
`linear` estimator, warm starts. *Excess* is the test loss at the chosen one over the lowest one
on the grid; bold above {BAR:g} %. The name says how many training images there are.
{conditions(record["environment"])} Written by `python -m benchmarks.tuning` with ENGRAM_DATA naming
the folder of the data.

{table(header, rows)}

![Estimate and test loss over the grid](tuning.png)
"""


def picture(record: dict[str, Any], path: Path) -> None:
    """One panel a run."""
    figure = Figure(figsize=(4 * len(record["runs"]), 3.2), layout="constrained")
    for number, (name, found) in enumerate(record["runs"].items()):
        axes = figure.add_subplot(1, len(record["runs"]), number + 1)
        strengths = [row["prior_precision"] for row in found["rows"]]
        lines = (("validation", "#8a8f98", "test"), ("estimate", "#1b1b1b", "estimate"))
        for column, colour, label in lines:
            values = [row[column] for row in found["rows"]]
            axes.plot(strengths, values, "-o", ms=3, color=colour, label=label)
        trained = [row["train"] for row in found["rows"]]
        axes.plot(strengths, trained, ":", color="#8a8f98", label="train")
        axes.set(title=name, xlabel="prior precision", ylabel="nats per example", xscale="log")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tuning", description=__doc__)
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    record: dict[str, Any] = {
        "environment": environment(chosen.seed),
        "runs": {name: measure(name, chosen.seed) for name in chosen.runs},
    }
    write(chosen.output, "tuning", record, page(record))
    picture(record, chosen.output / "tuning.png")
    print(page(record))


if __name__ == "__main__":
    main()
