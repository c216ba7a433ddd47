"""Leave-one-out copies trained together, against a loop of separate trainings."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.data import images
from benchmarks.minimum import PRIOR_PRECISION, silent, trained
from benchmarks.records import RESULTS, conditions, table, times, write
from benchmarks.timing import environment
from engram import retrain
from engram.core.data.batches import Data
from engram.core.state.model import state_preserved
from engram.likelihoods import Categorical
from engram.problem import Opener
from engram.retraining.recipes import LBFGS, Newton, Recipe, Trained
from engram.retraining.stack import Objective, Stack, open_stack

WANTED = 5.0  # times faster than the loop, each of its trainings with a fit of its own
FEW = 3  # copies by L-BFGS, which takes long
CALLS = 5  # of `engram.retrain` for one example each
TOGETHER, ALONE = "newton, together", "newton, one at a time"
REPEATS = 3  # of what takes seconds; the median counts
Clock = Callable[[], float]


@dataclass(frozen=True)
class Way:
    """How time is measured.

    Args:
        threads: that torch may use.
        clock: in seconds.
        title: of its table.
    """

    threads: int
    clock: Clock
    title: str


WAYS = {
    "processor": Way(1, time.process_time, "Processor time, one thread"),
    "wall": Way(2, time.perf_counter, "Wall-clock time, two threads"),
}


@dataclass(frozen=True)
class Setting:
    """What is measured: how many copies of a net on how many images, to which gradient norm."""

    examples: int
    copies: int
    tolerance: float
    separate: int
    seeds: tuple[int, ...]


def together(
    recipe: Recipe, stack: Stack, members: tuple[Tensor, ...], clock: Clock
) -> tuple[float, Trained]:
    """Seconds for all copies at once."""
    start, began = stack.start.expand(len(members), -1), clock()
    found = recipe.train(Objective(stack, members), start, 0, silent)
    return clock() - began, found


def summary(seconds: float, with_fit: float, found: Trained) -> dict[str, Any]:
    """Time a copy, gradients it took, and how near it came to the norm asked for."""
    share, copies = found.gradient_norm / found.wanted_norm, len(found.flat)
    return {
        "seconds_per_copy": seconds / copies,
        "seconds_per_copy_with_fit": with_fit / copies,
        "evaluations": float(found.evaluations.double().mean()),
        "converged": float((share <= 1).double().mean()),
        "worst": float(share.max()),
    }


def measure(
    setting: Setting, model: nn.Module, data: Data, seed: int, way: Way, with_lbfgs: bool
) -> dict[str, Any]:
    """All copies together by Newton; some, one at a time, by the same; a few by L-BFGS."""
    members = tuple(index[None] for index in _chosen(setting, seed))
    few = members[:FEW]
    torch.set_num_threads(way.threads)
    newton = Newton(relative_gradient=setting.tolerance)
    with state_preserved(model):
        stack = open_stack(model, data, Categorical(), PRIOR_PRECISION)
        fits = []
        for _ in range(REPEATS):
            began = way.clock()
            bound = newton.bind(model, Opener(data, Categorical()), PRIOR_PRECISION, False)
            fits.append(way.clock() - began)
        fit = statistics.median(fits)
        ways = {
            TOGETHER: _together(bound, stack, members, fit, way.clock),
            ALONE: _apart(bound, stack, members[: setting.separate], fit, way.clock),
        }
        if with_lbfgs:
            lbfgs = LBFGS(relative_gradient=setting.tolerance)
            ways[f"lbfgs, {FEW} together"] = _together(lbfgs, stack, few, 0.0, way.clock)
            ways["lbfgs, one at a time"] = _apart(lbfgs, stack, few, 0.0, way.clock)
    return {
        "seconds_of_the_fit": fit,
        "ratio": ways[ALONE]["seconds_per_copy"] / ways[TOGETHER]["seconds_per_copy"],
        "ratio_with_fit": ways[ALONE]["seconds_per_copy_with_fit"]
        / ways[TOGETHER]["seconds_per_copy_with_fit"],
        "ways": ways,
    }


def _chosen(setting: Setting, seed: int) -> Tensor:
    """The left-out examples."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(setting.examples, generator=generator)[: setting.copies]


def called(setting: Setting, model: nn.Module, data: Data, seed: int) -> dict[str, float]:
    """Seconds of a call for all examples, and of calls for one each."""
    torch.set_num_threads(WAYS["wall"].threads)
    chosen = _chosen(setting, seed)

    def seconds(indices: Tensor) -> float:
        newton, began = Newton(relative_gradient=setting.tolerance), time.perf_counter()
        given = model, data, indices
        retrain(*given, train=newton, prior_precision=PRIOR_PRECISION, progress=False)
        return time.perf_counter() - began

    whole = statistics.median(seconds(chosen) for _ in range(REPEATS))
    single = statistics.mean(seconds(index[None]) for index in chosen[:CALLS])
    return {"all": whole, "one": single, "ratio": len(chosen) * single / whole}


def _together(
    recipe: Recipe, stack: Stack, members: tuple[Tensor, ...], fit: float, clock: Clock
) -> dict[str, Any]:
    runs = [together(recipe, stack, members, clock) for _ in range(REPEATS)]
    seconds = statistics.median(seconds for seconds, _ in runs)
    return summary(seconds, seconds + fit, runs[0][1])


def _apart(
    recipe: Recipe, stack: Stack, members: tuple[Tensor, ...], fit: float, clock: Clock
) -> dict[str, Any]:
    alone = [together(recipe, stack, (index,), clock) for index in members]
    parts = [summary(seconds, seconds + fit, found) for seconds, found in alone]
    mean = {k: sum(part[k] for part in parts) / len(parts) for k in parts[0]}
    return {**mean, "worst": max(part["worst"] for part in parts)}


def measured(setting: Setting, seed: int, with_lbfgs: bool) -> dict[str, Any]:
    """One training, timed in each way."""
    data = images(setting.examples).first(setting.examples)
    torch.set_num_threads(1)
    model, norm = trained(data, seed)
    found = {
        name: measure(setting, model, data, seed, way, with_lbfgs and name == "processor")
        for name, way in WAYS.items()
    }
    calls = called(setting, model, data, seed)
    return {"gradient_norm_of_the_trained_net": norm, **found, "calls": calls}


def page(record: dict[str, Any]) -> str:
    """The Markdown page."""
    setting, trainings = record["setting"], record["trainings"]
    return f"""# Retraining

{setting["copies"]} leave-one-out copies of an MLP(32, 16) on {setting["examples"]:,} images
({record["data"]}), prior precision {PRIOR_PRECISION:g}, each until its gradient norm is
{setting["tolerance"]:g} of the norm of its left-out example's gradient. Wanted is simple code,
about {WANTED:g} times faster than a loop of separate trainings with the same recipe ("newton, one
at a time"), each with its own fit of the posterior. The net is trained {len(trainings)} times, from
seeds {_listed(setting["seeds"])}, and the smallest ratio counts. The loop is timed on
{setting["separate"]} of the copies, those of `lbfgs` on {FEW} with the first seed, and their mean
time a copy is taken as that of all;
what is together is the median of {REPEATS} runs. `newton` needs the posterior, which is fitted once
for all copies together, and once for each copy where it is a training by itself. Times are without
and with it. Both rows of `newton` run the same code, with Hessian products that are in the time and
not in the count of gradients. "Worst norm" is the largest gradient norm reached, in units of the
one asked for. {conditions(record["environment"])}
Written by `python -m benchmarks.retraining`.

{"".join(_section(way, name, trainings) for name, way in WAYS.items())}## Calls of `engram.retrain`

{_calls(trainings)}

A call also trains with everything again, three times, for the baseline and the noise floor, and
reads and checks the data. Wall-clock time, two threads; the loop is timed on {CALLS} calls.

Stacking alone gives little on a processor (compare the two rows of `lbfgs`). The gain of `newton`
is that directions in which the Hessian is known serve every copy. What a copy by itself cannot use
is also the second thread: its products are small.
"""


def _section(way: Way, name: str, trainings: dict[str, dict[str, Any]]) -> str:
    """The table of one clock, and its smallest ratios."""
    found = {seed: training[name] for seed, training in trainings.items()}
    plain, fitted = (min(one[key] for one in found.values()) for key in ("ratio", "ratio_with_fit"))
    fits = [one["seconds_of_the_fit"] for one in found.values()]
    return f"""## {way.title}

{_ways(found)}

The fit takes {min(fits):.2f} to {max(fits):.2f} s. The smallest ratio with it is {times(fitted)};
without it, {times(plain)}.

"""


def _calls(trainings: dict[str, dict[str, Any]]) -> str:
    header = ["seed", "one call for all", "a call for one", "a loop of such calls takes"]
    rows = [
        [seed, f"{c['all']:.1f} s", f"{c['one']:.2f} s", f"{times(c['ratio'])} times as long"]
        for seed, c in ((seed, training["calls"]) for seed, training in trainings.items())
    ]
    return table(header, rows)


def _ways(trainings: dict[str, dict[str, Any]]) -> str:
    header = [
        *("seed", "way", "a copy", "times together", "a copy, with the fit", "times together"),
        *("gradients", "converged", "worst norm"),
    ]
    rows = []
    for seed, training in trainings.items():
        best = training["ways"][TOGETHER]
        for name, found in training["ways"].items():
            rows.append([seed, name, *_cells(found, best)])
    return table(header, rows)


def _cells(found: dict[str, float], best: dict[str, float]) -> list[str]:
    return [
        f"{found['seconds_per_copy']:.3f} s",
        times(found["seconds_per_copy"] / best["seconds_per_copy"]),
        f"{found['seconds_per_copy_with_fit']:.3f} s",
        times(found["seconds_per_copy_with_fit"] / best["seconds_per_copy_with_fit"]),
        f"{found['evaluations']:.1f}",
        f"{found['converged']:.0%}",
        f"{found['worst']:.2f}",
    ]


def _listed(seeds: tuple[int, ...]) -> str:
    return ", ".join(map(str, seeds))


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.retraining", description=__doc__)
    parser.add_argument("--examples", type=int, default=5000)
    parser.add_argument("--copies", type=int, default=100)
    parser.add_argument("--tolerance", type=float, default=0.05)
    parser.add_argument("--separate", type=int, default=100, help="copies timed one at a time")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of trainings")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the two files")
    chosen = parser.parse_args()
    setting = Setting(
        chosen.examples, chosen.copies, chosen.tolerance, chosen.separate, tuple(chosen.seeds)
    )
    record: dict[str, Any] = {
        "environment": environment(chosen.seeds[0]),
        "data": images(1).source,
        "setting": vars(setting),
        "trainings": {
            str(seed): measured(setting, seed, with_lbfgs=place == 0)
            for place, seed in enumerate(setting.seeds)
        },
    }
    write(chosen.output, "retraining", record, page(record))
    print(page(record))


if __name__ == "__main__":
    main()
