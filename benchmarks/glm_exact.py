"""Leave-one-out losses of generalised linear models against refits of every example.

On tables that come with scikit-learn and statsmodels: what each rule gives over the truth, what the
result says of itself, and how far early stops take a fit from what its verdict tolerates.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import statsmodels.api as sm
import torch
from scipy.stats import spearmanr
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from sklearn.linear_model import LogisticRegression, PoissonRegressor

import engram
from benchmarks.records import RESULTS, conditions, table, write
from benchmarks.timing import environment
from benchmarks.trust.practical.fit import (
    BAD_RANKING,
    BAD_SIZE,
    GOOD_RANKING,
    GOOD_SIZE,
    is_bad,
    is_good,
)
from benchmarks.trust.practical.page import share
from engram import models
from engram.errors import SeparationError

RULES = ("exact", "corrected", "iterated", "linear")
BINARY_LINKS = ("logit", "probit", "cloglog", "loglog", "cauchit")


@dataclass(frozen=True)
class Problem:
    """A table, a response and a penalty."""

    name: str
    inputs: np.ndarray
    targets: np.ndarray
    response: str
    link: str
    penalty: float

    def fit(self) -> models.Fit:
        return models.fit_glm(
            self.inputs, self.targets, self.response, link=self.link, penalty=self.penalty
        )


def scaled(values: Any, rows: slice = slice(None)) -> np.ndarray:
    """Columns of mean 0 and deviation 1, constant ones dropped."""
    matrix = np.asarray(values, dtype=float)[rows]
    matrix = matrix[:, matrix.std(0) > 0]
    return (matrix - matrix.mean(0)) / matrix.std(0)


def problems() -> Iterator[Problem]:
    """From far from separation to near it, and responses other than classes."""
    inputs, labels = load_breast_cancer(return_X_y=True)
    for link in BINARY_LINKS:
        for penalty in (0.01, 0.1, 1.0, 10.0, 100.0):
            name = f"breast cancer, {link}, {penalty:g}"
            yield Problem(name, scaled(inputs), labels, "bernoulli", link, penalty)
    inputs, labels = load_digits(return_X_y=True)
    some = np.isin(labels, (3, 8))
    for link in BINARY_LINKS[:3]:
        for penalty in (0.1, 1.0, 10.0):
            name = f"digits 3 and 8, {link}, {penalty:g}"
            yield Problem(name, scaled(inputs[some]), labels[some] == 8, "bernoulli", link, penalty)
    inputs, values = load_diabetes(return_X_y=True)
    for response, link in (
        ("gamma", "log"),
        ("gamma", "inverse"),
        ("inverse_gaussian", "log"),
        ("gaussian", "log"),
    ):
        yield Problem(f"diabetes, {response} {link}", scaled(inputs), values, response, link, 0.0)
    few = slice(0, 60)
    for link in BINARY_LINKS[:2]:
        above = values[few] > 140
        yield Problem(f"60 of diabetes, {link}", scaled(inputs, few), above, "bernoulli", link, 0.0)
    yield from _of_statsmodels()


def _of_statsmodels() -> Iterator[Problem]:
    affairs, visits = sm.datasets.fair.load_pandas(), sm.datasets.randhie.load_pandas()
    counts = np.round(affairs.endog.to_numpy()[:600])
    part = slice(None, None, 40)
    for response in ("poisson", "negative_binomial"):
        inputs = scaled(affairs.exog, slice(0, 600))
        yield Problem(f"affairs, {response}", inputs, counts, response, "log", 0.0)
        inputs = scaled(visits.exog, part)
        number = visits.endog.to_numpy()[part]
        yield Problem(f"doctor visits, {response}", inputs, number, response, "log", 0.0)
    votes, punished = sm.datasets.scotland.load_pandas(), sm.datasets.cpunish.load_pandas()
    for link in ("log", "inverse"):
        inputs, share = scaled(votes.exog), votes.endog.to_numpy()
        yield Problem(f"Scotland, gamma {link}", inputs, share, "gamma", link, 0.0)
    for penalty in (0.0, 1.0):
        inputs, number = scaled(punished.exog), punished.endog.to_numpy()
        yield Problem(
            f"executions, poisson, {penalty:g}", inputs, number, "poisson", "log", penalty
        )
    grades = sm.datasets.spector.load_pandas()
    for link in BINARY_LINKS[:2]:
        inputs, better = scaled(grades.exog), grades.endog.to_numpy()
        yield Problem(f"grades, {link}", inputs, better, "bernoulli", link, 0.0)


def truth(fit: models.Fit) -> torch.Tensor:
    """The loss of every example under the fit without it."""
    losses = []
    for i in range(len(fit.targets)):
        try:
            again = fit.moved_without([i])
        except SeparationError:
            losses.append(math.inf)
            continue
        output = fit.objective.design.rows(torch.tensor([i])).outputs(again.coefficients)
        losses.append(float(fit.likelihood.loss(output, fit.targets[i : i + 1])))
    return torch.tensor(losses, dtype=torch.float64)


def measured(problem: Problem) -> dict[str, Any]:
    """Every rule's mean loss over the true one, and what its result says."""
    fit = problem.fit()
    start = time.process_time()
    true = truth(fit)
    spent = time.process_time() - start
    record: dict[str, Any] = {
        "problem": problem.name,
        "examples": len(true),
        "largest leverage": float(fit.leverage.max()),
        "true": float(true.mean()),
        "seconds of all refits": spent,
    }
    for rule in RULES:
        start = time.process_time()
        result = models.sensitivities_of(fit, estimator=rule, progress=False)
        same = torch.where(true == result.loo_loss, 0.0, (result.loo_loss - true).abs())
        record[rule] = {
            "ranking": float(spearmanr(result.loo_loss, true).statistic),
            "size": _size(result, true),
            "over true": result.loo_nll / float(true.mean())
            if result.loo_nll != true.mean()
            else 1.0,
            "error": float(same.sum() / true.abs().sum()),
            "said": result.diagnostics.step_error,
            "verdict": result.verdict.level,
            "refits": int(result.obtained.count_nonzero()),
            "seconds": time.process_time() - start,
        }
    return record


def _size(result: engram.Result, true: torch.Tensor) -> float:
    """Estimated over true increase; 1 where both are infinite."""
    ours, theirs = (float((losses - result.loss).mean()) for losses in (result.loo_loss, true))
    return 1.0 if ours == theirs else ours / theirs


def rates(problems: list[dict[str, Any]]) -> list[list[str]]:
    """Of every rule, how often its verdict is right, by what is good and bad of stopped nets."""
    lines = []
    for rule in RULES:
        rows = [found[rule] for found in problems]
        bad, good = ([r["verdict"] for r in rows if holds(r)] for holds in (is_bad, is_good))
        called = [r for r in rows if r["verdict"] == "good"]
        lines.append(
            [
                rule,
                share(bad, lambda n, of=bad: of[n] != "good"),
                share(good, lambda n, of=good: of[n] != "good"),
                share(called, lambda n, of=called: is_good(of[n])),
            ]
        )
    return lines


def early_stops() -> list[dict[str, Any]]:
    """The Newton decrement of fits that stopped early, and the error of their leave-one-out."""
    inputs, labels = load_breast_cancer(return_X_y=True)
    counts = sm.datasets.randhie.load_pandas()
    part = slice(None, None, 40)
    tables = {
        "breast cancer, C=1": (LogisticRegression(), scaled(inputs), labels),
        "breast cancer, C=1e-2": (LogisticRegression(C=1e-2), scaled(inputs), labels),
        "doctor visits, alpha=1e-3": (
            PoissonRegressor(alpha=1e-3),
            scaled(counts.exog, part),
            counts.endog.to_numpy()[part],
        ),
    }
    records = []
    for name, (model, rows, targets) in tables.items():
        model.set_params(max_iter=10_000, tol=1e-10)
        best = engram.from_estimator(model.fit(rows, targets), rows, targets)
        for steps in (1, 2, 3, 5, 8, 12, 20, 50):
            result = engram.from_estimator(
                model.set_params(max_iter=steps).fit(rows, targets), rows, targets
            )
            records.append(
                {
                    "problem": name,
                    "iterations": steps,
                    "decrement": result.diagnostics.relative_gradient,
                    "loss over converged": result.loo_nll / best.loo_nll,
                    "verdict": result.verdict.level,
                }
            )
    return records


TEXT = """\
Each rule's mean leave-one-out loss over that of refits of every example, and the verdict of its
result. `error` is the sum of absolute errors of single losses over the sum of the losses, `said`
what the result of one Newton step says it is; the thresholds of the verdict on it are 0.15
(caution) and 0.35 (unreliable). The largest error of the mean by `exact` is"""
VERDICTS = f"""\
How often verdicts are right: *bad* are increases of the loss off by more than {BAD_SIZE:g} times,
or a rank correlation of leave-one-out losses with refits below {BAD_RANKING:g}; *good* are
increases within {GOOD_SIZE:g} times and a correlation from {GOOD_RANKING:g} on."""
STOPS = """\
Fits of scikit-learn stopped after some iterations: the Newton decrement in standard deviations of
the posterior (caution above 0.03, unreliable above 0.1), and the mean leave-one-out loss over that
of the converged fit."""


def page(record: dict[str, Any]) -> str:
    found = record["problems"]
    worst = max(abs(r["exact"]["over true"] - 1) for r in found)
    header = ["problem (link, penalty)", "N", "largest leverage", "true mean loss", *RULES]
    stops = ["problem", "iterations", "decrement", "loss over converged", "verdict"]
    return "\n".join(
        [
            "# Leave-one-out of generalised linear models against refits",
            "",
            conditions(record["environment"]),
            "Written by `python -m benchmarks.glm_exact`.",
            "",
            f"{TEXT} {worst:.1e}.",
            "",
            table([*header, "error, one step", "said", "refits"], [_row(r) for r in found]),
            "",
            VERDICTS,
            "",
            table(["rule", "bad flagged", "good flagged", "called good and is"], rates(found)),
            "",
            "## Early stops",
            "",
            STOPS,
            "",
            table(stops, [_stop(r) for r in record["early stops"]]),
        ]
    )


def _row(found: dict[str, Any]) -> list[str]:
    rules = [found[rule] for rule in RULES]
    return [
        found["problem"],
        f"{found['examples']}",
        f"{found['largest leverage']:.2f}",
        f"{found['true']:.4g}",
        *[f"{rule['over true']:.3f} ({rule['verdict']})" for rule in rules],
        f"{found['corrected']['error']:.3f}",
        f"{found['corrected']['said']:.3f}",
        f"{found['exact']['refits']}",
    ]


def _stop(found: dict[str, Any]) -> list[str]:
    return [
        found["problem"],
        f"{found['iterations']}",
        f"{found['decrement']:.1e}",
        f"{found['loss over converged']:.4f}",
        found["verdict"],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    folder = parser.parse_args().out
    warnings.simplefilter("ignore")  # early stops say that they are
    record: dict[str, Any] = {"environment": environment(0)}
    record["problems"] = [measured(problem) for problem in problems()]
    record["early stops"] = early_stops()
    write(folder, "glm_exact", record, page(record))


if __name__ == "__main__":
    main()
