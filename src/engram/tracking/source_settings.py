"""What a tracker was told about its posterior, and the source that it stands for."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from engram.core.arguments import AUTO, is_auto, one_of, whole
from engram.errors import ArgumentError
from engram.posteriors.gaussian import check_prior_precision
from engram.posteriors.posterior_of import check_second_moment
from engram.posteriors.structures import STRUCTURES
from engram.problem import Opener
from engram.tracking.sources import FittedAndRead, Fitting, FromCurvature, FromOptimizer, Source
from engram.training.metrics import takes_mean_loss, unwrapped
from engram.training.training import Training

OPTIMIZER = "optimizer"
# With a record and "auto": one sampled label an example in place of all outputs, which changed the
# estimate by less than 1 % and made the fit two to three times as quick (docs/decisions.md)
STRUCTURE, CURVATURE = "kronecker", "fisher"


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
        known = (AUTO, OPTIMIZER, *STRUCTURES)
        one_of("posterior", self.kind, known, 'use "auto"')
        one_of("reduction", self.reduction, ("mean", "sum"), "see your loss function")
        check_second_moment(self.second_moment)
        if self.training_batch_size is not None:
            remedy = "pass the batch size of the training"
            whole("training_batch_size", self.training_batch_size, remedy=remedy)
        if not is_auto(self.prior_precision):
            check_prior_precision(self.prior_precision)
        if self.kind in (AUTO, OPTIMIZER) and self.average is not None:
            raise ArgumentError(
                "average with a fitted posterior",
                f"average with posterior={self.kind!r}; an optimizer averages by itself",
                'leave out average, or use posterior="kronecker"',
            )
        if self.kind not in (AUTO, OPTIMIZER) and self.second_moment != "batch":
            raise ArgumentError(
                'second_moment with posterior="optimizer"',
                f"second_moment={self.second_moment!r} with posterior={self.kind!r}",
                "leave second_moment out",
            )

    def check_with(self, training: Training | None) -> None:
        """ArgumentError where a prior precision has to be known, and nothing says it."""
        needed = self.kind not in (AUTO, OPTIMIZER) and is_auto(self.prior_precision)
        if needed and (training is None or self.average is not None):
            raise ArgumentError(
                f"a prior_precision with posterior={self.kind!r}"
                + (" and average" if training is not None else ", where nothing is recorded"),
                '"auto"',
                "pass a number",
            )

    def fits(self, optimizer: Optimizer, training: Training | None) -> bool:
        """Whether ``"auto"`` is a fit with the recorded time, and not the optimizer's own state.

        Optimizers of N examples, such as IVON, hold a posterior; ``second_moment`` asks for the
        state of the others.
        """
        own = takes_mean_loss(optimizer) or self.second_moment != "batch"
        return self.kind == AUTO and training is not None and not own


def check_optimizer(optimizer: Optimizer) -> None:
    """ArgumentError for what is no optimizer."""
    if not isinstance(unwrapped(optimizer), Optimizer):
        raise ArgumentError(
            "a torch.optim.Optimizer",
            type(optimizer).__name__,
            "pass the one that trains the model; of several, see posterior=",
        )


def source_of(
    wanted: SourceSettings,
    model: nn.Module,
    optimizer: Optimizer,
    opener: Opener,
    num_data: int,
    training: Training | None,
) -> Source:
    """The source that was asked for.

    Args:
        wanted: checked.
        model, optimizer: in training.
        opener: of the model with the examples that an update looks at.
        num_data: N.
        training: the record, where there is one.
    """
    wanted.check_with(training)
    delta = None if is_auto(wanted.prior_precision) else float(wanted.prior_precision)
    if wanted.kind not in (AUTO, OPTIMIZER):
        record = training if delta is None else None
        fitting = Fitting(wanted.kind, num_data, delta, record)
        return FromCurvature(model, opener, fitting, wanted.average)
    settings = {
        "num_data": num_data,
        "likelihood": opener.likelihood,
        "prior_precision": wanted.prior_precision,
        "reduction": wanted.reduction,
        "training_batch_size": wanted.training_batch_size,
        "second_moment": wanted.second_moment,
    }
    read = FromOptimizer(model, optimizer, settings)
    if not wanted.fits(unwrapped(optimizer), training):
        return read
    fitting = Fitting(STRUCTURE, num_data, delta, training, CURVATURE)
    return FittedAndRead(model, opener, fitting, read, wanted.reduction == "mean")
