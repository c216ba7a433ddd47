"""What the estimate along a recorded training costs, in epochs of plain training.

``python -m benchmarks.walk_speed`` trains each net for some epochs with Adam, then takes the
estimate along 3 and along 6 checkpoints, the fits at the checkpoints included. Processor time of
one thread; an epoch is the median of those of the training itself.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

from torch import optim

import engram
from benchmarks.data import images
from benchmarks.nets import NETS, build
from benchmarks.records import RESULTS, against, conditions, table, write
from benchmarks.timing import environment
from benchmarks.training import epoch
from engram.engine.gradient_accumulator import DiscardGradients
from engram.engine.session import session
from engram.sensitivity.estimators.base import Setting
from engram.sensitivity.estimators.trajectory import trajectory, with_stages

EXAMPLES = 2048
EPOCHS = 8
COUNTS = (3, 6)  # of checkpoints
BARS = {"mlp": (6, 12), "lenet5": (6, 12), "resnet20": (8, 16), "transformer": (8, 16)}


def measure(name: str, examples: int) -> dict[str, Any]:
    """Epochs that the fits at the checkpoints and the walk along them take."""
    model, data = build(name), images(examples).first(examples)
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    training = engram.record(optimizer, model)
    seconds = []
    for _ in range(EPOCHS):
        start = time.process_time()
        epoch(model, optimizer, data)
        seconds.append(time.process_time() - start)
    training.stop()
    unit = median(seconds)
    posterior = engram.laplace(
        model, data, structure="diagonal", curvature="fisher", training=training, progress=False
    )
    found: dict[str, Any] = {"net": name, "examples": examples, "epoch_seconds": unit, "rows": []}
    with session(model, data, "categorical", progress=False) as opened:
        setting = Setting(opened.likelihood, posterior, 0, DiscardGradients(), opened=opened)
        for count in COUNTS:
            start = time.process_time()
            ready = with_stages(setting, count)
            fitted = time.process_time()
            assert ready.opened is not None
            for observed in ready.opened.passes("walk"):
                trajectory(observed, ready)
            walked = time.process_time()
            found["rows"].append(
                {
                    "checkpoints": len(ready.walk),
                    "fit": (fitted - start) / unit,
                    "walk": (walked - fitted) / unit,
                }
            )
    return found


def page(record: dict[str, Any]) -> str:
    """A row for each net."""
    lines = []
    for one in record["nets"]:
        cells = []
        for row, bar in zip(one["rows"], BARS[one["net"]], strict=True):
            total = against(row["fit"] + row["walk"], bar)
            cells += [f"{row['fit']:.1f}", f"{row['walk']:.1f}", f"{total} (bar {bar})"]
        lines.append([one["net"], f"{one['examples']:,}", *cells])
    header = ["net", "N"]
    for count in COUNTS:
        header += [f"{count} checkpoints: fits", "walk", "together"]
    return f"""# What the estimate along a training costs

In epochs of plain training with Adam in batches of 256, processor time of one thread.
{conditions(record["environment"])}
Written by `python -m benchmarks.walk_speed`. A figure above its bar is bold. The fits at the
checkpoints take a fixed number of examples (500 at each, or a share of the data where that is
more) and eigendecompositions, so that their share falls with N.

{table(header, lines)}
"""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of nets; all of them where none is named")
    parser.add_argument("--examples", type=int, default=EXAMPLES)
    parser.add_argument("--output", type=Path, default=RESULTS, help="of the page")
    chosen = parser.parse_args()
    record: dict[str, Any] = {"environment": environment(seed=0), "nets": []}
    for name in chosen.names or list(NETS):
        record["nets"].append(measure(name, chosen.examples))
        print(record["nets"][-1], flush=True)
        write(chosen.output, "walk-speed", record, page(record))


if __name__ == "__main__":
    main()
