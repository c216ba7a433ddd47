"""Sensitivities of a model in training as expectations over its posterior."""

from __future__ import annotations

from typing import Any

from torch import nn

from engram.posteriors.gaussian import Posterior
from engram.problem import Opener
from engram.sensitivity.leave_one_out import sensitivities_again
from engram.sensitivity.result import Result
from engram.sensitivity.sampling import Sampling

__all__ = ["Sampling", "sampled_sensitivities"]


def sampled_sensitivities(
    opener: Opener, model: nn.Module, posterior: Posterior, sampling: Sampling, **settings: Any
) -> Result:
    """The sensitivities with the samples of a tracker; further arguments as there."""
    drawn: dict[str, Any] = {"samples": sampling.samples, "expectation": sampling.expectation}
    return sensitivities_again(opener, model, posterior, **drawn, **settings)
