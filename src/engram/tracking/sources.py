"""Where a tracker's posterior comes from: the optimizer's state, or curvature fitted anew."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engram.core.arguments import AUTO, is_auto, one_of, whole
from engram.core.memory import backing_off
from engram.core.parameters import trainable
from engram.errors import (
    ArgumentError,
    DataError,
    ModelMismatchError,
    NonFiniteError,
    PosteriorError,
)
from engram.optimizers.ivon import at_mean
from engram.posteriors.gaussian import Posterior, check_prior_precision
from engram.posteriors.laplace import fitted
from engram.posteriors.posterior_of import (
    Wanted,
    check_second_moment,
    posterior_of,
)
from engram.posteriors.structures import STRUCTURES
from engram.problem import Opener
from engram.tracking.moving_average import MovingAverageCurvature
from engram.training.metrics import unwrapped

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


class FromCurvature(Source):
    """A curvature fitted at every update, and at the start of every streamed epoch."""

    def __init__(
        self,
        model: nn.Module,
        opener: Opener,
        structure: str,
        prior_precision: float,
        average: float | None,
    ) -> None:
        self.model, self.opener = model, opener
        self.structure, self.prior_precision = structure, prior_precision
        self.averaged = (
            None if average is None else MovingAverageCurvature(structure, average, prior_precision)
        )
        self.present: Posterior | None = None
        self.lost = False

    def posterior(self) -> Posterior:
        if self.averaged is not None:
            self.present = self.averaged.update(self.model, self.opener)
        else:
            self.present = _fitted_now(
                self.opener, self.model, self.structure, self.prior_precision
            )
        return self.present

    def begin_epoch(self) -> None:
        self.present, self.lost = None, True
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
    opener: Opener,
    model: nn.Module,
    structure: str,
    prior_precision: float,
    batch_size: int | str = AUTO,
) -> Posterior:
    with opener.session(model, batch_size, progress=False) as opened:
        return fitted(opened, structure, prior_precision)


def check_same_source(state: Mapping[str, Any], wanted: bool) -> None:
    """DataError where a run with a moving average goes on without one, or the other way round."""
    if not isinstance(state, Mapping) or bool(state) != wanted:
        raise DataError(
            f"the state of a posterior {'with' if wanted else 'without'} a moving average",
            "another one",
            "resume with the posterior= and average= that the run was started with",
        )


@dataclass(frozen=True)
class SourceSettings:
    """What a tracker was told about its posterior."""

    kind: str
    prior_precision: float | str
    average: float | None
    reduction: str
    training_batch_size: int | None
    second_moment: str

    def check(self) -> None:
        """ArgumentError for settings that mean nothing together."""
        known = ("optimizer", *STRUCTURES)
        one_of("posterior", self.kind, known, 'use "optimizer"')
        one_of("reduction", self.reduction, ("mean", "sum"), "see your loss function")
        check_second_moment(self.second_moment)
        if self.training_batch_size is not None:
            remedy = "pass the batch size of the training"
            whole("training_batch_size", self.training_batch_size, remedy=remedy)
        if not is_auto(self.prior_precision):
            check_prior_precision(self.prior_precision)
        if self.kind == "optimizer" and self.average is not None:
            raise ArgumentError(
                "average with a fitted posterior",
                'average with posterior="optimizer", which averages by itself',
                'leave out average, or use posterior="kronecker"',
            )
        if self.kind != "optimizer" and self.second_moment != "batch":
            raise ArgumentError(
                'second_moment with posterior="optimizer"',
                f"second_moment={self.second_moment!r} with posterior={self.kind!r}",
                "leave second_moment out",
            )
        if self.kind != "optimizer" and is_auto(self.prior_precision):
            raise ArgumentError(
                f"a prior_precision with posterior={self.kind!r}", '"auto"', "pass a number"
            )


def source_of(
    wanted: SourceSettings,
    model: nn.Module,
    optimizer: Optimizer,
    opener: Opener,
    num_data: int,
) -> Source:
    """The source that was asked for."""
    wanted.check()
    if not isinstance(unwrapped(optimizer), Optimizer):
        raise ArgumentError(
            "a torch.optim.Optimizer",
            type(optimizer).__name__,
            "pass the one that trains the model; of several, see posterior=",
        )
    if wanted.kind == "optimizer":
        settings = {
            "num_data": num_data,
            "likelihood": opener.likelihood,
            "prior_precision": wanted.prior_precision,
            "reduction": wanted.reduction,
            "training_batch_size": wanted.training_batch_size,
            "second_moment": wanted.second_moment,
        }
        return FromOptimizer(model, optimizer, settings)
    delta = check_prior_precision(wanted.prior_precision)
    return FromCurvature(model, opener, wanted.kind, delta, wanted.average)


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
