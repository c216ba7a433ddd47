"""What ``engram.plan`` foresees, against what happens: time, memory and disk on five real cases.

Every case is planned in a process of its own, and run in another, so that neither finds memory or
kernels that the other has left.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import engram
from benchmarks.nets import build
from benchmarks.records import RESULTS, against, conditions, table, write
from benchmarks.timing import environment
from benchmarks.training import BATCH_SIZE, epoch
from engram.planning.measuring import PeakMemory, memory_in_use
from engram.planning.plan import Planner

BAR = 2.0  # factor that a plan may be off by
LEAVE_OUT = 4  # trainings without an example: few, for they are what takes long
CPU = torch.device("cpu")
# case: net, data set, examples, structure; and the prior precision, where after so little training
# the weights fit none
CASES: dict[str, tuple[str, str, int, str, float | str]] = {
    "logistic regression, USPS": ("logistic", "usps", 7291, "kronecker", "auto"),
    "MLP 500-300, MNIST": ("mlp", "mnist", 5000, "kronecker", "auto"),
    "LeNet5, Fashion-MNIST": ("lenet5", "fmnist", 3000, "kronecker", "auto"),
    "ResNet-20, Fashion-MNIST": ("resnet20", "fmnist", 800, "diagonal", 1.0),
    "transformer, Fashion-MNIST": ("transformer", "fmnist", 800, "diagonal", 1.0),
}


def problem(case: str, seed: int) -> tuple[nn.Module, tuple[Tensor, Tensor], torch.optim.Adam]:
    """A net after an epoch on a thousand examples, its data, and its optimizer."""
    net, name, count, *_ = CASES[case]
    images, labels = engram.data.load(name, download=False).train
    data = (images[:count].contiguous(), labels[:count])
    torch.manual_seed(seed)
    pixels = images[0].numel()
    linear = net == "logistic"
    model = nn.Sequential(nn.Flatten(), nn.Linear(pixels, 10)) if linear else build(net, seed=seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-3)
    epoch(model, optimizer, (data[0][:1000], data[1][:1000]))
    return model, data, optimizer


def fit(model: nn.Module, data: tuple[Tensor, Tensor]) -> None:
    """One epoch: the training that is repeated without an example."""
    epoch(model, torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-3), data)


def planned(case: str, seed: int) -> dict[str, dict[str, float]]:
    """What the plan says."""
    model, data, optimizer = problem(case, seed)
    start = time.process_time()
    found = Planner(model, data, clock=time.process_time).plan(
        CASES[case][3], "auto", optimizer, fit, LEAVE_OUT
    )
    steps = {
        name: {"seconds": step.seconds, "memory": step.memory, "disk": step.disk}
        for name, step in found.steps.items()
    }
    return {**steps, "planning": {"seconds": time.process_time() - start}}


def happened(case: str, seed: int) -> dict[str, dict[str, float]]:
    """What the calls take, one after the other."""
    model, data, optimizer = problem(case, seed)
    structure, prior = CASES[case][3:]
    level, kept = memory_in_use(CPU), {}

    def update() -> Any:
        with engram.Tracker(model, optimizer, data) as tracker:
            tracker.update(step=0)
            return tracker.history

    calls = {
        "fit": lambda: engram.laplace(
            model, data, structure=structure, prior_precision=prior, progress=False
        ),
        "pass": lambda: engram.sensitivities(model, data, kept["fit"], progress=False),
        "tracker update": update,
        "retraining": lambda: engram.retrain(
            model, data, list(range(LEAVE_OUT)), train=fit, progress=False
        ),
    }
    found = {}
    for name, call in calls.items():
        with PeakMemory(CPU, level) as peak:
            start = time.process_time()
            kept[name] = call()
            seconds = time.process_time() - start
        found[name] = {"seconds": seconds, "memory": peak.bytes, "disk": _size(kept[name])}
    return found


def _size(made: Any) -> int:
    with tempfile.TemporaryDirectory() as folder:
        made.save(Path(folder) / "saved")
        return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def measure(case: str, seed: int) -> dict[str, Any]:
    """Plan and truth, each in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        return {
            "planned": processes.submit(planned, case, seed).result(),
            "happened": processes.submit(happened, case, seed).result(),
        }


def page(record: dict[str, Any]) -> str:
    """The Markdown page."""
    rows, off = [], []
    for case, found in record["cases"].items():
        for step, real in found["happened"].items():
            plan = found["planned"][step]
            ratios = {key: plan[key] / real[key] for key in ("seconds", "memory", "disk")}
            off += [max(ratio, 1 / ratio) for ratio in ratios.values()]
            rows.append(
                (
                    case,
                    step,
                    f"{real['seconds']:.1f} s",
                    f"{real['memory'] / 1e6:.0f} MB",
                    f"{real['disk'] / 1e6:.2f} MB",
                    *(_marked(ratio) for ratio in ratios.values()),
                )
            )
    header = ("case", "step", "time", "memory", "disk", "plan: time", "memory", "disk")
    planning = [found["planned"]["planning"]["seconds"] for found in record["cases"].values()]
    within = sum(factor <= BAR for factor in off)
    return f"""# What a plan foresees

`engram.plan` makes each call on 32, 64, ... examples until one takes a second, and goes on along
the line. The last three columns are the plan's figure over what happened when the call was made on
all examples in another process; **bold** is off by more than a factor {BAR:g}. Of {len(off)}
figures {within} are within it. Planning took {min(planning):.0f} to {max(planning):.0f} s.

{table(header, rows)}

Memory is above what the process had with model and data. Retraining leaves out {LEAVE_OUT} examples
one by one, with an epoch each, and three times nothing. Plan and run
are in seconds of the processor with one thread, since other work on the machine changed between
them; `engram.plan` itself takes the time on the wall. ResNet-20 and the transformer are fitted with
a given prior precision, as after so little training their weights fit none; the conditions below
are those of the last case that was measured.

{conditions(record["environment"])} Batches of {BATCH_SIZE}. Written by
`python -m benchmarks.plan` with ENGRAM_DATA naming the folder of the data.
"""


def _marked(ratio: float) -> str:
    low = ratio < 1 / BAR
    return f"**{ratio:.2f}**" if low else against(ratio, BAR)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    before = given.out / "plan.json"
    record: dict[str, Any] = {"environment": environment(given.seed), "cases": {}}
    if before.is_file():  # cases that were measured before are kept
        record["cases"] = json.loads(before.read_text())["cases"]
    for case in given.cases:
        record["cases"][case] = measure(case, given.seed)
        print(case, record["cases"][case], flush=True)
        write(given.out, "plan", record, page(record))


if __name__ == "__main__":
    main()
