"""Replace some estimates in a result by exact solves, replays or retraining without the example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from engram.core.arguments import AUTO, fraction, is_auto, one_of, shown
from engram.core.data.batches import Data
from engram.core.memory import backing_off
from engram.core.parameters import trainable
from engram.core.selection import check_group
from engram.curvature.kinds import Curvature, check_exact
from engram.engine.session import Session
from engram.errors import ArgumentError, DataError
from engram.evidence.matching import check_outputs
from engram.likelihoods import Likelihood
from engram.posteriors.gaussian import Posterior
from engram.problem import Opener, Problem, opened_problem
from engram.retraining.own_trainings import Replay
from engram.retraining.prior import Prior
from engram.retraining.recipes import Newton
from engram.retraining.retrain import Train, retrain_examples
from engram.sensitivity.estimators.base import displaced
from engram.sensitivity.exact_steps import solve_left_out
from engram.sensitivity.provenance import noted
from engram.sensitivity.result import OBTAINED, Result, check_result
from engram.training.training import Training

Indices = Sequence[int] | Tensor
# Examples with the highest scores that are refined with the flagged ones: exactness against passes
TOP_SHARE = 0.05  # of the data
FEWEST_TOP = 20  # however small the data
SOLVE, REPLAYED, RETRAINED = "solve", "replay", "retrain"
METHODS = (AUTO, SOLVE, REPLAYED, RETRAINED)


@backing_off
def refine(
    model: nn.Module,
    data: Data,
    result: Result,
    posterior: Posterior | Any,
    *,
    indices: Indices | str = AUTO,
    method: str = AUTO,
    curvature: str = "hessian",
    relative_residual: float = 1e-3,
    train: Train = AUTO,
    batch_size: int | str = AUTO,
    progress: bool = True,
) -> Result:
    r"""Compute some examples of a result again, exactly, and merge them into it.

    .. math:: d_i = J_i (H + \delta - H_i)^{-1} \nabla \ell_i

    is solved with the exact curvature H of all data, less the example's own, by conjugate
    gradients preconditioned with the posterior. That assumes a minimum; for a net that was stopped,
    its recorded training is walked again without the example, or your own loop trains it anew.

    Args:
        model: the trained model that the result is about; it is not changed.
        data: the training data.
        result: of :func:`engram.sensitivities` on this model and data, or refined before.
        posterior: of this model; the better it is, the fewer passes the solves take.
        indices: which examples; ``"auto"`` is the flagged ones and the 5 % (at least 20) with the
            highest score.
        method: ``solve``; ``replay`` of the recorded training that ``train`` is; or ``retrain``,
            for the truth itself. ``"auto"`` is ``solve`` for a posterior at a minimum, and for
            that of a training what ``train`` allows.
        curvature: of ``solve``: ``hessian``, or ``ggn``. Where the Hessian without the example is
            not positive definite, or leads too far, a safer curvature is taken and the example
            flagged.
        relative_residual: of ``solve``: of the equations, at which they count as solved.
        train: of ``retrain``: a recipe or a function, as in :func:`engram.retrain`; ``"auto"`` is
            ``newton``. Of ``replay``: the record, or ``engram.recipes.Replay(training, start=0.5)``
            for the second half of it, at half the cost.
        batch_size: most examples at a time; ``"auto"`` is what the free memory has room for.
        progress: show a bar when it takes longer than a few seconds.

    Returns:
        The result with these examples replaced. Its column ``obtained`` says of every example
        whether it is an ``estimate`` or comes from a ``solve``, a ``replay`` or a ``retrain``.

    Example:
        >>> from engram import laplace, sensitivities
        >>> model = nn.Linear(3, 2)
        >>> data = (torch.randn(30, 3), torch.randint(0, 2, (30,)))
        >>> posterior = laplace(model, data, structure="kronecker", prior_precision=1.0)
        >>> refined = refine(model, data, sensitivities(model, data, posterior), posterior)
        >>> refined.to_frame()["obtained"].value_counts().to_dict()
        {'solve': 20, 'estimate': 10}
    """
    one_of("method", method, METHODS, 'use "auto"')
    check_exact(curvature)
    residual = fraction("relative_residual", relative_residual, "use relative_residual=1e-3")
    with opened_problem(model, data, posterior, batch_size, progress) as problem:
        _check_result(result, problem)
        method = _checked_method(method, train, problem.posterior)
        group = _default_choice(result) if is_auto(indices) else cast(Indices, indices)
        chosen = check_group(group, None, problem.num_data)[0]
        request = Request(problem.posterior, chosen, curvature, residual)
        obtained = _solve(problem.session, request) if method == SOLVE else None
    if obtained is None:  # a function trains in the modes that the caller's model is in
        opener = Opener(data, problem.likelihood, problem.session.engine)
        obtained = _retrain(problem.model, opener, request, train, progress)
    return _merged(result, problem.likelihood, request, obtained, method)


@dataclass(frozen=True)
class Request:
    """Which examples to refine, and to which residual."""

    posterior: Posterior
    chosen: Tensor
    curvature: str
    relative_residual: float


@dataclass(frozen=True)
class Obtained:
    """Deviations [M, K] of the chosen examples, which of them not to trust, and the record."""

    deviation: Tensor
    flagged: Tensor
    record: dict[str, Any]


def _checked_method(method: str, train: Train, posterior: Posterior) -> str:
    """The method that was asked for, or the one that posterior and training leave."""
    recorded = isinstance(train, Training | Replay)
    if method == REPLAYED and not recorded:
        raise ArgumentError(
            "train=, the record of the training, to replay",
            "none" if is_auto(train) else shown(train),
            "pass train=training, of engram.record(optimizer, model, replay=True)",
        )
    if method != AUTO:
        return method
    if not posterior.stopped and is_auto(train):
        return SOLVE
    if is_auto(train):
        raise ArgumentError(
            "train=, since the posterior is that of a training and a solve assumes a minimum",
            "none",
            "pass train=training, of engram.record(optimizer, model, replay=True); or "
            "train=engram.recipes.FromStart(fit, Net)",
        )
    return REPLAYED if recorded else RETRAINED


def _solve(opened: Session, request: Request) -> Obtained:
    posterior, chosen = request.posterior, request.chosen
    solved = solve_left_out(opened, posterior, chosen, request.curvature, request.relative_residual)
    record = {
        "curvature": request.curvature,
        "products": solved.products,
        "refused": int(solved.refused.sum()),
        "largest_residual": float(solved.residual.max()),
    }
    unsolved = ~(solved.residual <= request.relative_residual)
    return Obtained(solved.deviation, solved.refused | unsolved, record)


def _retrain(
    model: nn.Module, opener: Opener, request: Request, train: Train, progress: bool
) -> Obtained:
    posterior = request.posterior
    prior: Prior = posterior.prior_precision
    if posterior.prior_by_name or not prior:  # of a training without decay it is 0
        prior = {name: posterior.prior_of(name) for name in trainable(model)}
    if is_auto(train):
        train = "newton"
    if train == "newton" and _is_nearly_exact(posterior):
        train = Newton(posterior=posterior)
    truth = retrain_examples(model, opener, request.chosen, train, prior, progress)
    record = {
        "unconverged": int((~truth.converged).sum()),
        "noise_floor": truth.noise_floor.level,
        "drift": truth.noise_floor.drift,
        "evaluations": int(truth.evaluations.sum()),
    }
    return Obtained(truth.deviation, ~truth.converged, record)


def _is_nearly_exact(posterior: Posterior) -> bool:
    """Whether steps with it need few products with the Hessian besides."""
    exact = posterior.curvature is Curvature.HESSIAN
    return exact and posterior.is_partial


def _default_choice(result: Result) -> Tensor:
    """The flagged examples and those with the highest scores."""
    count = min(result.num_data, max(FEWEST_TOP, round(TOP_SHARE * result.num_data)))
    top = result.score.topk(count).indices
    return torch.cat([result.flagged.nonzero()[:, 0], top]).unique()


def _check_result(result: Result, problem: Problem) -> None:
    """The result must be about this model on this data, with this loss and these priors."""
    check_result(result)
    result.basis.check_likelihood(problem.likelihood)
    result.basis.check_priors(problem.posterior)
    batches = problem.batches
    in_order = torch.equal(result.indices, torch.arange(batches.num_data))
    if result.num_data != batches.num_data or not in_order:
        raise DataError(
            f"a result of all {batches.num_data} examples of this data, in order",
            f"one of {result.num_data}",
            "pass the result and the data that belong together",
        )
    check_outputs(result, problem.model, batches)


def _merged(
    result: Result, likelihood: Likelihood, request: Request, obtained: Obtained, method: str
) -> Result:
    chosen = request.chosen
    outputs, targets = result.outputs[chosen], result.targets[chosen]
    deviation = obtained.deviation.to(result.deviation)
    prepared = likelihood.prepare(outputs, targets)
    change, loo_loss = displaced(likelihood, outputs, prepared, deviation)
    rows = {
        "deviation": deviation,
        "prediction_deviation": change,
        "score": change.abs().sum(1),
        "loo_loss": loo_loss,
        "flagged": obtained.flagged,
        "obtained": torch.full((len(chosen),), OBTAINED.index(method), dtype=torch.uint8),
    }
    columns = {}
    for name, values in rows.items():
        column = getattr(result, name).clone()
        column[chosen] = values.to(column)
        columns[name] = column
    step = {"method": method, "examples": len(chosen), **obtained.record}
    diagnostics = replace(
        result.diagnostics, flagged_share=float(columns["flagged"].double().mean())
    )
    return replace(
        result,
        **columns,
        diagnostics=diagnostics,
        provenance=noted(result.provenance, refined=[step]),
    )
