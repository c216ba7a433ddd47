"""What two audits take, by the real command line: ``python -m benchmarks.audit.timed``.

A table of 20,000 rows with missing values and three sources, and 10,000 images of Fashion-MNIST.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.audit.data import RATE, fashion, with_wrong_labels
from benchmarks.records import RESULTS, conditions, table, write
from benchmarks.timing import environment

ROWS = 20_000
MISSING = 0.03  # of the numbers of a row
COMMANDS = {  # options behind the file
    "rows.csv": ("--group-by", "source"),
    "images.npz": (),
}
TEXT = """# What an audit takes

`python -m benchmarks.audit.timed`: a table of 20,000 rows (twenty columns of numbers, of four
classes that overlap, 3 % of them missing, a column of words, three random sources, a tenth of the
labels wrong), and the first 10,000 images of Fashion-MNIST; each by the command line, in a process
of its own. {conditions}
Seconds are of the process, start included; those by the clock are upper bounds, as other work had
the cores too.

{rows}

Asked for: less than 2 minutes and 2 GB for the table, less than 5 minutes for the images.
"""


def save_table(path: Path) -> None:
    """The rows as a CSV."""
    from sklearn.datasets import make_classification

    random = np.random.default_rng(0)
    points, right = make_classification(
        ROWS, 20, n_informative=8, n_classes=4, class_sep=1.0, flip_y=0.0, random_state=0
    )
    points[random.random(points.shape) < MISSING] = np.nan
    frame = pd.DataFrame(points, columns=[f"x{number}" for number in range(20)])
    frame["kind"] = random.choice(["a", "b", "c", None], ROWS)
    frame["source"] = random.choice(["north", "south", "east"], ROWS)
    given, _ = with_wrong_labels(right, "symmetric", 0)
    frame["label"] = np.array(["ash", "birch", "cedar", "oak"])[given]
    frame.to_csv(path, index=False)


def save_images(path: Path) -> None:
    """The images with their labels as they are."""
    images, labels = fashion()
    np.savez(path, x=images, y=labels)


def timed(command: list[str], folder: Path) -> dict[str, float]:
    """Seconds and memory of a command; it must succeed."""
    begun = time.monotonic()
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {status}")
    return {
        "seconds": usage.ru_utime + usage.ru_stime,
        "clock": time.monotonic() - begun,
        "memory": usage.ru_maxrss * 1024 / 1e9,  # Linux counts in kB
    }


def main() -> None:
    found: dict[str, Any] = {}
    setting = environment(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_table(folder / "rows.csv")
        save_images(folder / "images.npz")
        for file, options in COMMANDS.items():
            run = f"run/{Path(file).stem}"
            command = [sys.executable, "-m", "engram", "audit", file, run, *options, "--quiet"]
            words = " ".join(["engram", *command[3:]])
            found[words] = timed(command, folder)
            found[words]["page"] = (folder / run / "report.html").stat().st_size / 1e6
            print(words, found[words], file=sys.stderr, flush=True)
    rows = [
        [
            f"`{words}`",
            f"{one['seconds']:.0f}",
            f"{one['clock']:.0f}",
            f"{one['memory']:.2f}",
            f"{one['page']:.1f}",
        ]
        for words, one in found.items()
    ]
    header = ["", "processor s", "by the clock, s", "memory, GB", "page, MB"]
    text = TEXT.format(conditions=conditions(setting), rows=table(header, rows))
    write(RESULTS, "audit-time", {"environment": setting, "wrong": RATE, "runs": found}, text)


if __name__ == "__main__":
    main()
