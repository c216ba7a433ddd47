r"""Choose the strength of the regulariser by the leave-one-out estimate, without validation data.

For each prior precision :math:`\delta` of :math:`\sum_i \ell_i + \tfrac{\delta}{2} |\theta|^2` the
model is trained and

.. math:: \mathrm{LOO}(\delta) = \tfrac{1}{N} \sum_i \ell_i(f_i + d_i)

is computed from the training data; the smallest wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engram.core.arguments import AUTO, one_of, shown, truth
from engram.core.data.batches import Data
from engram.core.memory import backing_off
from engram.core.parameters import check_module, trainable
from engram.core.progress import progress_over
from engram.core.state.copies import private_copy
from engram.core.state.process import kept_surroundings
from engram.core.storage.kinds import Kind, check_that, stored
from engram.core.storage.values import objects, typed
from engram.engine.session import Session
from engram.errors import ArgumentError, NonFiniteError, TrainingError
from engram.likelihoods import Likelihood, resolve
from engram.posteriors.gaussian import Posterior, check_prior_precision
from engram.posteriors.laplace import fitted
from engram.posteriors.posterior_of import posterior_of
from engram.posteriors.structures import STRUCTURES
from engram.problem import Opener, Problem
from engram.retraining.identity import is_steady
from engram.retraining.one_by_one import Watched
from engram.retraining.user_function import (
    check_arguments,
    check_same_parameters,
    has_moved,
    trained_model,
    training_copies,
)
from engram.sensitivity.estimators import check_estimator
from engram.sensitivity.leave_one_out import Asked, left_out
from engram.sensitivity.result import Result
from engram.tracking.validation import mean_loss

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Train = Callable[[nn.Module, float], nn.Module | Optimizer | None]


@dataclass(frozen=True)
class Trial:
    """One strength of the regulariser. Losses are means in nats; NaN where training diverged.

    ``verdict`` is that of the estimate: ``good``, ``caution`` or ``unreliable``.
    """

    prior_precision: float
    train: float
    estimate: float
    validation: float = math.nan
    verdict: str = "unreliable"


@dataclass(frozen=True)
class Tuning:
    """All trials in increasing order of strength, and the model trained at the best.

    Attributes:
        trials: one for each strength.
        best: that with the lowest estimate.
        model: trained there; None in a tuning that was read from a folder.
        state: the state_dict of that model, for one of your own.
    """

    trials: tuple[Trial, ...]
    best: Trial
    model: nn.Module | None = field(default=None, repr=False)
    state: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def prior_precision(self) -> float:
        """The strength with the lowest estimate of the test loss."""
        return self.best.prior_precision

    @property
    def at_edge(self) -> bool:
        """Whether the best is the first or last of the grid, so that a wider one may do better."""
        return self.best in (self.trials[0], self.trials[-1]) and len(self.trials) > 1

    def to_frame(self) -> pd.DataFrame:
        """One row per strength."""
        import pandas as pd

        return pd.DataFrame([asdict(t) for t in self.trials]).set_index("prior_precision")

    def figure(self) -> Figure:
        """Estimate, training loss and validation loss against the strength."""
        from engram.report.figures import tuning_figure

        return tuning_figure(self.to_frame(), self.prior_precision)

    def save(self, folder: str | Path) -> Path:
        """Write ``tuning.json``, and the weights of the best model, into a folder, whole."""
        return KIND.write(self, folder)

    def __repr__(self) -> str:
        edge = ", at the edge of the grid" if self.at_edge else ""
        edge += f", {self.best.verdict}" if self.best.verdict != "good" else ""
        return (
            f"Tuning(prior_precision={self.prior_precision:g}{edge}, "
            f"estimate {self.best.estimate:.4g} nats, {len(self.trials)} trials)"
        )


def tune(
    model: nn.Module,
    data: Data,
    train: Train,
    prior_precisions: Sequence[float],
    *,
    likelihood: str | Likelihood = "categorical",
    posterior: str = "kronecker",
    estimator: str = AUTO,
    validation: Data | None = None,
    warm_start: bool = True,
    progress: bool = True,
) -> Tuning:
    r"""Train at every strength of a grid and take the one with the lowest leave-one-out estimate.

    .. math:: \hat\delta = \arg\min_\delta \tfrac{1}{N} \sum_i \ell_i(f_i + d_i)

    The weakest regulariser comes first, and each training starts from the weights of the one before
    it, unless ``warm_start`` is off: a net that a strong one has pressed to zero would stay there.
    The model that is passed stays as it is. Each trial has the verdict on its
    estimate; it plays no part in the choice.

    Args:
        model: where the first training starts.
        data: the training data.
        train: called as ``train(model, prior_precision)``; trains the model in place, or returns a
            trained one, on the sum of the losses plus prior_precision / 2 |theta|^2 (weight decay
            prior_precision / N on the mean loss). With ``posterior="optimizer"`` it trains in place
            and returns the optimizer it used.
        prior_precisions: the grid.
        likelihood: a name or an object.
        posterior: a structure for :func:`engram.laplace`, or ``optimizer`` to read it off the
            optimizer that ``train`` returns.
        estimator: as in :func:`engram.sensitivities`, with the same default.
        validation: data whose loss is recorded beside the estimate; never used for the choice.
        warm_start: start each training from the weights of the one before it; otherwise all start
            from those of the model that is passed, as if each were the only one.
        progress: show a bar.

    Returns:
        The trials, the best one and the model trained there.

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(30, 10, dtype=torch.float64)
        >>> y = x[:, :1] + torch.randn(30, 1, dtype=torch.float64)
        >>> def ridge(model, delta):
        ...     solved = torch.linalg.solve(x.mT @ x + delta * torch.eye(10), x.mT @ y)
        ...     model.weight.data.copy_(solved.mT)
        >>> model = nn.Linear(10, 1, bias=False).double()
        >>> tune(model, (x, y), ridge, [0.1, 1.0, 10.0, 100.0, 1000.0], likelihood="gaussian",
        ...      posterior="full", estimator="corrected")
        Tuning(prior_precision=10, estimate ... nats, 5 trials)
    """
    check_module(model)
    grid = _checked_grid(prior_precisions, posterior)
    _check_train(train)
    check_estimator(estimator)
    warm_start = truth("warm_start", warm_start)
    chosen = resolve(likelihood)
    trials: list[Trial] = []
    best: tuple[Trial, nn.Module] | None = None
    unmoved = 0
    with kept_surroundings(), torch.inference_mode(False):
        learner, steady = private_copy(model), is_steady(data)
        train = training_copies(train, model, private_copy(model))
        opener = Opener(data, chosen)
        for strength in progress_over(sorted(grid), "tune", progress):
            if not warm_start:
                learner = private_copy(model)
            start = private_copy(learner)
            watched = Watched.of(data) if steady else Watched.of()
            with torch.enable_grad():
                returned = train(learner, strength)
            watched.check()
            optimizer = returned if isinstance(returned, Optimizer) else None
            learner = trained_model(None if optimizer else returned, learner)
            check_same_parameters(learner, start)
            unmoved += not has_moved(learner, start)
            _check_moved(unmoved, len(trials) + 1)
            fit = _Fit(learner, opener, posterior, strength)
            trial = fit.trial(optimizer, estimator, validation)
            trials.append(trial)
            if math.isnan(trial.estimate):
                learner = start  # a diverged model is no place to start from
            elif best is None or trial.estimate < best[0].estimate:
                best = (trial, private_copy(learner))
    if best is None:
        raise NonFiniteError(
            "a finite loss at one strength at least",
            f"NaN or infinity at all {len(trials)}",
            "lower the learning rate in train, or check the data",
        )
    trial, trained = best
    state = {name: value.detach().clone() for name, value in trained.state_dict().items()}
    return Tuning(tuple(trials), trial, trained, state)


def _check_train(train: Train) -> None:
    if not callable(train) or isinstance(train, type):
        raise ArgumentError(
            "a training function train(model, prior_precision)",
            shown(train),
            "pass the function that trains the model",
        )
    check_arguments(train, "train(model, prior_precision)")


def _check_moved(unmoved: int, count: int) -> None:
    """Two strengths have different minima, so that one of the trainings must move the weights."""
    if unmoved == count == 2:
        raise TrainingError(
            "a training function that trains the model in place or returns the trained one",
            "all weights as before at two strengths",
            "train the model that is passed, or return the trained one",
        )


def _checked_grid(prior_precisions: Sequence[float], posterior: str) -> list[float]:
    try:
        grid = [check_prior_precision(value) for value in prior_precisions]
    except TypeError as error:
        raise ArgumentError(
            "a list of prior precisions", shown(prior_precisions), "use [0.1, 1, 10, 100]"
        ) from error
    if not grid:
        raise ArgumentError("at least one prior precision", "none", "use [0.1, 1, 10, 100]")
    if len(set(grid)) != len(grid):
        raise ArgumentError("each prior precision once", repr(grid), "drop what is repeated")
    known = ("optimizer", *STRUCTURES)
    one_of("posterior", posterior, known, 'use "kronecker"')
    return grid


@dataclass(frozen=True)
class _Fit:
    """A model trained at one strength."""

    model: nn.Module
    opener: Opener
    kind: str
    prior_precision: float

    def trial(self, optimizer: Optimizer | None, estimator: str, validation: Data | None) -> Trial:
        if not all(bool(p.isfinite().all()) for p in trainable(self.model).values()):
            return Trial(self.prior_precision, math.nan, math.nan)
        try:
            result = _estimate(self, optimizer, estimator)
        except NonFiniteError as error:
            if error.expected == "finite inputs":  # the data's fault, not the training's
                raise
            return Trial(self.prior_precision, math.nan, math.nan)
        held_out = math.nan
        if validation is not None:
            held_out = mean_loss(self.model, validation, self.opener.likelihood)
            if not math.isfinite(held_out):
                raise NonFiniteError(
                    "a finite loss on the validation data",
                    f"{held_out}",
                    "look for NaN or infinity in its inputs and targets, and remove those examples",
                )
        level = str(result.verdict.level)
        return Trial(self.prior_precision, result.train_nll, result.loo_nll, held_out, level)

    def posterior(self, opened: Session, optimizer: Optimizer | None) -> Posterior:
        """Fitted, or read off the optimizer."""
        if self.kind != "optimizer":
            return fitted(opened, self.kind, self.prior_precision)
        if not isinstance(optimizer, Optimizer):
            raise ArgumentError(
                'train to return the optimizer it used, with posterior="optimizer"',
                type(optimizer).__name__,
                'return it, or use posterior="kronecker"',
            )
        return posterior_of(
            optimizer,
            self.model,
            num_data=opened.batches.num_data,
            likelihood=opened.likelihood,
            prior_precision=self.prior_precision,
        )


SAVED = {"trials": tuple[Trial, ...], "best": Trial, "state": Mapping[str, Tensor]}


def _content(tuning: Tuning) -> dict[str, Any]:
    return {name: getattr(tuning, name) for name in SAVED}


def _read(content: Any, where: str) -> Tuning:
    found = objects(content, where, tuple(SAVED))
    values = {name: typed(kind, found[name], f"{where}: {name}") for name, kind in SAVED.items()}
    tuning = Tuning(**values)
    check_that(tuning.best in tuning.trials, "the best among the trials", shown(tuning.best))
    return tuning


KIND = stored(Kind("tuning", 1, _read, content=_content))


@backing_off
def _estimate(
    fit: _Fit, optimizer: Optimizer | None, estimator: str, *, batch_size: int | str = AUTO
) -> Result:
    """Posterior and sensitivities of one trial, in one opening of the model."""
    with fit.opener.session(fit.model, batch_size, progress=False) as opened:
        return left_out(Problem(opened, fit.posterior(opened, optimizer)), Asked(estimator))
