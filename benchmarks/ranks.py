"""Two processes against one: a fit and a pass over the same examples, one thread each.

``python -m benchmarks.ranks [NET ...]`` fits Kronecker factors and runs a pass with diagnostics, in
one process that has all examples and in two that share them. Seconds of the processor say what each
process has to do, whatever else the machine does; the clock says what there is to wait for, on a
machine that is free.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import engram
from benchmarks.nets import SIDE, lenet5, mlp
from benchmarks.records import RESULTS, conditions, table, times, write
from benchmarks.timing import environment

NETS = {"LeNet5": lenet5, "MLP (500, 300)": mlp}
NUMBER, FEW, OUTPUTS = 8_000, 64, 10  # examples; of a first call that loads what is needed
CALLS = 1  # of which the median counts


def process(rank: int, folder: str, count: int, name: str) -> None:
    """One of ``count`` processes; the first writes what all have taken."""
    torch.set_num_threads(1)
    place = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=count)
    torch.manual_seed(0)
    model = NETS[name](OUTPUTS)
    x, y = torch.randn(NUMBER, 1, SIDE, SIDE), torch.randint(OUTPUTS, (NUMBER,))
    rows = []
    for size in (FEW, *[NUMBER] * CALLS):
        dist.barrier()
        rows.append(taken(model, (x[:size], y[:size])))
    own = torch.tensor(rows[1:], dtype=torch.float64)
    every = [torch.empty_like(own) for _ in range(count)]
    dist.all_gather(every, own)
    if rank == 0:
        slowest = torch.stack(every).amax(0)
        found = {"processor": slowest[:, 0].tolist(), "clock": slowest[:, 1].tolist()}
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def taken(model: torch.nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> list[float]:
    """Seconds of the processor and of the clock for a fit and a pass."""
    begun, clock = time.process_time(), time.perf_counter()
    given = {"across_ranks": True, "progress": False}
    posterior = engram.laplace(model, data, structure="kronecker", prior_precision=10.0, **given)
    engram.sensitivities(model, data, posterior, **given)
    return [time.process_time() - begun, time.perf_counter() - clock]


def measured(name: str, count: int) -> dict[str, list[float]]:
    """Of every call, the process that took longest."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(process, (folder, count, name), nprocs=count)
        found: dict[str, list[float]] = json.loads((Path(folder) / "found.json").read_text())
    return found


def main() -> None:
    """Measure, and write the record and the page."""
    torch.set_num_threads(1)
    conditioned = environment(0)
    runs, rows = [], []
    for name in sys.argv[1:] or NETS:
        one, two = measured(name, 1), measured(name, 2)
        runs.append({"net": name, "examples": NUMBER, "one": one, "two": two})
        medians = {kind: [statistics.median(way[kind]) for way in (one, two)] for kind in one}
        processor, clock = medians["processor"], medians["clock"]
        figures = [f"{seconds:.2f}" for seconds in processor]
        ratios = [times(before / after) for before, after in (processor, clock)]
        rows.append([name, *figures, *ratios])
    header = ["net", "one process, s", "each of two, s", "ratio", "ratio by the clock"]
    page = "\n\n".join(
        [
            "# Two processes against one",
            f"`python -m benchmarks.ranks {' '.join(sys.argv[1:])}`. Kronecker factors and a pass "
            f"with diagnostics over {NUMBER:,} random images, `across_ranks=True`, gloo, one "
            "thread a process; seconds of the processor, of two processes those of the busier "
            f"one; median of {CALLS} "
            "call(s). The clock tells something on a machine that has nothing else to do. "
            + conditions(conditioned),
            table(header, rows),
        ]
    )
    write(RESULTS, "many-machines", {"environment": conditioned, "runs": runs}, page)
    print(page)


if __name__ == "__main__":
    main()
