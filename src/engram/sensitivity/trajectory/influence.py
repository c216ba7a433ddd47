r"""Influence along a recorded training: what leaving j out does to the loss of i at its end.

.. math:: \nabla \ell_i' D_j, \qquad
    D_j = \sum_s e^{-k_S A_S} \cdots e^{-k_{s+1} A_{s+1}} \,
    \frac{1 - e^{-k_s A_s}}{A_s} \, \frac{\nabla \ell_j(\theta_s)}{N}

With Kronecker factors the gradients of the test examples are pulled back through the segments, from
the last to the first, and meet those of the training examples at each checkpoint: no displacement
is ever held. With full matrices D_j is the one of the leave-one-out estimate, the example's own
curvature taken out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from engram.core.memory import GRADIENT_BYTES
from engram.core.parameters import Layout
from engram.engine.session import Observed, Session
from engram.engine.sites import per_example_gradients
from engram.sensitivity.trajectory.full import FullStage, walked
from engram.sensitivity.trajectory.stages import Stage, residual_at_visits

Residual = Callable[[Observed], Tensor]


def present_residual(observed: Observed) -> Tensor:
    """e at the weights as they are."""
    return observed.residual


def gradient_rows(
    opened: Session,
    layout: Layout,
    residual: Residual = present_residual,
    chosen: Tensor | None = None,
) -> Iterator[Tensor]:
    """Flat per-example gradients J' e of the session's data, [b, P].

    Args:
        opened: the model with some data.
        layout: of the parameters.
        residual: e of a batch.
        chosen: positions of the examples; all if not given.
    """
    names = set(layout.names)
    for observed in opened.passes("influence", chosen):
        given = residual(observed)
        arranged = observed.trace.arranged(given)  # no graph hangs on any of these
        for found in per_example_gradients(observed.trace.sites, arranged, names, GRADIENT_BYTES):
            lead = len(next(iter(found.values())))
            filled = {
                name: found[name] if name in found else given.new_zeros(lead, *shape)
                for name, shape in zip(layout.names, layout.shapes, strict=True)
            }
            yield layout.flatten(filled)


def along_kronecker(walk: Sequence[Stage], layout: Layout, test: Session) -> Tensor:
    """Influences [N_train, N_test]: a pass over the training data for each stage and test batch.

    Args:
        walk: stages of the training, in their order.
        layout: of the parameters that move.
        test: the model at the end of training, with the test data.
    """
    columns = []
    for gradient in gradient_rows(test, layout):
        pulled, total = layout.unflatten(gradient), torch.zeros(())
        for stage in reversed(walk):
            met = layout.flatten(stage.filtered(pulled))
            total = total + torch.cat([own @ met.mT for own in _at(stage, layout)]).cpu()
            pulled = stage.decayed(pulled)
        columns.append(total)
    return torch.cat(columns, dim=1)


def _at(stage: Stage, layout: Layout) -> Iterator[Tensor]:
    """Gradients of the training examples at a checkpoint, with the residuals of their visits."""
    likelihood = stage.driving.likelihood

    def visited(observed: Observed) -> Tensor:
        return residual_at_visits(observed, stage.segment, likelihood)

    return gradient_rows(stage.driving, layout, visited)


def along_full(walk: Sequence[FullStage], opened: Session, test: Session) -> Tensor:
    """Influences [N_train, N_test]: one walk of every training example.

    Args:
        walk: stages of the training, in their order.
        opened: the model at the end of training, with the training data.
        test: the same with the test data.
    """
    layout = walk[0].layout
    gradients = torch.cat(list(gradient_rows(test, layout)))
    rows = [
        layout.flatten(walked(walk, observed)) @ gradients.mT
        for observed in opened.passes("influence")
    ]
    return torch.cat(rows).cpu()
