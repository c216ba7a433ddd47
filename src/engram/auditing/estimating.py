"""The estimate of an audit: leave-one-out of every example, copies left out together."""

from __future__ import annotations

from torch import Tensor, nn

from engram.auditing.tasks import Task
from engram.posteriors.gaussian import Posterior
from engram.posteriors.laplace import laplace
from engram.sensitivity.leave_one_out import sensitivities
from engram.sensitivity.result import Result
from engram.training.training import Training


def estimated(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    task: Task,
    training: Training | None,
    minimal: bool,
    progress: bool,
) -> tuple[Result, Posterior]:
    """Sensitivities of a trained model.

    Args:
        model: trained.
        data: inputs and targets.
        task: for the likelihood.
        training: its record, or a guess; None where nothing is known of it.
        minimal: at the last weights alone, without the walk along the training.
        progress: show bars.
    """
    posterior = laplace(
        model,
        data,
        likelihood=task.likelihood,
        structure="kronecker",
        curvature="fisher" if len(data[1]) * task.num_outputs > EXACT else "ggn",
        progress=progress,
        training=training,
    )
    rule = "linear" if minimal else "auto"
    return sensitivities(model, data, posterior, estimator=rule, progress=progress), posterior


EXACT = 20_000  # outputs of all examples up to which no label is sampled for the curvature
