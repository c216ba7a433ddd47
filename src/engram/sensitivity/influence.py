r"""The influence of each training example on the loss of each test example.

.. math:: \nabla \ell_j' \, S^{-1} \, \nabla \ell_i

is how much the loss of i grows, to first order, when j is left out. Along a recorded training the
step S^-1 grad of j is the displacement that its absence builds up from segment to segment
(:mod:`engram.sensitivity.trajectory.influence`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from engram.core.arguments import AUTO, is_auto, positive
from engram.core.data.batches import Batches, Data
from engram.core.data.columns import finite
from engram.core.memory import backing_off, check_room
from engram.core.parameters import Layout, Named, trainable
from engram.engine.gradient_accumulator import DiscardGradients
from engram.engine.session import Session
from engram.posteriors.gaussian import Posterior
from engram.problem import opened_problem
from engram.sensitivity.estimators import check_estimator
from engram.sensitivity.estimators.base import Setting
from engram.sensitivity.estimators.linear import ESTIMATOR as AT_THE_END
from engram.sensitivity.estimators.trajectory import ESTIMATOR as ALONG_THE_RECORD
from engram.sensitivity.sampling import Draws, Sampling, weights
from engram.sensitivity.trajectory.influence import along_full, along_kronecker, products, stepped

WAYS = {AT_THE_END.name: AT_THE_END, ALONG_THE_RECORD.name: ALONG_THE_RECORD}


@backing_off
def influence(
    model: nn.Module,
    train: Data,
    test: Data,
    posterior: Posterior | Any,
    *,
    estimator: str = AUTO,
    batch_size: int | str = AUTO,
    samples: int = 0,
    step_size: float = 1.0,
    seed: int = 0,
    progress: bool = True,
) -> Tensor:
    """Influence of every training example on the loss of every test example, [N_train, N_test].

    Positive: leaving the training example out makes the test example's loss worse.

    Args:
        model: trained; it is not changed.
        train, test: two data sets.
        posterior: of this model at its present weights.
        estimator: ``linear``, at the present weights, or ``trajectory``, along the checkpoints of
            a recorded training: ``"auto"`` where there are some. That takes a pass over the
            training data for every checkpoint.
        samples: weights drawn from the posterior for the expected gradient of every training
            example, a pass each; 0 takes it at the mean. That of a test example is at the mean.
        step_size: rho of the equation.
        seed: of the draws.
    """
    check_estimator(estimator, (AUTO, *WAYS))
    sampling = Sampling.checked(samples, seed=seed)
    sampling.rule(estimator)
    rho = positive("step_size", step_size)
    with opened_problem(model, train, posterior, batch_size, progress) as problem:
        opened = problem.session
        tested = replace(opened, batches=Batches(test, opened.batches.batch_size))
        _check_room(opened, tested.batches.num_data)
        if is_auto(estimator):
            walks = ALONG_THE_RECORD.fits(problem.posterior) and not sampling.samples
        else:
            walks = WAYS[estimator] is ALONG_THE_RECORD
        if walks:
            found = _along_the_record(opened, problem.posterior, tested)
        else:
            found = _at_the_end(opened, problem.posterior, tested, sampling)
        return finite("influences", found if rho == 1.0 else rho * found)


def _at_the_end(opened: Session, posterior: Posterior, test: Session, sampling: Sampling) -> Tensor:
    """By the posterior at the present weights; a pass over the training data a test batch."""
    covered = {n: p for n, p in trainable(opened.model).items() if n in posterior.block_of}
    return torch.cat(
        [
            _met(opened, step, sampling.draws(posterior, opened.model))
            for step in stepped(test, Layout.of(covered), posterior.solve)
        ],
        dim=1,
    )


def _met(opened: Session, step: Named, draws: Draws) -> Tensor:
    """E[g_j]' u for every training example j and steps u [n, *shape], as [N_train, n]."""
    if not draws.samples:
        return products(opened, step)
    total = torch.zeros(())
    for draw in draws:
        with weights(opened.model, draw):
            total = total + products(opened, step) / draws.samples
    return total


def _along_the_record(opened: Session, posterior: Posterior, test: Session) -> Tensor:
    """By the stages that leave-one-out takes."""
    setting = Setting(opened.likelihood, posterior, 0, DiscardGradients(), opened=opened)
    setting = ALONG_THE_RECORD.prepared(setting)
    if setting.full_walk:
        return along_full(setting.full_walk, setting.opened or opened, test)
    moving = trainable(opened.model)
    names = {name for block in setting.walk[0].bases.blocks for name in block.names}
    layout = Layout.of({name: p for name, p in moving.items() if name in names})
    return along_kronecker(setting.walk, layout, test)


def _check_room(opened: Session, num_test: int) -> None:
    """The matrix, and a copy of it while its columns are put together, must fit into memory."""
    rows = opened.batches.num_data
    size = 2 * rows * num_test * torch.finfo(next(opened.model.parameters()).dtype).bits // 8
    what = f"{rows:,} x {num_test:,} influences"
    check_room(size, torch.device("cpu"), what, "take fewer test examples in one call")
