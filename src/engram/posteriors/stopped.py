"""What the record of a training adds to a Laplace posterior: its prior, its time, what it fixed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from engram.core.arguments import shown
from engram.core.dtypes import wide
from engram.errors import ArgumentError, TrainingError
from engram.linalg.spectral_filter import SpectralFilter
from engram.posteriors.gaussian import Posterior
from engram.training.segments import NamedTraining
from engram.training.training import Training

# Training times per parameter entry that are told apart, over N: outside, an entry moves as far as
# its gradient tells (dead inputs under Adam, whose root is its eps), or not at all
SHORTEST, LONGEST = 1e-12, 1e12


@dataclass(frozen=True)
class Stopped:
    """A training that was stopped, as a posterior needs it.

    Args:
        record: by the names of the model's parameters.
        num_data: N.
        prior: delta by name, of the parameter's shape or one number.
        words: how the record came about.
        given: whether the prior is the caller's, and not that of the weight decay.
    """

    record: NamedTraining
    num_data: int
    prior: Mapping[str, Tensor] = field(repr=False)
    words: str
    given: bool

    @classmethod
    def of(cls, record: NamedTraining, num_data: int, given: float | None, words: str) -> Stopped:
        """With the prior of the weight decay, or the one that is given."""
        prior = record.prior_precision(num_data)
        if given is not None:
            prior = {name: torch.full_like(value, given) for name, value in prior.items()}
        return cls(record, num_data, prior, words, given is not None)

    @property
    def fixed(self) -> tuple[str, ...]:
        """Parameters that training cannot move."""
        return tuple(name for name, moved in self.record.moved.items() if not moved)

    @property
    def pull(self) -> dict[str, Tensor]:
        """N / C by name, of parameters that training moves."""
        times = {name: wide(self.record.time[name]) for name in self.moved}
        return {
            n: (t / self.num_data).clamp(SHORTEST, LONGEST).reciprocal() for n, t in times.items()
        }

    @property
    def moved(self) -> tuple[str, ...]:
        """Parameters that training moves."""
        return tuple(name for name, moved in self.record.moved.items() if moved)

    @property
    def base(self) -> float:
        """Of the size of N / C, so that it neither drowns it nor lets a factorisation fail."""
        logs = {name: value.log().mean() for name, value in self.pull.items()}
        return float(torch.exp(self._mean(logs)))

    @property
    def filter(self) -> SpectralFilter:
        """What it makes of the eigenvalues of a precision."""
        return SpectralFilter(self.prior, self.pull, self.base)

    def noted(self, posterior: Posterior) -> Posterior:
        """The posterior with this record and its prior, which says so."""
        means = {name: float(wide(self.prior[name]).mean()) for name in self.record.time}
        average = float(self._mean({n: torch.tensor(means[n]) for n in self.moved}))
        how = "given" if self.given else "of the weight decay"
        settings = {**posterior.settings, "training": self.words, "prior_precision": how}
        return replace(
            posterior,
            prior_precision=average,
            prior_by_name=means,
            settings=settings,
            exact=False,
            stopped=True,
            training=self.record,
        )

    def _mean(self, values: Mapping[str, Tensor]) -> Tensor:
        """Over all entries that training moves."""
        sizes = self.record.sizes
        total = sum(sizes[name] for name in values)
        return sum((sizes[n] / total * value for n, value in values.items()), torch.zeros(()))


def named_record(training: Training, model: nn.Module, curvature: str) -> NamedTraining:
    """The record by the names of a model's parameters; errors for what cannot be one."""
    if not isinstance(training, Training):
        raise ArgumentError(
            "training= as engram.record(optimizer) gave it",
            shown(training),
            "call training = engram.record(optimizer) before the training loop",
        )
    if curvature == "hessian":
        raise ArgumentError(
            'curvature "ggn", "fisher" or "empirical" with training=',
            repr(curvature),
            'use curvature="ggn": short of a minimum the Hessian is not positive definite',
        )
    record = training.of(model)
    if not any(record.moved.values()):
        raise TrainingError(
            "a training that moves some parameters of the model",
            "gradients that are all 0",
            "check that the losses depend on the model",
        )
    return record


def described(training: Any) -> str:
    """A record in words, for people to read."""
    how = "guessed" if training.guessed else "recorded"
    facts = [f"{how} {training.num_steps:,} steps of {training.optimizer_name}"]
    if training.num_missing_steps:
        facts.append(f"{training.num_missing_steps:,} before them missing")
    if training.num_bad_steps:
        facts.append(f"{training.num_bad_steps:,} of them bad")
    return ", ".join(facts)
