"""The estimate of an audit: leave-one-out of every example, copies left out together."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from engram.auditing.stock.base import Estimate
from engram.auditing.tasks import Task
from engram.core.arguments import AUTO
from engram.errors import PosteriorError
from engram.posteriors.gaussian import Posterior
from engram.posteriors.laplace import laplace
from engram.sensitivity.leave_one_out import sensitivities
from engram.sensitivity.result import Result
from engram.training.training import Training

# Of weights that nobody has said anything about, and that no regulariser fits: weak, as most are
UNKNOWN_PRIOR = 1.0


def estimated(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    task: Task,
    training: Training | None,
    how: Estimate,
    progress: bool,
) -> tuple[Result, Posterior]:
    """Sensitivities of a trained model.

    Args:
        model: trained.
        data: inputs and targets.
        task: for the likelihood.
        training: its record, or a guess; None where nothing is known of it.
        how: structure and rule.
        progress: show bars.
    """
    outputs, most = len(data[1]) * task.num_outputs, how.most_outputs
    fit = partial(
        laplace,
        model,
        data,
        likelihood=task.likelihood,
        structure=how.structure,
        curvature=AUTO if most is None or outputs <= most else "fisher",
        progress=progress,
    )
    try:
        posterior = fit(training=training)
    except PosteriorError:
        if training is not None:
            raise
        posterior = fit(prior_precision=UNKNOWN_PRIOR)
    result = sensitivities(model, data, posterior, estimator=how.estimator, progress=progress)
    return result, posterior
