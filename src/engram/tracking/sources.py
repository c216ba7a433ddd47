"""Where a tracker's posterior comes from: the optimizer's state, or curvature fitted anew."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engram.core.arguments import AUTO
from engram.core.memory import backing_off
from engram.core.parameters import trainable
from engram.engine.session import Session
from engram.errors import (
    ArgumentError,
    DataError,
    ModelMismatchError,
    NonFiniteError,
    PosteriorError,
    TrainingError,
)
from engram.optimizers.ivon import at_mean
from engram.posteriors.gaussian import Posterior
from engram.posteriors.laplace import fitted
from engram.posteriors.posterior_of import Wanted, posterior_of
from engram.posteriors.stopped import Stopped
from engram.problem import Opener
from engram.tracking.moving_average import MovingAverageCurvature
from engram.training.metrics import unwrapped
from engram.training.training import Training

EVERY_STEP_UNTIL, READ_EVERY = 20, 8  # streamed steps


class Source(ABC):
    """Gives the posterior at the present weights."""

    @abstractmethod
    def posterior(self) -> Posterior:
        """The posterior for an update over all data."""

    @abstractmethod
    def begin_epoch(self) -> None:
        """Before the first streamed step of an epoch."""

    @abstractmethod
    def at_step(self, number: int) -> Posterior | None:
        """For the streamed step of this number, cheap; None while there is nothing to read."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What has to be remembered across a restart."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave."""


class FromOptimizer(Source):
    """The preconditioner in the optimizer's state.

    It is read anew for every update. Streamed steps, which are many, read it at every step at
    first and then at every eighth: it is an average over hundreds of steps, and reading it costs
    a tenth of a step of a large linear layer, more where its factors are looked for as well.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        settings: dict[str, Any],
    ) -> None:
        Wanted(**settings).applied(optimizer, model)  # complain now, not after an epoch
        check_all_held(optimizer, model)
        self.model, self.optimizer, self.settings = model, optimizer, settings
        self.present: Posterior | None = None

    def posterior(self) -> Posterior:
        return self._read(AUTO)

    def _read(self, tolerance: float | str) -> Posterior:
        check_all_held(self.optimizer, self.model)
        return posterior_of(self.optimizer, self.model, tolerance=tolerance, **self.settings)

    def begin_epoch(self) -> None:
        self.present = None  # between epochs other parameters may have been frozen or added

    def at_step(self, number: int) -> Posterior | None:
        if self.present is not None and number >= EVERY_STEP_UNTIL and number % READ_EVERY:
            return self.present
        try:
            with at_mean(unwrapped(self.optimizer)):  # S is the same wherever a draw has landed
                # what serves a single step is not worth a search for factors
                self.present = self._read(AUTO if number >= EVERY_STEP_UNTIL else 0.0)
        except PosteriorError:
            if _stepped(self.optimizer):
                raise
        return self.present

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_same_source(state, wanted=False)
        self.present = None


def check_all_held(optimizer: Optimizer, model: nn.Module) -> None:
    """ModelMismatchError where parameters are trained that the optimizer does not have."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in trainable(model).items() if id(p) not in held]
    if missing:
        raise ModelMismatchError(
            "an optimizer of all parameters that require gradients",
            f"{type(optimizer).__name__} without {', '.join(missing[:3])}"
            + (f" and {len(missing) - 3} others" if len(missing) > 3 else ""),
            "add them with optimizer.add_param_group, freeze them with requires_grad_(False), or "
            'with several optimizers fit the posterior: posterior="kronecker"',
        )


def _stepped(optimizer: Optimizer) -> bool:
    """Whether the optimizer has seen a gradient: IVON counts its steps elsewhere, and Adagrad has
    a state, with no steps in it, from the beginning."""
    counted = getattr(optimizer, "current_step", None)
    if counted is not None:
        return bool(counted)
    return any(float(state.get("step", 1)) > 0 for state in optimizer.state.values() if state)


@dataclass(frozen=True)
class Fitting:
    """How curvature is fitted at an update.

    Args:
        structure: of the precision.
        num_data: N, the examples that the training has; an update may look at some of them.
        prior_precision: delta; None takes that of the weight decay in the record.
        training: the record, whose time goes into the precision; None fits it as at a minimum.
        curvature: as in :func:`engram.laplace`.
    """

    structure: str
    num_data: int
    prior_precision: float | None
    training: Training | None = None
    curvature: str = AUTO

    @property
    def is_possible(self) -> bool:
        """Whether a step was recorded, where there is a record."""
        return self.training is None or self.training.num_steps > 0

    def of(self, opened: Session) -> Posterior:
        r"""The posterior at the weights of an opened model, of all N examples.

        From n of them it is :math:`\frac{N}{n} (S_n + n C^{-1})`, with n/N of the prior in S_n.
        """
        seen = opened.batches.num_data
        given = self.prior_precision
        delta = None if given is None else given * seen / self.num_data
        if self.training is None:
            assert delta is not None
            found = fitted(opened, self.structure, delta, self.curvature)
        else:
            stopped = Stopped.of(self.training, opened.model, seen, delta)
            found = fitted(opened, self.structure, stopped.base, self.curvature, stopped=stopped)
        return found if seen == self.num_data else _of_all(found, self.num_data)


def _of_all(posterior: Posterior, num_data: int) -> Posterior:
    """Each example that was looked at stands for as many as there are over those."""
    share = num_data / posterior.num_data
    return replace(
        posterior,
        blocks=tuple(block.scaled(share) for block in posterior.blocks),
        prior_precision=share * posterior.prior_precision,
        prior_by_name={name: share * value for name, value in posterior.prior_by_name.items()},
        num_data=num_data,
        exact=False,
        settings={**posterior.settings, "fitted_on": posterior.num_data},
    )


class FromCurvature(Source):
    """A curvature fitted at every update, and at the start of every streamed epoch."""

    def __init__(
        self, model: nn.Module, opener: Opener, fitting: Fitting, average: float | None = None
    ) -> None:
        self.model, self.opener, self.fitting = model, opener, fitting
        self.averaged: MovingAverageCurvature | None = None
        if average is not None:
            assert fitting.prior_precision is not None
            self.averaged = MovingAverageCurvature(
                fitting.structure, average, fitting.prior_precision
            )
        self.present: Posterior | None = None
        self.lost = False

    def posterior(self) -> Posterior:
        if self.averaged is not None:
            self.present = self.averaged.update(self.model, self.opener)
        else:
            self.present = _fitted_now(self.opener, self.model, self.fitting)
        return self.present

    def begin_epoch(self) -> None:
        self.present, self.lost = None, True
        if self.fitting.is_possible:
            self.posterior()
            self.lost = False

    def at_step(self, number: int) -> Posterior | None:
        if self.lost:  # no fit at the start of this epoch: losses only, until the next one
            return None
        return self._fitted_again() if self.present is None else self.present

    def _fitted_again(self) -> Posterior:
        """After a restart in the middle of an epoch, whose look at the curvature was counted."""
        counted = self.state_dict()
        found = self.posterior()
        if self.averaged is not None:
            self.averaged.load_state_dict(counted)
        return found

    def state_dict(self) -> dict[str, Any]:
        return {} if self.averaged is None else self.averaged.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_same_source(state, wanted=self.averaged is not None)
        if self.averaged is not None:
            self.averaged.load_state_dict(state)
        self.present, self.lost = None, False


@backing_off
def _fitted_now(
    opener: Opener, model: nn.Module, fitting: Fitting, batch_size: int | str = AUTO
) -> Posterior:
    with opener.session(model, batch_size, progress=False) as opened:
        return fitting.of(opened)


class FittedAndRead(Source):
    """Fitted for updates; read off the optimizer for streamed steps, which have no time to fit.

    Args:
        model: in training.
        opener: of the model with the examples that an update looks at.
        fitting: with the record.
        steps: the source for streamed steps, and for updates of a training of which nothing is
            known yet.
        is_mean: whether the training loss is the mean of a batch, so that its time can be guessed.
    """

    def __init__(
        self,
        model: nn.Module,
        opener: Opener,
        fitting: Fitting,
        steps: FromOptimizer,
        is_mean: bool,
    ) -> None:
        self.model, self.opener, self.fitting = model, opener, fitting
        self.steps, self.is_mean = steps, is_mean

    def posterior(self) -> Posterior:
        check_all_held(self.steps.optimizer, self.model)
        training = self._known()
        if training is None:
            return self.steps.posterior()
        return _fitted_now(self.opener, self.model, replace(self.fitting, training=training))

    def _known(self) -> Training | None:
        """The record, or a guess where it has less than half of the steps; None without any.

        Nor where nothing has moved yet: a learning rate of 0, or no gradient so far.
        """
        training = self.fitting.training
        assert training is not None
        if training.num_steps - training.num_bad_steps <= training.num_missing_steps:
            if not (self.is_mean and training.num_steps + training.num_missing_steps):
                return None
            try:
                training = Training.guess(self.model, self.steps.optimizer)
            except (ArgumentError, TrainingError):
                return None
        return training if any(training.of(self.model).moved.values()) else None

    def begin_epoch(self) -> None:
        self.steps.begin_epoch()

    def at_step(self, number: int) -> Posterior | None:
        return self.steps.at_step(number)

    def state_dict(self) -> dict[str, Any]:
        return self.steps.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps.load_state_dict(state)


def check_same_source(state: Mapping[str, Any], wanted: bool) -> None:
    """DataError where a run with a moving average goes on without one, or the other way round."""
    if not isinstance(state, Mapping) or bool(state) != wanted:
        raise DataError(
            f"the state of a posterior {'with' if wanted else 'without'} a moving average",
            "another one",
            "resume with the posterior= and average= that the run was started with",
        )


def watched(model: nn.Module, optimizer: Optimizer) -> Iterator[Tensor]:
    """Weights and optimizer state, in which a diverged training shows NaN or infinity."""
    yield from model.parameters()
    for state in optimizer.state.values():
        if isinstance(state, dict):
            yield from (v for v in state.values() if isinstance(v, Tensor))
    for group in optimizer.param_groups:
        yield from (v for v in group.values() if isinstance(v, Tensor))


def all_finite(model: nn.Module, optimizer: Optimizer) -> bool:
    """Whether weights and optimizer state are finite."""
    floats = (t for t in watched(model, optimizer) if t.is_floating_point())
    return all(bool(torch.isfinite(t).all()) for t in floats)


def training_lost(error: Exception, model: nn.Module, optimizer: Optimizer) -> bool:
    """Whether an error only says that training has diverged to NaN or infinity."""
    if isinstance(error, NonFiniteError) and error.expected != "finite inputs":
        return True
    return not all_finite(model, optimizer)
