r"""Expectations over the posterior, by sampled weights.

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

import torch
from torch import Tensor, nn

from engram.core.arguments import AUTO, MANY, is_auto, one_of, seed_number, whole
from engram.core.data.batches import Batch
from engram.core.memory import GRADIENT_BYTES
from engram.core.parameters import Layout, Named, trainable
from engram.core.state.model import device_of
from engram.curvature.operators import Operator
from engram.engine.gradient_accumulator import DiscardGradients
from engram.engine.session import Observed as ObservedByNet
from engram.engine.session import Session
from engram.errors import ArgumentError
from engram.likelihoods import Likelihood
from engram.posteriors.gaussian import Posterior
from engram.sensitivity.estimators import chosen_estimator, default_estimator, trajectory
from engram.sensitivity.estimators.base import Estimate, Estimator, Observed, Setting, displaced
from engram.sensitivity.estimators.paper import linearised

GRADIENT, DEVIATION = "gradient", "deviation"
# Rules for a group whose gradient, and curvature where it is taken out, are expectations
GROUP_RULES = ("linear", "corrected", "paper")
ANY_GROUP_RULES = (*GROUP_RULES, "newton", "downdated")


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
        seed: of the draws.
    """

    samples: int = 0
    expectation: str = GRADIENT
    seed: int = 0

    @classmethod
    def checked(cls, samples: int, expectation: str = GRADIENT, seed: int = 0) -> Sampling:
        """The settings; ArgumentError where they have no meaning."""
        one_of("expectation", expectation, (GRADIENT, DEVIATION), "leave it out")
        remedy = "use 8, or 0 for the mean"
        samples = whole("number of samples", samples, 0, MANY, remedy=remedy)
        return cls(samples, expectation, seed_number(seed))

    @property
    def averages_deviations(self) -> bool:
        """Whether whole deviations at the samples are averaged, and not gradients."""
        return self.samples > 0 and self.expectation == DEVIATION

    def drawing(self, samples: int | None) -> Sampling:
        """The same with another number of samples, if one is given."""
        return self if samples is None else self.checked(samples, self.expectation, self.seed)

    def rule(self, estimator: str) -> str:
        """The estimator, where the samples leave a choice: that of the equation is linear."""
        if self.samples and estimator == trajectory.ESTIMATOR.name:
            raise ArgumentError(
                "a rule at the end of training with samples, which are of the last weights",
                f"{estimator!r} with samples={self.samples}",
                'use estimator="linear"',
            )
        if not self.samples or self.averages_deviations:
            return estimator
        if estimator not in (AUTO, *FORMS):
            raise ArgumentError(
                f"estimator {' or '.join(FORMS)} with an expected gradient, which is that of no "
                "residual",
                f"{estimator!r} with samples={self.samples}",
                f'leave estimator out, or average deviations with expectation="{DEVIATION}"',
            )
        return "linear" if is_auto(estimator) else estimator

    def group_rule(self, estimator: str) -> str:
        """The rule for a group: an expected gradient has the steps of ``GROUP_RULES``."""
        if not self.samples:
            return estimator
        among = GROUP_RULES if self.expectation == GRADIENT else ANY_GROUP_RULES
        if is_auto(estimator) and self.expectation == GRADIENT:
            return "linear"
        if not is_auto(estimator) and estimator not in among:
            raise ArgumentError(
                f"estimator {' or '.join(among)} with samples",
                f"{estimator!r} with samples={self.samples}",
                "leave estimator out, or use samples=0",
            )
        return estimator

    def draws(self, posterior: Posterior, model: nn.Module) -> Draws:
        """The weights."""
        return Draws(posterior, self.samples, self.seed, device_of(model))

    def chosen(self, estimator: str, posterior: Posterior) -> str:
        """The rule for single examples: as without samples, but never along the record."""
        if is_auto(estimator) and self.samples:
            return default_estimator(posterior)
        return chosen_estimator(estimator, posterior)

    def over(self, estimator: Estimator, posterior: Posterior, model: nn.Module) -> Estimator:
        """The estimator as an expectation over draws; itself where none are drawn."""
        if not self.samples:
            return estimator
        draws = self.draws(posterior, model)
        averaged = _averaged if self.averages_deviations else _expected

        def rule(observed: Observed, setting: Setting) -> Estimate:
            assert isinstance(observed, ObservedByNet), "only nets have weights to draw"
            return averaged(observed, setting, estimator, draws)

        return replace(estimator, rule=rule)


AT_THE_MEAN = Sampling()


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


@dataclass(frozen=True)
class Expected:
    """Products with the mean of an operator over draws, each a product at every one of them.

    Args:
        operator: products at the model's present weights.
        model: its.
        draws: weights.
    """

    operator: Operator
    model: nn.Module
    draws: Draws

    def __matmul__(self, vectors: Tensor) -> Tensor:
        """[M, P] -> [M, P]."""
        total = torch.zeros_like(vectors)
        for draw in self.draws:
            with weights(self.model, draw):
                total += (self.operator @ vectors) / self.draws.samples
        return total


@dataclass(frozen=True)
class Form:
    """What a rule makes of an expected gradient.

    Args:
        parts: of a residual [B, K] whose gradients are preconditioned each by itself, [R, B, K].
        moved: change of predictions, and losses, of outputs that deviate.
    """

    parts: Callable[[Tensor], Sequence[Tensor]]
    moved: Callable[[Likelihood, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _whole(residual: Tensor) -> Sequence[Tensor]:
    """V e."""
    return [residual]


def _each_output(residual: Tensor) -> Sequence[Tensor]:
    """diag(V) e: what each output's own error does to that output."""
    return list(torch.diag_embed(residual).unbind(1))


FORMS = {"linear": Form(_whole, displaced), "paper": Form(_each_output, linearised)}


def _at(
    form: Form, observed: ObservedByNet, setting: Setting, deviation: Tensor, estimate: Estimate
) -> Estimate:
    """An estimate with another deviation of the outputs at the mean."""
    change, loo_loss = form.moved(setting.likelihood, observed.outputs, observed.targets, deviation)
    return replace(
        estimate,
        deviation=deviation,
        prediction_deviation=change,
        loo_loss=loo_loss,
        pull=None,
        readouts=None,
    )


def _averaged(
    observed: ObservedByNet, setting: Setting, estimator: Estimator, draws: Draws
) -> Estimate:
    """The mean over draws of each one's own deviation; flagged where any of them is."""
    opened = _session(setting)
    at_mean = estimator(observed, setting)
    total, flagged = torch.zeros_like(at_mean.deviation), at_mean.flagged.clone()
    silent = replace(setting, total=DiscardGradients())
    for draw in draws:
        with weights(opened.model, draw):
            there = opened.observe(observed.batch)
            own = replace(silent, posterior=replace(setting.posterior, mean=draw))
            found = estimator(there, own)
            there.trace.release()
        total += found.deviation / draws.samples
        flagged |= found.flagged
    form = FORMS.get(estimator.name, FORMS["linear"])
    return replace(_at(form, observed, setting, total, at_mean), flagged=flagged)


def _expected(
    observed: ObservedByNet, setting: Setting, estimator: Estimator, draws: Draws
) -> Estimate:
    """J(m) S^-1 E[J' e]; with the paper's form, output by output."""
    form, opened = FORMS[estimator.name], _session(setting)
    at_mean = estimator(observed, setting)
    layout = setting.posterior.layout
    held = len(form.parts(observed.outputs)) * layout.num_params * observed.outputs.element_size()
    size = max(1, GRADIENT_BYTES // max(held, 1))
    found = []
    for start in range(0, len(observed.batch), size):
        batch = observed.batch.select(slice(start, start + size))
        gradients = _expected_gradients(opened, batch, draws, form, layout)
        trace = opened.observe(batch).trace
        steps = [setting.posterior.solve(layout.unflatten(gradient)) for gradient in gradients]
        moves = [trace.own_tangents(step) for step in steps]
        trace.release()
        own = moves[0] if len(moves) == 1 else torch.stack(moves).diagonal(dim1=0, dim2=2)
        found.append(own)
    return _at(form, observed, setting, torch.cat(found), at_mean)


def _expected_gradients(
    opened: Session, batch: Batch, draws: Draws, form: Form, layout: Layout
) -> list[Tensor]:
    """The mean over draws of every example's J' e, [B, P] for each part."""
    totals: list[Tensor] = []
    for draw in draws:
        with weights(opened.model, draw):
            there = opened.observe(batch)
            found = [
                there.trace.own_gradient_rows(part, layout) / draws.samples
                for part in form.parts(there.residual)
            ]
            there.trace.release()
        totals = [a + b for a, b in zip(totals, found, strict=True)] if totals else found
    return totals


def _session(setting: Setting) -> Session:
    assert setting.opened is not None, "samples are drawn for a model that is opened"
    return setting.opened
