"""Losses without a derivative: the deviation of every example against fitting without it."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.records import RESULTS, conditions, table, write
from benchmarks.timing import environment
from engram.likelihoods import Absolute, Hinge, Quantile, ZeroOne
from engram.models.variational.linear import fit_variational_linear

EXAMPLES, WEIGHTS = 80, 5
LOSSES = {
    "hinge": Hinge(),
    "perceptron": Hinge(margin=0.0),
    "absolute": Absolute(),
    "0.9-quantile": Quantile(0.9),
    "0-1": ZeroOne(),
}
OF_LABELS = ("hinge", "perceptron", "0-1")
ESTIMATORS = ("linear", "corrected", "response")


def problem(name: str, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and noisy labels or real targets of a linear function."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(EXAMPLES, WEIGHTS, generator=generator, dtype=torch.float64)
    outputs = inputs @ torch.randn(WEIGHTS, generator=generator, dtype=torch.float64)
    noise = torch.randn(EXAMPLES, generator=generator, dtype=torch.float64)
    if name in OF_LABELS:
        return inputs, torch.sign(outputs + 0.8 * noise)
    return inputs, outputs + 0.6 * noise


def measure(name: str, seed: int) -> dict[str, Any]:
    """Relative error and correlation of the deviations, rule by rule."""
    inputs, targets = problem(name, seed)
    fitted = fit_variational_linear(inputs, targets, LOSSES[name])
    truth, unsettled = torch.zeros(EXAMPLES, dtype=torch.float64), 0
    for i in tqdm(range(EXAMPLES), name, leave=False):
        kept = torch.arange(EXAMPLES) != i
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            again = fit_variational_linear(inputs[kept], targets[kept], LOSSES[name])
        unsettled += bool(seen)
        truth[i] = inputs[i] @ (again.mean - fitted.mean)[0]
    found: dict[str, Any] = {"unsettled": unsettled}
    for rule in ESTIMATORS:
        estimate = fitted.sensitivities(rule).deviation[:, 0].double()
        error = float((estimate - truth).norm() / truth.norm())
        found[rule] = {"error": error, "correlation": float(_correlation(estimate, truth))}
    return found


def _correlation(a: Tensor, b: Tensor) -> Tensor:
    return torch.corrcoef(torch.stack([a, b]))[0, 1]


def page(record: dict[str, Any]) -> str:
    """The Markdown page."""
    rows = []
    for name, found in record["losses"].items():
        cells = [f"{found[r]['error']:.2f}, {found[r]['correlation']:.3f}" for r in ESTIMATORS]
        rows.append([name, *cells, str(found["unsettled"])])
    header = ["loss", *ESTIMATORS, "refits that did not settle"]
    return f"""# Losses without a derivative

A variational linear model with {WEIGHTS} weights, fitted to {EXAMPLES} examples. The deviation of
every example's output, by each rule, against fitting again from scratch without the example:
relative error and correlation over the examples. {conditions(record["environment"])}
Written by `python -m benchmarks.nondifferentiable`.

{table(header, rows)}
"""


def main() -> None:
    """Measure loss by loss."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.nondifferentiable")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    record = {
        "environment": environment(chosen.seed),
        "losses": {name: measure(name, chosen.seed) for name in LOSSES},
    }
    write(chosen.output, "nondifferentiable", record, page(record))
    print(page(record))


if __name__ == "__main__":
    main()
