"""One run of the study: a posterior and an estimator on a solved problem, held against truth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from scipy.stats import pearsonr, spearmanr

import engram
from benchmarks.trust.truths import Solved
from engram.evidence.assess import measured
from engram.posteriors.gaussian import Posterior
from engram.trust import judge

BATCH_SIZE = 40  # of the optimizers whose state is read


def _laplace(structure: str, factor: float = 1.0) -> Callable[[Solved], Posterior]:
    def fit(solved: Solved) -> Posterior:
        return engram.laplace(
            solved.model,
            solved.data,
            likelihood=solved.problem.likelihood,
            structure=structure,
            prior_precision=factor * solved.problem.prior_precision,
            progress=False,
        )

    return fit


def _optimizer(kind: type[torch.optim.Optimizer]) -> Callable[[Solved], Posterior]:
    """The state that an optimizer has after two epochs here; at rate 0 nothing moves."""

    def read(solved: Solved) -> Posterior:
        optimizer = kind(solved.model.parameters(), lr=0.0)  # type: ignore[call-arg]
        inputs, targets = solved.data
        likelihood = solved.problem.likelihood
        generator = torch.Generator().manual_seed(0)
        for _ in range(2):
            for chosen in torch.randperm(len(inputs), generator=generator).split(BATCH_SIZE):
                outputs = solved.model(inputs[chosen])
                prepared = likelihood.prepare(outputs.detach(), targets[chosen])
                optimizer.zero_grad()
                likelihood.loss(outputs, prepared).mean().backward()
                optimizer.step()
        optimizer.zero_grad()
        delta = solved.problem.prior_precision
        return engram.posterior_of(
            optimizer,
            solved.model,
            num_data=len(inputs),
            likelihood=likelihood,
            prior_precision=delta,
        )

    return read


@dataclass(frozen=True)
class Way:
    """A posterior and an estimator; ``auto`` is the one that goes with the posterior."""

    name: str
    posterior: Callable[[Solved], Posterior]
    estimator: str = "linear"


WAYS = (
    Way("no options", _laplace("auto"), "auto"),
    Way("full", _laplace("full")),
    Way("full, corrected", _laplace("full"), "corrected"),
    Way("kronecker", _laplace("kronecker")),
    Way("kronecker, downdated", _laplace("kronecker"), "downdated"),
    Way("diagonal", _laplace("diagonal")),
    Way("Adam", _optimizer(torch.optim.Adam)),
    Way("SGD", _optimizer(torch.optim.SGD)),
    Way("kronecker, delta / 100", _laplace("kronecker", 0.01)),
    Way("full, delta x 100", _laplace("full", 100.0)),
)


def run(solved: Solved, way: Way) -> dict[str, Any]:
    """Truth, what every result carries, and what an assessment adds."""
    posterior = way.posterior(solved)
    result = engram.sensitivities(
        solved.model,
        solved.data,
        posterior,
        estimator=way.estimator,
        progress=False,
    )
    assessment = engram.assess(solved.model, solved.data, result, posterior, progress=False)
    chosen, true = solved.truth.indices, solved.truth.score
    estimated = result.score[chosen]
    return {
        "problem": solved.problem.name,
        "data": solved.problem.data,
        "way": way.name,
        "spearman": float(spearmanr(estimated, true).statistic),
        "pearson": float(pearsonr(estimated, true).statistic),
        "refits_converged": float(solved.truth.converged.double().mean()),
        "true_increase": float(solved.truth.increase.mean()),
        "estimated_increase": float((result.loo_loss - result.loss)[chosen].mean()),
        "diagnostics": rounded(result.diagnostics.to_dict()),
        "signals": rounded(judge.signals(result) | measured(assessment.signals)),
        "estimated": [rough(value) for value in estimated.tolist()],
        "true": [rough(value) for value in true.tolist()],
        "leverage": [rough(value) for value in result.leverage[chosen].tolist()],
    }


def rough(value: float) -> float:
    """Four digits, which is more than the study resolves."""
    return float(f"{value:.4g}")


def rounded(values: dict[str, Any]) -> dict[str, Any]:
    """The same for every number by name."""
    return {name: rough(value) for name, value in values.items()}
