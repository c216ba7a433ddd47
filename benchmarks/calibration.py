"""Size and order of leave-one-out estimates before and after calibration and refining."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import engram
from benchmarks.calibration_page import page
from benchmarks.converged import PROBLEMS, Problem, Truth, truth
from benchmarks.records import RESULTS, write
from benchmarks.timing import environment
from engram.engine.session import session
from engram.linalg.kronecker import KroneckerBlock
from engram.posteriors.calibration import fitted_trace
from engram.posteriors.gaussian import Posterior

STRUCTURES = ("full", "kronecker", "diagonal")
BATCH_SIZE = 256


def pearson(a: Tensor, b: Tensor) -> float:
    """Correlation of the values."""
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


def ranks(values: Tensor) -> Tensor:
    """0 for the smallest."""
    return values.argsort().argsort().double()


def held_against(problem: Problem, known: Truth, result: engram.Result) -> dict[str, float]:
    """The result's scores and loss increases against the true ones."""
    likelihood, targets = problem.likelihood, known.data[1][known.left_out]

    def of(deviation: Tensor) -> tuple[Tensor, Tensor]:
        moved = known.outputs + deviation
        score = (likelihood.mean(moved) - likelihood.mean(known.outputs)).abs().sum(1)
        return score, likelihood.loss(moved, targets) - likelihood.loss(known.outputs, targets)

    true_score, true_increase = of(known.without - known.outputs)
    score, increase = of(result.deviation[known.left_out])
    return {
        "score_spearman": pearson(ranks(score), ranks(true_score)),
        "score_pearson": pearson(score, true_score),
        "increase_pearson": pearson(increase, true_increase),
        "increase_ratio": float(increase.mean() / true_increase.mean()),
    }


class Study:
    """One problem with its truth."""

    def __init__(self, problem: Problem, known: Truth) -> None:
        self.problem, self.known = problem, known

    def estimate(self, posterior: Posterior, estimator: str) -> engram.Result:
        """Sensitivities of all examples."""
        return engram.sensitivities(
            self.known.model, self.known.data, posterior, estimator=estimator, progress=False
        )

    def calibrated(self, posterior: Posterior, match: str) -> Posterior:
        """Against the exact Hessian."""
        return engram.calibrate(
            self.known.model, self.known.data, posterior, match=match, progress=False
        )

    def curvature_scaled(self, posterior: Posterior, target: float) -> Posterior:
        """delta + c (S - delta) with the wanted trace, by bisection."""
        low, high = 1e-2, 1e3
        delta = posterior.prior_precision
        found = posterior
        with session(
            self.known.model, self.known.data, self.problem.likelihood, progress=False
        ) as s:
            for _ in range(25):
                middle = (low * high) ** 0.5
                found = replace(
                    posterior,
                    blocks=tuple(
                        KroneckerBlock(
                            b.layout, middle * (b.precision - delta) + delta, b.rows, b.columns
                        )
                        for b in posterior.blocks
                        if isinstance(b, KroneckerBlock)
                    ),
                )
                if fitted_trace(s, found, "errors") > target:
                    low = middle
                else:
                    high = middle
        return found

    def refined(self, result: engram.Result, posterior: Posterior, **how: Any) -> engram.Result:
        """Some examples again."""
        return engram.refine(
            self.known.model, self.known.data, result, posterior, **how, progress=False
        )

    def ways(self, structure: str) -> dict[str, Any]:
        """Everything that is compared for a structure."""
        posterior = engram.laplace(
            self.known.model,
            self.known.data,
            structure=structure,
            prior_precision=self.problem.prior_precision,
            likelihood=self.problem.likelihood,
            progress=False,
        )
        seconds, errors = timed(lambda: self.calibrated(posterior, "errors"))
        leverages = self.calibrated(posterior, "leverages")
        record: dict[str, Any] = errors.settings["calibration"]  # type: ignore[assignment]
        best = self.estimate(errors, "corrected")
        found = {
            "linear": self.estimate(posterior, "linear"),
            "corrected": self.estimate(posterior, "corrected"),
            "leverages matched, linear": self.estimate(leverages, "linear"),
            "leverages matched, corrected": self.estimate(leverages, "corrected"),
            "errors matched, linear": self.estimate(errors, "linear"),
            "errors matched, corrected": best,
        }
        if structure != "full":
            part = self.curvature_scaled(posterior, record["trace"])
            found["errors matched in the curvature alone, corrected"] = self.estimate(
                part, "corrected"
            )
        if structure == "kronecker":
            found["downdated"] = self.estimate(posterior, "downdated")
            chosen = self.known.left_out
            found["default examples retrained"] = self.refined(best, errors, method="retrain")
            found["every example, Gauss-Newton solve"] = self.refined(
                best, errors, indices=chosen, curvature="ggn"
            )
            found["every example, Hessian solve"] = self.refined(best, errors, indices=chosen)
        compared = {k: held_against(self.problem, self.known, r) for k, r in found.items()}
        cost = {"seconds": seconds, "epochs": seconds / self.epoch_seconds()}
        return {"ways": compared, "calibration": {**record, **cost}}

    def exact(self) -> dict[str, Any]:
        """The full Hessian with two rules for the remaining data; the second is the default."""
        posterior = engram.laplace(
            self.known.model,
            self.known.data,
            structure="full",
            curvature="hessian",
            prior_precision=self.problem.prior_precision,
            likelihood=self.problem.likelihood,
            progress=False,
        )
        found = {rule: self.estimate(posterior, rule) for rule in ("corrected", "newton")}
        return {"ways": {k: held_against(self.problem, self.known, r) for k, r in found.items()}}

    def epoch_seconds(self) -> float:
        """A gradient over all data in batches, as training computes it."""
        model, (inputs, targets) = self.known.model, self.known.data

        def epoch() -> None:
            for x, y in zip(inputs.split(BATCH_SIZE), targets.split(BATCH_SIZE), strict=True):
                loss = self.problem.likelihood.loss(model(x), y).sum()
                torch.autograd.grad(loss, list(model.parameters()))

        return min(timed(epoch)[0] for _ in range(5))


def timed(task: Callable[[], Any]) -> tuple[float, Any]:
    """Processor time and what came out."""
    start = time.process_time()
    result = task()
    return time.process_time() - start, result


def measure(name: str, count: int, seed: int) -> dict[str, Any]:
    """All structures of one problem."""
    problem = PROBLEMS[name]
    known = truth(problem, count, seed)
    study = Study(problem, known)
    found = {structure: study.ways(structure) for structure in STRUCTURES}
    found["full Hessian"] = study.exact()
    return {
        "num_data": len(known.data[0]),
        "num_params": sum(p.numel() for p in known.model.parameters()),
        "smallest_eigenvalue": known.smallest_eigenvalue,
        "gradient_norm": known.gradient_norm,
        "structures": found,
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calibration", description=__doc__)
    parser.add_argument("--refits", type=int, default=150, help="true leave-one-out refits")
    parser.add_argument("--problems", nargs="*", choices=list(PROBLEMS), default=list(PROBLEMS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the two files")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {
        "environment": environment(chosen.seed),
        "refits": chosen.refits,
        "problems": {},
    }
    for name in chosen.problems:
        record["problems"][name] = measure(name, chosen.refits, chosen.seed)
        write(chosen.output, "calibration", record, page(record))
        print(name, "done", flush=True)


if __name__ == "__main__":
    main()
