"""Time and memory of ``engram.score`` by the number of examples.

``python -m benchmarks.large_data`` scores 1,000 to 1,000,000 examples of a small net into a folder.
Time is that of the processor, one thread; memory is the most above what was in use before the call,
with the examples themselves in memory already.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch
from torch import nn

import engram
from benchmarks.records import RESULTS, conditions, table, write
from benchmarks.timing import environment
from engram.planning.measuring import PeakMemory, memory_in_use

NUMBERS = (1_000, 10_000, 100_000, 1_000_000)
FEATURES, WIDTH, CLASSES = 16, 64, 5
CALLS = 3  # of which the median counts
FITTED = 2_000  # examples that the posterior is fitted to: it is the same for all


def measured(model: nn.Module, data: Any, posterior: Any) -> dict[str, float]:
    """One call, all of it: opening, passes, files."""
    device = torch.device("cpu")
    with (
        tempfile.TemporaryDirectory() as folder,
        PeakMemory(device, memory_in_use(device)) as peak,
    ):
        begun = time.process_time()
        scores = engram.score(model, data, posterior, folder, progress=False)
        seconds = time.process_time() - begun
        assert not scores.missing
    number = len(data[1])
    return {
        "examples": number,
        "seconds": seconds,
        "us": 1e6 * seconds / number,
        "mb": peak.bytes / 1e6,
    }


def main() -> None:
    """Measure, and write the record and the page."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    found = environment(0)
    model = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))
    x, y = torch.randn(NUMBERS[-1], FEATURES), torch.randint(CLASSES, (NUMBERS[-1],))
    few = (x[:FITTED], y[:FITTED])
    posterior = engram.laplace(model, few, structure="kronecker", prior_precision=10.0)
    measured(model, few, posterior)  # libraries are loaded
    rows = []
    for n in NUMBERS:
        calls = [measured(model, (x[:n], y[:n]), posterior) for _ in range(CALLS)]
        rows.append(sorted(calls, key=lambda call: call["seconds"])[CALLS // 2])
    lines = [[f"{r['examples']:,}", f"{r['us']:.1f}", f"{r['mb']:.0f}"] for r in rows]
    page = "\n\n".join(
        [
            "# Large data: time and memory of `engram.score`",
            "`python -m benchmarks.large_data`. A net of 16, 64 and 5 units, Kronecker posterior, "
            "parts of 4,096 examples with their Parquet files. Median of three calls. Processor "
            "time; memory above that in use before the call. " + conditions(found),
            table(["examples", "microseconds an example", "peak memory, MB"], lines),
        ]
    )
    write(RESULTS, "large-data", {"environment": found, "runs": rows}, page)
    print(page)


if __name__ == "__main__":
    main()
