"""The plain loss of the trained net: no library, and the least that any method must beat."""

from __future__ import annotations

from torch.nn import functional

from benchmarks.faithfulness.estimates import Estimate, Method
from benchmarks.faithfulness.truths import Problem


def loss(problem: Problem) -> Estimate:
    """Cross-entropy in nats; it says nothing about the increase."""
    targets = problem.targets[problem.left_out]
    return Estimate(functional.cross_entropy(problem.outputs(), targets, reduction="none"))


METHODS: dict[str, Method] = {"plain loss": loss}
