r"""What the record of a training adds to a Laplace posterior: its prior, its time, what it fixed.

Steps :math:`\theta \leftarrow \theta - \eta_t P_t^{-1} \nabla` on the mean of N losses, whose sum
has the curvature S, have come after a training time :math:`C = \sum_t \eta_t P_t^{-1}` as far as
:math:`(1 - e^{-C S / N}) S^{-1}` of a gradient of the sum, where a minimum is :math:`S^{-1}` away.
In the metric of C an eigenvalue s of the precision becomes

.. math:: \frac{s}{1 - e^{-c s / N}} \;\approx\; s + \frac{N}{c},

N / c where there is no curvature, and s where training has settled. The right side is taken: it is
a posterior too, with a prior of precision :math:`N C^{-1}` around the first weights, so that an
example can be taken out of it (docs/decisions.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from engram.core.arguments import shown
from engram.core.dtypes import wide
from engram.core.parameters import Named
from engram.errors import ArgumentError, TrainingError
from engram.linalg.block import Block
from engram.posteriors.gaussian import Posterior
from engram.training.segments import NamedTraining
from engram.training.training import Training

# Training times of an entry over N that are told apart. Longer ones are those of dead inputs under
# Adam, whose root is its eps; shorter ones do not move
SHORTEST, LONGEST = 1e-12, 1e12


@dataclass(frozen=True)
class Stopped:
    """A training that was stopped, as a posterior needs it.

    Args:
        record: by the names of the model's parameters.
        prior: delta by name, of the parameter's shape or one number.
        pull: N / C likewise, of parameters that training moves.
        words: how the record came about.
        given: whether the prior is the caller's, and not that of the weight decay.
    """

    record: NamedTraining
    prior: Mapping[str, Tensor] = field(repr=False)
    pull: Mapping[str, Tensor] = field(repr=False)
    words: str
    given: bool

    @classmethod
    def of(
        cls, training: Training, model: nn.Module, num_data: int, given: float | None
    ) -> Stopped:
        """With the prior of the weight decay, or the one that is given; errors for no record."""
        record = _record(training, model)
        prior = record.prior_precision(num_data)
        if given is not None:
            prior = {name: torch.full_like(value, given) for name, value in prior.items()}
        times = {n: wide(record.time[n]) / num_data for n, moved in record.moved.items() if moved}
        pull = {name: time.clamp(SHORTEST, LONGEST).reciprocal() for name, time in times.items()}
        return cls(record, prior, pull, _described(training), given is not None)

    @property
    def fixed(self) -> tuple[str, ...]:
        """Parameters that training cannot move."""
        return tuple(name for name, moved in self.record.moved.items() if not moved)

    @property
    def base(self) -> float:
        """A number of the size of N / C, so that blocks can be factorised before they have it."""
        return float(torch.exp(self._mean({n: v.log().mean() for n, v in self.pull.items()})))

    def with_time(
        self, blocks: tuple[Block, ...], base: float, tolerance: float
    ) -> tuple[Block, ...]:
        """Blocks with the curvature and ``base``, as S + N / C."""
        return tuple(block.with_prior(self._added(block), base, tolerance) for block in blocks)

    def _added(self, block: Block) -> Named:
        layout = block.layout
        return {
            name: (wide(self.prior[name]) + self.pull[name]).expand(shape)
            for name, shape in zip(layout.names, layout.shapes, strict=True)
        }

    def noted(self, posterior: Posterior) -> Posterior:
        """The posterior with this record and its prior, which says so."""
        means = {name: float(wide(value).mean()) for name, value in self.prior.items()}
        average = float(self._mean({name: torch.tensor(means[name]) for name in self.pull}))
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


def check_training(training: Training) -> Training:
    """ArgumentError unless it is a record."""
    if not isinstance(training, Training):
        raise ArgumentError(
            "training= as engram.record(optimizer) gave it",
            shown(training),
            "call training = engram.record(optimizer) before the training loop",
        )
    return training


def _record(training: Training, model: nn.Module) -> NamedTraining:
    """The record by the names of a model's parameters; errors for what cannot be one."""
    record = check_training(training).of(model)
    if not any(record.moved.values()):
        raise TrainingError(
            "a training that moves some parameters of the model",
            "gradients that are all 0",
            "check that the losses depend on the model",
        )
    return record


def _described(training: Training) -> str:
    """A record in words, for people to read."""
    how = "guessed" if training.guessed else "recorded"
    facts = [f"{how} {training.num_steps:,} steps of {training.optimizer_name}"]
    if training.num_missing_steps:
        facts.append(f"{training.num_missing_steps:,} before them missing")
    if training.num_bad_steps:
        facts.append(f"{training.num_bad_steps:,} of them bad")
    return ", ".join(facts)
