r"""Sensitivities as expectations over the posterior, by sampled weights.

The equation asks for :math:`\mathbb{E}_q[\nabla \ell_i]`, and for the outputs at the mean m,

.. math:: d_i = J_i(m)\, S^{-1}\, \mathbb{E}_q[J_i(\theta)' e_i(\theta)],

in which only the gradient is averaged over samples :math:`\theta_s \sim q`. Averaging whole
deviations, :math:`J_i(\theta_s) S^{-1} J_i(\theta_s)' e_i(\theta_s)`, asks how far the outputs of
a sampled net would move; it is there under its own name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from engram.core.arguments import AUTO, MANY, is_auto, whole
from engram.core.data.batches import Batch
from engram.core.data.columns import Columns
from engram.core.memory import GRADIENT_BYTES
from engram.core.parameters import Layout, Named, trainable
from engram.core.state.model import device_of
from engram.engine.session import Session
from engram.errors import ArgumentError
from engram.posteriors.gaussian import Posterior
from engram.problem import Opener
from engram.sensitivity.estimators.base import displaced
from engram.sensitivity.estimators.paper import linearised
from engram.sensitivity.leave_one_out import sensitivities_again
from engram.sensitivity.provenance import noted
from engram.sensitivity.result import Result

GRADIENT, DEVIATION = "gradient", "deviation"


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


@dataclass(frozen=True)
class Sampling:
    """How many weights are drawn, and what is averaged over them.

    Args:
        samples: S; each costs a pass. 0 takes everything at the mean.
        expectation: ``gradient``, as the equation has it, or ``deviation``.
    """

    samples: int
    expectation: str = GRADIENT

    @classmethod
    def checked(cls, samples: int, expectation: str) -> Sampling:
        """The settings; ArgumentError where they have no meaning."""
        if expectation not in (GRADIENT, DEVIATION):
            raise ArgumentError(
                f'expectation "{GRADIENT}" or "{DEVIATION}"', repr(expectation), "leave it out"
            )
        remedy = "use 8, or 0 for the mean"
        return cls(whole("number of samples", samples, 0, MANY, remedy=remedy), expectation)

    def drawing(self, samples: int | None) -> Sampling:
        """The same with another number of samples, if one is given."""
        return self if samples is None else self.checked(samples, self.expectation)

    def rule(self, estimator: str) -> str:
        """The estimator, where the samples leave a choice: that of the equation is linear."""
        if not self.samples or self.expectation == DEVIATION:
            return estimator
        if estimator not in (AUTO, *PARTS):
            raise ArgumentError(
                f"estimator {' or '.join(PARTS)} with an expected gradient, which is that of no "
                "residual",
                f"{estimator!r} with samples={self.samples}",
                f'leave estimator out, or average deviations with expectation="{DEVIATION}"',
            )
        return "linear" if is_auto(estimator) else estimator


def sampled_sensitivities(
    opener: Opener,
    model: nn.Module,
    posterior: Posterior,
    sampling: Sampling,
    seed: int = 0,
    estimator: str = AUTO,
    **settings: Any,
) -> Result:
    """Outputs at the mean, and their deviation as an expectation over the posterior.

    Args:
        opener: of the model with its data.
        model, posterior: as for :func:`engram.sensitivities`.
        sampling: of what, and how many.
        seed: of the draws.
        estimator: as there; with the equation's form ``linear``, the default, or ``paper``.
        settings: further arguments of :func:`engram.sensitivities`.
    """
    rule = sampling.rule(estimator)
    settings |= {"seed": seed, "estimator": rule}
    at_mean = sensitivities_again(opener, model, posterior, **settings)
    if not sampling.samples:
        return at_mean
    draws = Draws(posterior, sampling.samples, seed, device_of(model))
    flagged = at_mean.flagged
    if sampling.expectation == GRADIENT:
        with opener.session(model, progress=False) as opened:
            deviation = _expected(opened, posterior, draws, PARTS[rule])
    else:
        deviation, flagged = _averaged(opener, model, draws, at_mean, settings)
    likelihood = opener.likelihood
    prepared = likelihood.prepare(at_mean.outputs, at_mean.targets)
    moved = linearised if rule == "paper" else displaced
    change, loo_loss = moved(likelihood, at_mean.outputs, prepared, deviation)
    drawn = {"samples": sampling.samples, "expectation": sampling.expectation, "seed": seed}
    return replace(
        at_mean,
        deviation=deviation,
        prediction_deviation=change,
        score=change.abs().sum(1),
        loo_loss=loo_loss,
        flagged=flagged,
        provenance=noted(at_mean.provenance, **drawn),
    )


@dataclass(frozen=True)
class Draws:
    """Weights from the posterior, made when they are asked for and the same every time."""

    posterior: Posterior
    samples: int
    seed: int
    device: torch.device

    def __iter__(self) -> Iterator[Named]:
        generator = torch.Generator(device=self.device).manual_seed(self.seed)
        for _ in range(self.samples):
            yield {name: d[0] for name, d in self.posterior.sample(1, generator).items()}


def _averaged(
    opener: Opener,
    model: nn.Module,
    draws: Draws,
    at_mean: Result,
    settings: Mapping[str, Any],
) -> tuple[Tensor, Tensor]:
    """The mean over draws of each one's own deviation, and what any of them flagged."""
    total, flagged = torch.zeros_like(at_mean.deviation), at_mean.flagged.clone()
    for draw in draws:
        with weights(model, draw):
            there = replace(draws.posterior, mean=draw)
            found = sensitivities_again(opener, model, there, **{**settings, "diagnostics": False})
        total += found.deviation / draws.samples
        flagged |= found.flagged
    return total, flagged


# The parts of a residual [B, K] whose gradients are preconditioned each by itself, [R, B, K]
Parts = Callable[[Tensor], Sequence[Tensor]]


def _whole(residual: Tensor) -> Sequence[Tensor]:
    """V e."""
    return [residual]


def _each_output(residual: Tensor) -> Sequence[Tensor]:
    """diag(V) e: what each output's own error does to that output."""
    return list(torch.diag_embed(residual).unbind(1))


PARTS: dict[str, Parts] = {"linear": _whole, "paper": _each_output}


def _expected(opened: Session, posterior: Posterior, draws: Draws, parts: Parts) -> Tensor:
    """J(m) S^-1 E[J' e], [N, K]; with ``_each_output``, output by output."""
    covered = {n: p for n, p in trainable(opened.model).items() if n in posterior.block_of}
    layout, number = Layout.of(covered), opened.batches.num_data
    outputs = opened.engine.trace(
        opened.batches.take(torch.zeros(1, dtype=torch.long)).to(device_of(opened.model))
    ).outputs
    held = len(parts(outputs)) * layout.num_params * outputs.element_size()
    size = max(1, min(opened.largest_part, GRADIENT_BYTES // max(held, 1)))
    columns = Columns(number)
    for batch in opened.batches.subset(torch.arange(number), size):
        gradients = _expected_gradients(opened, batch, draws, parts, layout)
        trace = opened.observe(batch).trace
        moves = [
            trace.own_tangents(posterior.solve(layout.unflatten(gradient)))
            for gradient in gradients
        ]
        trace.release()
        own = moves[0] if len(moves) == 1 else torch.stack(moves).diagonal(dim1=0, dim2=2)
        columns.add({"deviation": own})
    return columns["deviation"]


def _expected_gradients(
    opened: Session, batch: Batch, draws: Draws, parts: Parts, layout: Layout
) -> list[Tensor]:
    """The mean over draws of every example's J' e, [B, P] for each part."""
    totals: list[Tensor] = []
    for draw in draws:
        with weights(opened.model, draw):
            there = opened.observe(batch)
            found = [
                there.trace.own_gradient_rows(part, layout) / draws.samples
                for part in parts(there.residual)
            ]
            there.trace.release()
        totals = [a + b for a, b in zip(totals, found, strict=True)] if totals else found
    return totals
