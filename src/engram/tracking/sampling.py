r"""Sensitivities as expectations over the posterior, by sampled weights.

The equation asks for :math:`\mathbb{E}_q[\nabla \ell_i]`; at the mean that is one gradient, and
over samples :math:`\theta_s \sim q` the average deviation
:math:`\frac{1}{S} \sum_s J_i(\theta_s) S^{-1} J_i(\theta_s)' e_i(\theta_s)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from engram.arguments import whole
from engram.batches import Data
from engram.engine.prepare import device_of
from engram.likelihoods import Likelihood
from engram.parameters import trainable
from engram.posteriors.gaussian import Posterior
from engram.sensitivity.estimators import displaced
from engram.sensitivity.examples import sensitivities
from engram.sensitivity.result import Result


@contextmanager
def weights(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Other weights while this lasts; the same tensors as before afterwards."""
    parameters = {name: p for name, p in trainable(model).items() if name in values}
    before = {name: p.data for name, p in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = values[name]
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = before[name]


def check_samples(samples: int) -> int:
    """A number of draws; 0 is the mean."""
    return whole("number of samples", samples, 0, remedy="use 8, or 0 for the mean")


def sampled_sensitivities(
    model: nn.Module,
    data: Data,
    posterior: Posterior,
    likelihood: Likelihood,
    samples: int,
    seed: int = 0,
    **settings: Any,
) -> Result:
    """Outputs at the mean, deviations averaged over weights drawn from the posterior.

    Args:
        model, data, posterior, likelihood: as for :func:`engram.sensitivities`.
        samples: S; each costs a pass. 0 takes the deviations at the mean too.
        seed: of the draws.
        settings: further arguments of :func:`engram.sensitivities`.
    """
    samples = check_samples(samples)
    at_mean = sensitivities(model, data, posterior, likelihood=likelihood, seed=seed, **settings)
    if samples == 0:
        return at_mean
    generator = torch.Generator(device=device_of(model)).manual_seed(seed)
    total, flagged = torch.zeros_like(at_mean.deviation), at_mean.flagged.clone()
    for _ in range(samples):
        draw = {name: d[0] for name, d in posterior.sample(1, generator).items()}
        with weights(model, draw):
            there = replace(posterior, mean=draw)
            found = sensitivities(model, data, there, likelihood=likelihood, seed=seed, **settings)
        total += found.deviation / samples
        flagged |= found.flagged
    prepared = likelihood.prepare(at_mean.outputs, at_mean.targets)
    change, loo_loss = displaced(likelihood, at_mean.outputs, prepared, total)
    described = dict(at_mean.provenance)
    described["settings"] = {**described["settings"], "samples": samples, "seed": seed}
    return replace(
        at_mean,
        deviation=total,
        prediction_deviation=change,
        score=change.abs().sum(1),
        loo_loss=loo_loss,
        flagged=flagged,
        provenance=described,
    )
