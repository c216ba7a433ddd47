"""What a pass and a fit cost, in plain training epochs over the same examples."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import engram
from benchmarks import jacobian, pass_cost_page, torch_func
from benchmarks.data import FULL_SIZE, Images, images
from benchmarks.nets import NETS, build
from benchmarks.records import RESULTS, write
from benchmarks.timing import CLOCKS, Line, environment, interleaved, ratio
from benchmarks.training import BATCH_SIZE, epoch

MANY_OUTPUTS = 1000
TRAIN_EXAMPLES = 16_384  # before anything is timed
FIT_EXAMPLES = 4096  # of the posteriors
PRIOR_PRECISION = 60.0  # with all examples
LEVERAGE_EXAMPLES = 256  # sizes below this would not carry the whole fixed cost
EXAMPLES = {"mlp": FULL_SIZE, "lenet5": FULL_SIZE, "transformer": 16_384, "resnet20": 8192}
FEW = {"jacobian": 16, "functional": 64}  # examples for the ways too slow for an epoch

# structure and tolerance: Kronecker factors as they are by default, and with nothing merged
POSTERIORS = {
    "diagonal": ("diagonal", "auto"),
    "kronecker": ("kronecker", "auto"),
    "kronecker_exact": ("kronecker", 0.0),
}

# curvature and tolerance
FITS = {
    "sampled_kfac": ("fisher", "auto"),
    "exact_kfac": ("ggn", "auto"),
    "whole_kfac": ("ggn", 0.0),
}

Data = tuple[Tensor, Tensor]
Task = Callable[[Data], object]
Key = tuple[str, int]  # what is timed, over how many examples


def passes(model: nn.Module, data: Images, count: int, suffix: str = "") -> dict[str, Task]:
    """An epoch, and a pass with either posterior, as the user gets them."""
    learner = deepcopy(model)
    optimizer = torch.optim.Adam(learner.parameters())

    def train(subset: Data) -> None:
        epoch(learner, optimizer, subset)

    tasks: dict[str, Task] = {"epoch" + suffix: train}
    for name, (structure, tolerance) in POSTERIORS.items():
        posterior = fit(model, data.first(min(FIT_EXAMPLES, count)), structure, "fisher", tolerance)

        def run(subset: Data, posterior: engram.Posterior = posterior) -> engram.Result:
            return engram.sensitivities(
                model,
                subset,
                posterior,
                estimator="linear",
                batch_size=BATCH_SIZE,
                progress=False,
            )

        tasks[name + suffix] = run
    return tasks


def fit(
    model: nn.Module, data: Data, structure: str, curvature: str, tolerance: float | str = "auto"
) -> engram.Posterior:
    """A Laplace posterior whose eigenvalues are to the prior's as they would be with all examples.

    How many of them are merged, and so what a pass costs, depends on that.
    """
    return engram.laplace(
        model,
        data,
        structure=structure,
        curvature=curvature,
        prior_precision=PRIOR_PRECISION * len(data[0]) / FULL_SIZE,
        tolerance=tolerance,
        batch_size=BATCH_SIZE,
        progress=False,
    )


def slow_ways(model: nn.Module, data: Images, count: int) -> dict[str, Callable[[], Tensor]]:
    """The same deviations by the whole Jacobian, and by the engine's reference."""
    posterior = fit(model, data.first(min(FIT_EXAMPLES, count)), "diagonal", "fisher")

    def residual(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            outputs: Tensor = model(inputs)
        return outputs.softmax(1) - nn.functional.one_hot(targets, 10)

    def by_jacobian() -> Tensor:
        inputs, targets = data.first(FEW["jacobian"])
        return jacobian.deviation(model, inputs, residual(inputs, targets), posterior)

    def by_functional() -> Tensor:
        inputs, targets = data.first(FEW["functional"])
        return torch_func.deviation(model, (inputs,), residual(inputs, targets), posterior)

    return {"jacobian": by_jacobian, "functional": by_functional}


def trained(net: str, outputs: int, data: Data, seed: int) -> nn.Module:
    """A net that has learned something, so that it is not timed at its starting point."""
    model = build(net, outputs, seed)
    epoch(model, torch.optim.Adam(model.parameters()), data)
    return model


def running(
    ways: dict[str, Callable[[], Tensor]], ours: Tensor
) -> tuple[dict[str, Callable[[], Tensor]], dict[str, Any]]:
    """Warm up the slow ways: those that run, and how far each is from engram's deviations."""
    notes: dict[str, Any] = {}
    for name, way in ways.items():
        try:
            theirs = way().detach()
        except Exception as error:  # whatever stops a way is its result
            notes[name] = f"{type(error).__name__}: {error}"
            continue
        same = ours[: len(theirs)]
        notes[name] = float((theirs - same).norm() / same.norm())
    return {n: way for n, way in ways.items() if isinstance(notes[n], float)}, notes


def measure(net: str, data: Images, count: int, chosen: argparse.Namespace) -> dict[str, Any]:
    """All times of one net, and the ratios."""
    small = max(LEVERAGE_EXAMPLES, count // 4 // BATCH_SIZE * BATCH_SIZE)
    if count <= small:
        raise SystemExit(f"expected more than {small} examples, got {count}")
    before = data.first(TRAIN_EXAMPLES)
    model = trained(net, 10, before, chosen.seed)
    tasks = passes(model, data, count)
    for name, (curvature, tolerance) in FITS.items():
        tasks[name] = partial(
            fit, model, structure="kronecker", curvature=curvature, tolerance=tolerance
        )
    many = trained(net, MANY_OUTPUTS, before, chosen.seed)
    tasks |= passes(many, data, count, f"_{MANY_OUTPUTS}")
    for task in tasks.values():
        task(data.first(BATCH_SIZE))  # warm up
    ours = tasks["diagonal"](data.first(max(FEW.values())))
    assert isinstance(ours, engram.Result)
    ways, agreement = running(slow_ways(model, data, count), ours.deviation)
    timed: dict[Key, Callable[[], object]] = {
        (name, size): partial(task, data.first(size))
        for size in (count, small)
        for name, task in tasks.items()
    }
    timed |= {(name, FEW[name]): way for name, way in ways.items()}
    seconds = interleaved(timed, chosen.repeats, chosen.clock)
    return {"examples": count, "small": small, "difference": agreement} | summary(
        seconds, list(tasks), list(ways), (count, small)
    )


def summary(
    seconds: dict[Key, list[float]], tasks: list[str], ways: list[str], sizes: tuple[int, int]
) -> dict[str, Any]:
    """Ratios to the epoch as measured, and extrapolated to all examples."""
    count = sizes[0]
    lines = {name: Line.through({n: seconds[name, n] for n in sizes}) for name in tasks}
    base, whole = seconds["epoch", count], lines["epoch"].at(FULL_SIZE)
    per_example = median(base) / count
    many = f"_{MANY_OUTPUTS}"
    return {
        "ratio": {name: ratio(seconds[name, count], base) for name in tasks}
        | {name: median(seconds[name, FEW[name]]) / FEW[name] / per_example for name in ways},
        "ratio_at_full_size": {name: lines[name].at(FULL_SIZE) / whole for name in tasks},
        "fixed": {name: lines[name].fixed / whole for name in tasks},
        "per_example": {n: lines[n].per_example / lines["epoch"].per_example for n in tasks},
        "many_outputs": {
            name: {
                "ratio": ratio(seconds[name + many, count], seconds[name, count]),
                "ratio_at_full_size": lines[name + many].at(FULL_SIZE) / lines[name].at(FULL_SIZE),
            }
            for name in ("epoch", *POSTERIORS)
        },
        "seconds": [
            {"what": name, "examples": size, "rounds": [round(t, 4) for t in times]}
            for (name, size), times in seconds.items()
        ],
    }


def measured_before(folder: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Nets that an earlier run with the same versions and rounds has left in this folder."""
    path = folder / "pass-cost.json"
    if not path.is_file():
        return {}
    earlier = json.loads(path.read_text())
    same = all(
        earlier["environment"].get(k) == record["environment"].get(k)
        for k in ("engram", "torch", "python", "threads", "seed")
    )
    nets: dict[str, Any] = earlier["nets"] if same and earlier["clock"] == record["clock"] else {}
    return nets


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pass_cost", description=__doc__)
    parser.add_argument("--nets", nargs="+", choices=list(NETS), default=list(NETS))
    parser.add_argument(
        "--examples", type=int, help=f"of every net; if not given: {EXAMPLES}", default=None
    )
    parser.add_argument("--repeats", type=int, default=3, help="rounds; medians are reported")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--output", type=Path, default=RESULTS, help="folder of pass-cost.json and .md"
    )
    return parser.parse_args()


def main() -> None:
    """Measure net by net; the files are written after each."""
    chosen = arguments()
    torch.set_num_threads(chosen.threads)
    counts = {net: chosen.examples or EXAMPLES[net] for net in chosen.nets}
    data = images(max(TRAIN_EXAMPLES, *counts.values()), chosen.seed)
    record: dict[str, Any] = {
        "environment": environment(chosen.seed),
        "data": data.source,
        "batch_size": BATCH_SIZE,
        "repeats": chosen.repeats,
        "clock": chosen.clock,
        "nets": {},
    }
    record["nets"] |= measured_before(chosen.output, record)
    for net, count in counts.items():
        print(f"{net}, {count} examples", file=sys.stderr, flush=True)
        record["nets"][net] = measure(net, data, count, chosen)
        write(chosen.output, "pass-cost", record, pass_cost_page.page(record))
    print(pass_cost_page.page(record))


if __name__ == "__main__":
    main()
