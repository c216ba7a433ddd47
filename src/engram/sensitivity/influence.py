r"""The influence of each training example on the loss of each test example.

.. math:: \nabla \ell_j' \, S^{-1} \, \nabla \ell_i

is how much the loss of i grows, to first order, when j is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from engram.core.arguments import AUTO
from engram.core.data.batches import Batches, Data
from engram.core.data.columns import finite
from engram.core.memory import GRADIENT_BYTES, backing_off, check_room
from engram.core.parameters import Layout, trainable
from engram.engine.session import Session
from engram.engine.sites import per_example_gradients
from engram.posteriors.gaussian import Posterior
from engram.problem import opened_problem


@backing_off
def influence(
    model: nn.Module,
    train: Data,
    test: Data,
    posterior: Posterior | Any,
    *,
    batch_size: int | str = AUTO,
    progress: bool = True,
) -> Tensor:
    """Influence of every training example on the loss of every test example, [N_train, N_test].

    Positive: leaving the training example out makes the test example's loss worse.

    Args:
        model: trained; it is not changed.
        train, test: two data sets.
        posterior: of this model at its present weights.
    """
    with opened_problem(model, train, posterior, batch_size, progress) as problem:
        opened, posterior = problem.session, problem.posterior
        covered = {n: p for n, p in trainable(opened.model).items() if n in posterior.block_of}
        layout, columns = Layout.of(covered), []
        _check_room(opened, Batches(test, 1).num_data)
        for gradient in _gradients(opened, test, layout):
            step = layout.flatten(posterior.solve(layout.unflatten(gradient)))
            rows = [own @ step.mT for own in _gradients(opened, None, layout)]
            columns.append(torch.cat(rows).cpu())
        return finite("influences", torch.cat(columns, dim=1))


def _check_room(opened: Session, num_test: int) -> None:
    """The matrix, and a copy of it while its columns are put together, must fit into memory."""
    rows = opened.batches.num_data
    size = 2 * rows * num_test * torch.finfo(next(opened.model.parameters()).dtype).bits // 8
    what = f"{rows:,} x {num_test:,} influences"
    check_room(size, torch.device("cpu"), what, "take fewer test examples in one call")


def _gradients(opened: Session, data: Data | None, layout: Layout) -> Iterator[Tensor]:
    """Flat per-example gradients of the losses, [b, P], of the session's or of other data."""
    source = opened
    if data is not None:
        source = replace(opened, batches=Batches(data, opened.batches.batch_size))
    names = set(layout.names)
    for observed in source.passes("influence"):
        arranged = observed.trace.arranged(observed.residual)  # no graph hangs on any of these
        for found in per_example_gradients(observed.trace.sites, arranged, names, GRADIENT_BYTES):
            lead = len(next(iter(found.values())))
            filled = {
                name: found[name] if name in found else observed.residual.new_zeros(lead, *shape)
                for name, shape in zip(layout.names, layout.shapes, strict=True)
            }
            yield layout.flatten(filled)
