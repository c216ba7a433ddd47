"""The sensitivity of every example to being left out."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from engram.core.arguments import AUTO, MANY, is_auto, positive, truth, whole
from engram.core.data.batches import Data
from engram.core.data.columns import Columns
from engram.core.memory import backing_off
from engram.core.processes.meeting import together
from engram.core.state.model import device_of
from engram.engine.gradient_accumulator import (
    DiscardGradients,
    GradientAccumulator,
    GradientSink,
)
from engram.engine.prepare import not_estimated
from engram.engine.session import Session
from engram.errors import LikelihoodError
from engram.posteriors.gaussian import Posterior
from engram.posteriors.laplace_torch import as_posterior
from engram.problem import Opener, Problem
from engram.sensitivity.basis import Basis
from engram.sensitivity.course import Losses, course_of
from engram.sensitivity.diagnostics import diagnose, undiagnosed
from engram.sensitivity.estimators import ESTIMATORS, check_estimator, trajectory
from engram.sensitivity.estimators.base import Estimator, Setting
from engram.sensitivity.estimators.trajectory import level
from engram.sensitivity.leverages import Leverages, sampled_leverages
from engram.sensitivity.provenance import provenance
from engram.sensitivity.result import Result
from engram.sensitivity.sampling import AT_THE_MEAN, GRADIENT, Sampling
from engram.sensitivity.step_size import with_step_size
from engram.training.memorisation import memorisation, prequential

RECORD_MISSING = (
    "this posterior comes from a file without the record of its training: the estimate is that of "
    "the end alone; give it back with posterior.with_training(engram.load(folder), model)"
)


@backing_off
def sensitivities(
    model: nn.Module,
    data: Data,
    posterior: Posterior | Any,
    *,
    estimator: str = AUTO,
    rounds: int = 3,
    segments: int | str = AUTO,
    across_ranks: bool = False,
    diagnostics: bool = True,
    batch_size: int | str = AUTO,
    samples: int = 0,
    expectation: str = GRADIENT,
    step_size: float = 1.0,
    seed: int = 0,
    progress: bool = True,
) -> Result:
    """How far each example's outputs, prediction and loss would move without it.

    Args:
        model: trained, or in training; it is not changed.
        data: the training data.
        posterior: of this model at its present weights; a fitted laplace-torch object works too.
        estimator: ``linear``, ``corrected``, ``iterated``, ``paper``, ``newton`` for posteriors
            with the exact Hessian, or ``downdated`` for those with Kronecker factors. ``"auto"`` is
            ``newton`` and ``downdated`` with these, ``corrected`` with other dense precisions
            (``full``, ``last_layer``), else ``linear``. Where the training was recorded with
            checkpoints it is ``trajectory``, which goes along them.
        rounds: of ``iterated``.
        segments: of ``trajectory``, with a pass over the data for each; ``"auto"`` is up to four.
            More come nearer to sizes of nets whose estimates are too large, as convolutional and
            residual ones and transformers (docs/results/segments.md), and take as much longer.
        across_ranks: divide the examples among the processes of ``torch.distributed``, which must
            all make the call; each gets the whole result.
        diagnostics: compute leverages, of as many examples as take a quarter of the pass, and the
            gradient of the objective. Without them the verdict cannot judge, and says so.
        batch_size: most examples at a time; ``"auto"`` is what the free memory has room for.
        samples: weights drawn from the posterior for the expectation in the equation, a pass each;
            0 takes it at the mean. An expected gradient is that of no residual: ``linear`` or
            ``paper``.
        expectation: what is averaged over them: each example's ``gradient``, as the equation has
            it, or its whole ``deviation`` at the sampled weights, with any estimator.
        step_size: rho of the equation, the share of an example that is taken out.
        seed: of the draws, and of the choice of examples whose leverage is computed.
        progress: show a bar when it takes longer than a few seconds.

    Example:
        >>> import torch
        >>> from engram import laplace
        >>> model = nn.Linear(3, 2)
        >>> data = (torch.randn(20, 3), torch.randint(0, 2, (20,)))
        >>> result = sensitivities(model, data, laplace(model, data, prior_precision=1.0))
        >>> result.loo_nll > result.train_nll
        True
    """
    asked = Asked.checked(
        estimator, rounds, segments, samples, expectation, step_size, diagnostics, seed
    )
    said = {"posterior": posterior, "settings": asked}
    with together(across_ranks, model, data, "sensitivities", said) as peers:
        posterior = as_posterior(posterior, model)
        opener = Opener(data, posterior.known_likelihood)
        with opener.session(model, batch_size, progress, peers, posterior.only) as opened:
            return left_out(Problem(opened, posterior), asked)


@backing_off
def sensitivities_again(
    opener: Opener,
    model: nn.Module,
    posterior: Posterior,
    *,
    estimator: str = AUTO,
    rounds: int = 3,
    segments: int | str = AUTO,
    across_ranks: bool = False,
    diagnostics: bool = True,
    batch_size: int | str = AUTO,
    samples: int = 0,
    expectation: str = GRADIENT,
    step_size: float = 1.0,
    seed: int = 0,
    progress: bool = True,
) -> Result:
    """The same of a model that is asked again and again, as while it trains: planned once.

    Args:
        opener: of the model with its data.
    """
    asked = Asked.checked(
        estimator, rounds, segments, samples, expectation, step_size, diagnostics, seed
    )
    said = {"posterior": posterior, "settings": asked}
    with (
        together(across_ranks, model, opener.data, "sensitivities", said) as peers,
        opener.session(model, batch_size, progress, peers, posterior.only) as opened,
    ):
        return left_out(Problem(opened, posterior), asked)


@dataclass(frozen=True)
class Asked:
    """What is asked of the sensitivities of an opened problem, as for :func:`sensitivities`."""

    estimator: str = AUTO
    rounds: int = 3
    segments: int | None = None
    sampling: Sampling = AT_THE_MEAN
    step_size: float = 1.0
    diagnostics: bool = True

    @classmethod
    def checked(
        cls,
        estimator: str,
        rounds: int,
        segments: int | str,
        samples: int,
        expectation: str,
        step_size: float,
        diagnostics: bool,
        seed: int,
    ) -> Asked:
        """From what a user has given."""
        rounds = whole("number of rounds", rounds, 0, MANY, "use rounds=3")
        check_estimator(estimator)
        wanted = None
        if not is_auto(segments):
            wanted = whole("number of segments", segments, 1, MANY, "use segments=8")
        sampling = Sampling.checked(samples, expectation, seed)
        step_size = positive("step_size", step_size)
        diagnostics = truth("diagnostics", diagnostics)
        return cls(sampling.rule(estimator), rounds, wanted, sampling, step_size, diagnostics)


def left_out(problem: Problem, asked: Asked) -> Result:
    """The sensitivities of an opened problem."""
    opened, posterior = problem.session, problem.posterior
    stepped = with_step_size(posterior, asked.step_size)
    chosen = asked.sampling.chosen(asked.estimator, stepped)
    if posterior.lacks_record and is_auto(asked.estimator):
        warnings.warn(RECORD_MISSING, stacklevel=2)
    total = GradientAccumulator()
    sink: GradientSink = total if asked.diagnostics else DiscardGradients()
    setting = Setting(opened.likelihood, stepped, asked.rounds, sink, opened=opened)
    if asked.segments is not None:
        trajectory.check_segments(asked.segments, chosen, stepped)
        setting = replace(setting, segments=asked.segments)
    estimator = asked.sampling.over(ESTIMATORS[chosen], posterior, opened.model)
    tensors = _estimates(opened, estimator, setting)
    readouts = tensors.pop("readouts", None)
    if readouts is not None:
        tensors["loo_loss"] = level(readouts)
    eigenvalues = tensors.pop("eigenvalues", None)
    known = (opened.model, posterior, opened.engine.coverage, tensors["flagged"])
    before = _prequential(problem, tensors["targets"])
    if asked.diagnostics:
        total.take_sums(opened.peers, device_of(opened.model))
        leverages = _leverages(problem, eigenvalues, tensors["outputs"], asked)
        losses = Losses(tensors["loss"], tensors["loo_loss"], before)
        course = course_of(posterior.training, tensors["targets"], readouts, losses)
        figures = replace(diagnose(*known, total, leverages), course=course)
        leverage = leverages.trace
    else:
        leverage, figures = torch.full_like(tensors["score"], math.nan), undiagnosed(*known)
    return Result(
        **tensors,
        prequential=before,
        leverage=leverage,
        diagnostics=figures,
        coverage=opened.engine.coverage.ways,
        provenance=provenance(opened.model, _settings(problem, chosen, asked)),
        basis=Basis.of(
            chosen,
            posterior,
            opened.likelihood,
            in_eval_mode=tuple(opened.switched),
            not_estimated=_notes(problem, tensors),
            along=ESTIMATORS[chosen].along_training,
            walkable=trajectory.ESTIMATOR.fits(posterior),
        ),
    )


def _notes(problem: Problem, tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """What the estimate leaves out, and what the training's own steps say against it."""
    found = not_estimated(problem.model)
    if not len(_prequential(problem, tensors["targets"])):
        return found
    assert problem.posterior.training is not None
    learned = memorisation(problem.posterior.training, tensors["targets"], tensors["loss"])
    return found if learned.note is None else (*found, learned.note)


def _prequential(problem: Problem, targets: Tensor) -> Tensor:
    """The mean loss of every example before its visits; empty where they were not recorded."""
    training = problem.posterior.training
    if training is None or training.visits is None or training.visits.num_data != len(targets):
        return torch.zeros(0)
    try:
        found = prequential(training, targets)
    except LikelihoodError:  # of a loss that sums over outputs say nothing about
        return torch.zeros(0)
    return torch.zeros(0) if found is None else found


def _leverages(
    problem: Problem, eigenvalues: Tensor | None, outputs: Tensor, asked: Asked
) -> Leverages:
    """Of all examples where the estimator has given their eigenvalues, else of some."""
    if eigenvalues is not None:  # with a step they are of rho V Lambda
        return Leverages.of_all(eigenvalues / asked.step_size)
    kept = outputs if problem.likelihood.keeps_outputs else None
    return sampled_leverages(problem.session, problem.posterior, kept, asked.sampling.seed)


def _settings(problem: Problem, estimator: str, asked: Asked) -> dict[str, Any]:
    """The settings that go into the result's provenance."""
    posterior, sampling = problem.posterior, asked.sampling
    return {
        "estimator": estimator,
        "rounds": asked.rounds if estimator == "iterated" else None,
        "segments": asked.segments,
        "samples": sampling.samples,
        "expectation": sampling.expectation if sampling.samples else None,
        "step_size": asked.step_size,
        "structure": posterior.structure,
        "posterior": dict(posterior.settings),
        "prior_precision": posterior.prior_precision,
        "likelihood": repr(problem.likelihood),
        "batch_size": problem.batches.batch_size,
        "seed": sampling.seed,
        "num_data": problem.num_data,
        "ranks": problem.session.peers.count,
    }


def _estimates(opened: Session, estimator: Estimator, setting: Setting) -> dict[str, Tensor]:
    """The columns of the result, in the order of the data, from all processes that share them."""
    number, setting = opened.batches.num_data, estimator.prepared(setting)
    opened = setting.opened or opened
    own = opened.own_rows()
    likelihood = opened.likelihood
    columns = Columns(number if own is None else len(own), likelihood.padding)
    for observed in opened.passes("sensitivities", own):
        estimate = estimator(observed, setting)
        rows = {
            "indices": observed.batch.indices,
            "targets": observed.batch.targets,
            **likelihood.kept_columns(
                observed.outputs,
                observed.targets,
                estimate.deviation,
                estimate.prediction_deviation,
            ),
            "score": estimate.prediction_deviation.abs().sum(1),
            "loss": observed.loss,
            "loo_loss": estimate.loo_loss,
            "flagged": estimate.flagged,
        }
        if estimate.eigenvalues is not None:
            rows["eigenvalues"] = estimate.eigenvalues
        if estimate.readouts is not None:
            rows["readouts"] = estimate.readouts
        columns.add(rows)
    return opened.peers.joined("sensitivities", columns.complete(), likelihood.padding)
