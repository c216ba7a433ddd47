"""What the tolerance of a posterior changes, against everything exact."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

import engram
from benchmarks.data import train_and_test
from benchmarks.nets import build
from benchmarks.records import RESULTS, conditions, table, write
from benchmarks.timing import environment
from benchmarks.training import BATCH_SIZE, epoch
from engram.linalg.diagonal import DiagonalBlock
from engram.linalg.kronecker import KroneckerBlock
from engram.posteriors.tolerance import within

TOLERANCES = (0.1, 0.03, 0.01)
# net, training examples, epochs, prior precision: little and much trained, weak and strong prior
SETTINGS = (
    ("mlp", 60_000, 1, 60.0),
    ("mlp", 10_000, 20, 1.0),
    ("lenet5", 60_000, 1, 60.0),
    ("transformer", 10_000, 2, 60.0),
)
SCORED, SEEN = 2000, 300

Data = tuple[Tensor, Tensor]


def fit(
    model: nn.Module,
    data: Data,
    delta: float,
    structure: str = "kronecker",
    curvature: str = "fisher",
    tolerance: float | str = 0.0,
) -> engram.Posterior:
    """Everything exact if no tolerance is given; "auto" is the default of `engram.laplace`."""
    return engram.laplace(
        model,
        data,
        structure=structure,
        curvature=curvature,
        prior_precision=delta,
        tolerance=tolerance,
        batch_size=BATCH_SIZE,
        progress=False,
    )


def within_tolerance(posterior: engram.Posterior, tolerance: float) -> engram.Posterior:
    """As `engram.laplace` merges and thins."""
    blocks = within(posterior.blocks, posterior.prior_precision, tolerance)
    return replace(posterior, blocks=blocks)


def terms(posterior: engram.Posterior) -> str:
    """How many terms the thinned tables have, of the shorter side of each."""
    tables = (b for b in posterior.blocks if isinstance(b, DiagonalBlock))
    found = [
        f"{factors[0].shape[1]} of {min(len(factors[0]), len(factors[1]))}"
        for factors in (block.gain_factors for block in tables)
        if factors is not None
    ]
    return ", ".join(found) or "none"


def kept(posterior: engram.Posterior) -> float:
    """Multiplications for the rotations of wide layers, as a share of what exact ones take."""
    needed = whole = 0
    for block in posterior.blocks:
        if not isinstance(block, KroneckerBlock) or block.rows is None:
            continue
        outputs, inputs = block.precision.shape[1:]
        parts = block.clusters
        p, q = parts.both.shape if parts else (outputs, inputs)
        needed += 2 * outputs * p + inputs * q
        whole += 2 * outputs**2 + inputs**2
    return needed / whole


def observed(
    model: nn.Module, posterior: engram.Posterior, data: dict[str, Data]
) -> dict[str, Any]:
    """Scores of training examples, and prediction variances elsewhere."""
    result = engram.sensitivities(
        model, data["scored"], posterior, estimator="linear", progress=False
    )
    found: dict[str, Any] = {"score": result.score, "increase": result.loo_loss - result.loss}
    for name in ("test", "others", "noise"):
        variance = engram.prediction_variance(model, data[name], posterior, progress=False)
        found[name] = variance.diagonal(dim1=1, dim2=2).sum(1)
    return found


def compare(found: dict[str, Any], exact: dict[str, Any]) -> dict[str, float]:
    """Relative differences."""
    line = {
        "spearman": float(spearmanr(found["score"], exact["score"])[0]),
        "score": float((found["score"] - exact["score"]).norm() / exact["score"].norm()),
        "mean increase": float(found["increase"].mean() / exact["increase"].mean()),
    }
    for name in ("test", "others", "noise"):
        line[name] = float((found[name] - exact[name]).norm() / exact[name].norm())
    return line


def measure(net: str, count: int, epochs: int, delta: float, seed: int) -> dict[str, Any]:
    """Clustered eigenvalues, and the default as a whole, one row a way."""
    train, test = train_and_test("fmnist")
    others = train_and_test("mnist")[1]
    model = build(net, seed=seed)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(epochs):
        epoch(model, optimizer, train.first(count))
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(SEEN, *train.inputs.shape[1:], generator=generator)
    data = {
        "scored": train.first(SCORED),
        "test": test.first(SEEN),
        "others": others.first(SEEN),
        "noise": (noise, torch.zeros(SEEN, dtype=torch.long)),
    }
    fitted = partial(fit, model, train.first(count), delta)
    factors = fitted()
    sampled = observed(model, factors, data)
    corrected = observed(model, fitted(structure="ekfac"), data)
    rows = [{"way": "EK-FAC, nothing merged", **compare(corrected, sampled)}]
    for tolerance in TOLERANCES:
        short = within_tolerance(factors, tolerance)
        line = compare(observed(model, short, data), sampled)
        rows.append({"way": f"tolerance {tolerance}", "kept": kept(short), **line})
    diagonal = fitted(structure="diagonal")
    plain = observed(model, diagonal, data)
    thinned = []
    for tolerance in TOLERANCES:
        short = within_tolerance(diagonal, tolerance)
        line = compare(observed(model, short, data), plain)
        thinned.append({"way": f"tolerance {tolerance}", "terms": terms(short), **line})
    exact = observed(model, fitted(curvature="ggn"), data)
    default = observed(model, fitted(curvature="ggn", tolerance="auto"), data)
    whole = [
        {"way": "sampled Fisher, nothing merged", **compare(sampled, exact)},
        {"way": "default tolerance", **compare(default, exact)},
    ]
    return {"merged": rows, "thinned": thinned, "default": whole}


HEADER = ("score, Spearman", "score", "mean increase")
ELSEWHERE = ("variance, test set", "variance, MNIST", "variance, noise")


def cells(row: dict[str, Any]) -> list[str]:
    """Differences as a table shows them."""
    first = [f"{row['spearman']:.5f}", f"{row['score']:.2%}", f"{row['mean increase']:.3f}"]
    return first + [f"{row[name]:.2%}" for name in ("test", "others", "noise")]


def rows_of(record: dict[str, Any], part: str) -> list[list[str]]:
    """A setting's name stands in its first row only."""
    rows = []
    for setting in record["settings"]:
        name = f"{setting['net']}, N {setting['examples']:,}, {setting['epochs']} epochs, "
        name += f"delta {setting['prior_precision']:g}"
        for row in setting[part]:
            left = [row["terms"]] if part == "thinned" else []
            left += [f"{row.get('kept', 1.0):.0%}"] if part == "merged" else []
            rows.append([name, row["way"], *left, *cells(row)])
            name = ""
    return rows


def page(record: dict[str, Any]) -> str:
    """The Markdown page."""
    merged_header = ["net", "way", "rotations left", *HEADER, *ELSEWHERE]
    return f"""# What the tolerance costs

`engram.laplace(..., tolerance=...)` on Fashion-MNIST in single precision.
{conditions(record["environment"])} Written by `python -m benchmarks.tolerance`.

## Clustered eigenvalues

Against the same factors (sampled Fisher) with nothing merged: the multiplications left in rotating
vectors into the eigenbasis (one position), the rank correlation and relative difference of the
scores of {SCORED:,} training examples, their mean leave-one-out increase as a multiple, and the
relative difference of the summed prediction variance on {SEEN} test images, images of another data
set, and noise. EK-FAC, whose eigenvalues are corrected, shows how far off the factors are anyway.

{table(merged_header, rows_of(record, "merged"))}

## Thinned diagonals

A diagonal posterior (sampled Fisher) whose tables are taken as sums of a few products in layers at
one position, against the whole tables; *terms* are those of the layers that have such sums.

{table(["net", "way", "terms", *HEADER, *ELSEWHERE], rows_of(record, "thinned"))}

## The default as a whole

Kronecker factors of the exact curvature with the default tolerance, which merges eigenvalues and
samples the unlikely classes, against `tolerance=0`; beside it the sampled Fisher matrix.

{table(["net", "way", *HEADER, *ELSEWHERE], rows_of(record, "default"))}
"""


def main() -> None:
    """All settings."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tolerance", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the two files")
    chosen = parser.parse_args()
    settings = []
    for net, examples, epochs, delta in SETTINGS:
        described: dict[str, Any] = {
            "net": net,
            "examples": examples,
            "epochs": epochs,
            "prior_precision": delta,
        }
        settings.append(described | measure(net, examples, epochs, delta, chosen.seed))
        print(settings[-1])
    record = {"environment": environment(chosen.seed), "settings": settings}
    write(chosen.output, "tolerance", record, page(record))


if __name__ == "__main__":
    main()
