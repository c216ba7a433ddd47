"""The size of a memorised net's test loss, by one replay without a fold.

``python -m benchmarks.replayed_level`` trains a CNN until it knows its 2,000 images by heart, and
replays its recorded training without a tenth of them from checkpoints ever later. The test data has
as many wrong labels, so that its loss is what is asked for.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import engram
from benchmarks.practical.loop import Recording
from benchmarks.records import RESULTS, conditions, table, write
from benchmarks.timing import environment
from benchmarks.wrong_labels.settings import SETTINGS

SETTING = "fmnist-memorised"
STARTS = (0.0, 0.1, 1 / 3, 2 / 3)  # of the steps


class Replayable(Recording):
    """Keeps the order of the examples, and what the steps said about them."""

    def comes(self, indices: Tensor) -> None:
        self.training.note(indices)

    def visited(self, indices: Tensor, outputs: Tensor) -> None:
        self.training.visit(indices, outputs)


def measured(seed: int) -> list[dict[str, Any]]:
    """Levels from every start, beside the test loss and the estimate at the end."""
    setting, watched = SETTINGS[SETTING], Replayable(replay=True)
    split = setting.split()
    model = setting.train(seed, watched)
    with torch.no_grad():
        test = float(functional.cross_entropy(model(split.test_inputs), split.test_given))
    rows = []
    for start in STARTS:
        step = int(start * watched.training.num_steps)
        given = {"start": step, "seed": seed, "progress": False}
        found = engram.replayed_level(model, split.data, watched.training, **given)
        rows.append(
            {
                "seed": seed,
                "start": found.start / watched.training.num_steps,
                "level": found.level,
                "standard_error": found.standard_error,
                "train": found.train_nll,
                "test": test,
                "passes": found.passes / setting.epochs,
            }
        )
        print(rows[-1], flush=True)
    return rows


def page(record: dict[str, Any]) -> str:
    """The Markdown page."""
    rows = [
        [
            str(row["seed"]),
            f"{100 * row['start']:.0f} %",
            f"{row['train']:.3f}",
            f"{row['level']:.2f} ± {row['standard_error']:.2f}",
            f"{row['test']:.2f}",
            f"{row['passes']:.2f}",
        ]
        for row in record["rows"]
    ]
    header = ["seed", "left out after", "training loss", "level", "test loss", "cost in trainings"]
    return f"""# The size of a memorised net's test loss

`engram.replayed_level` on a CNN with BatchNorm that was trained with AdamW for 40 epochs on 2,000
images of Fashion-MNIST, a tenth of the labels wrong, as they are in the 2,000 test images. A tenth
of the examples is left out of the recorded training from a checkpoint on, and the rest is trained
again.
{conditions(record["environment"])}
Written by `python -m benchmarks.replayed_level` with ENGRAM_DATA naming the folder of the data.

{table(header, rows)}
"""


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replayed_level")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for seed in range(chosen.seeds) for row in measured(seed)]
    record = {"environment": environment(seed=0), "rows": rows}
    write(chosen.output, "replayed-level", record, page(record))


if __name__ == "__main__":
    main()
