"""Families: leave-one-out for every example, and removing a group, as multiples of one fit."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.records import RESULTS, conditions, table, times, write
from benchmarks.timing import CLOCKS, environment, interleaved, ratio
from engram import families
from engram.families import Family

SEED = 0
GROUP = 1000


def problems(num_data: int) -> dict[str, tuple[Family, Any]]:
    """A family of a usual size and as many examples as asked for."""
    random = np.random.default_rng(SEED)
    vectors = random.normal(size=(num_data, 10))
    component = families.NormalInverseWishart(np.zeros(10))
    transition = [[0.9, 0.1], [0.0, 0.8]]
    chain = families.LinearStateSpace(num_data, transition, 1.0, [[1.0, 0.0]], 1.0, [0.0, 0.0])
    inputs = random.normal(size=(num_data, 200))
    numbers, shares = random.normal(size=num_data), random.dirichlet([1, 1, 1], num_data)
    return {
        "Beta-Bernoulli": (families.BetaBernoulli(), random.integers(0, 2, num_data)),
        "Gamma-Poisson": (families.GammaPoisson(), random.poisson(2.0, num_data)),
        "Gamma-exponential": (families.GammaExponential(), random.exponential(1.0, num_data)),
        "Dirichlet-categorical, 1000 classes": (
            families.DirichletCategorical(np.ones(1000)),
            random.integers(0, 1000, num_data),
        ),
        "Normal, known variance": (families.NormalKnownVariance(), numbers),
        "Normal-inverse-Gamma": (families.NormalInverseGamma(), numbers),
        "Normal-inverse-Wishart, 10 dimensions": (component, vectors),
        "linear regression, 200 inputs": (families.LinearRegression(200), (inputs, numbers)),
        "Gaussian mixture, 3 of 10 dimensions": (
            families.GaussianMixture([1.0, 1.0, 1.0], component),
            (vectors, shares),
        ),
        "state space, 2 states": (chain, numbers[:, None]),
        "probabilistic PCA, 3 of 10 dimensions": (
            families.ProbabilisticPCA(10, 3, progress=False),
            vectors,
        ),
    }


def tasks(family: Family, data: Any) -> dict[str, Callable[[], object]]:
    """What is timed, in turns."""
    posterior = family.fit(data)
    return {
        "fit": lambda: family.fit(data),
        "loo": posterior.loo_log_predictive,
        "remove": lambda: posterior.remove(range(min(GROUP, posterior.num_data // 2))),
    }


def main() -> None:
    """Measure and write docs/results/families."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    record: dict[str, Any] = {"environment": environment(SEED), "seconds": {}}
    rows = []
    for name, (family, data) in problems(chosen.examples).items():
        seconds = interleaved(tasks(family, data), chosen.rounds, chosen.clock)
        record["seconds"][name] = seconds
        loo, removal = (times(ratio(seconds[task], seconds["fit"])) for task in ("loo", "remove"))
        rows.append((name, f"{median(seconds['loo']):.3f}", loo, removal))
    header = ("family", "leave-one-out, seconds", "over a fit", f"removing {GROUP:,}, over a fit")
    page = f"""# Families: every example left out

Leave-one-out log predictive densities of all {chosen.examples:,} examples, and the posterior
without {GROUP:,} of them, in turns with fitting once; medians of {chosen.rounds} rounds,
{chosen.clock} clock. {conditions(record["environment"])}
Written by `python -m benchmarks.families`.

{table(header, rows)}

Refitting without each example would be {chosen.examples:,} fits. The chain is as long as there are
examples. Probabilistic PCA takes an eigendecomposition per example."""
    write(chosen.folder, "families", record, page)


if __name__ == "__main__":
    main()
