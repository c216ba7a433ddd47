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
from engram.core.parameters import Layout, Named
from engram.engine.directional import directional
from engram.engine.session import Observed, Session
from engram.engine.sites import per_example_gradients
from engram.sensitivity.trajectory.full import FullStage, walked
from engram.sensitivity.trajectory.stages import Stage, residual_at_visits

Residual = Callable[[Observed], Tensor]

# Of test gradients that are turned into steps at once: solving takes several times their memory
SOLVED_BYTES = GRADIENT_BYTES // 8


def present_residual(observed: Observed) -> Tensor:
    """e at the weights as they are."""
    return observed.residual


def gradients(
    opened: Session,
    layout: Layout,
    residual: Residual = present_residual,
    chosen: Tensor | None = None,
    chunk_bytes: int = GRADIENT_BYTES,
) -> Iterator[Named]:
    """Per-example gradients J' e of the session's data by name, [b, *shape].

    Args:
        opened: the model with some data.
        layout: of the parameters; those that no gradient arrives at get zeros.
        residual: e of a batch.
        chosen: positions of the examples; all if not given.
        chunk_bytes: what those of one step may take.
    """
    names = set(layout.names)
    for observed in opened.passes("influence", chosen):
        given = residual(observed)
        arranged = observed.trace.arranged(given)  # no graph hangs on any of these
        for found in per_example_gradients(observed.trace.sites, arranged, names, chunk_bytes):
            lead = len(next(iter(found.values())))
            yield {
                name: found[name] if name in found else given.new_zeros(lead, *shape)
                for name, shape in zip(layout.names, layout.shapes, strict=True)
            }


def gradient_rows(
    opened: Session, layout: Layout, chosen: Tensor | None = None
) -> Iterator[Tensor]:
    """The same in flat rows [b, P], with the residuals at the present weights."""
    return (layout.flatten(found) for found in gradients(opened, layout, chosen=chosen))


def stepped(
    test: Session, layout: Layout, step: Callable[[Named], Named] = dict
) -> Iterator[Named]:
    """Steps S^-1 J' e of test examples, as many at a time as the training data are passed over for.

    Args:
        test: the model with the test data.
        layout: of the parameters.
        step: from gradients by name; the gradients themselves if not given.
    """
    held: list[Named] = []
    taken = 0
    for found in gradients(test, layout, chunk_bytes=SOLVED_BYTES):
        size = sum(value.numel() * value.element_size() for value in found.values())
        if held and taken + size > GRADIENT_BYTES:
            yield _joined(held)
            taken = 0
        held.append(step(found))
        taken += size
    if held:
        yield _joined(held)


def _joined(held: list[Named]) -> Named:
    """All of them, a parameter at a time; the list is empty afterwards."""
    found = {name: torch.cat([part.pop(name) for part in held]) for name in tuple(held[0])}
    held.clear()
    return found


def products(
    opened: Session,
    vectors: Named,
    residual: Residual = present_residual,
    chosen: Tensor | None = None,
) -> Tensor:
    """<J_j' e_j, u> for the examples of a session and vectors u [n, *shape] by name, [N, n]."""
    found = []
    for observed in opened.passes("influence", chosen):
        arranged = observed.trace.arranged(residual(observed))  # no graph hangs on any of these
        found.append(directional(observed.trace.sites, arranged, vectors).detach())
    return torch.cat(found).cpu()


def along_kronecker(walk: Sequence[Stage], layout: Layout, test: Session) -> Tensor:
    """Influences [N_train, N_test]: a pass over the training data for each stage and test batch.

    Args:
        walk: stages of the training, in their order.
        layout: of the parameters that move.
        test: the model at the end of training, with the test data.
    """
    columns = []
    for pulled in stepped(test, layout):
        total = torch.zeros(())
        for stage in reversed(walk):
            total = total + _met(stage, stage.filtered(pulled))
            pulled = stage.decayed(pulled)
        columns.append(total)
    return torch.cat(columns, dim=1)


def _met(stage: Stage, vectors: Named) -> Tensor:
    """Products with the training examples at a checkpoint, with the residuals of their visits."""
    likelihood = stage.driving.likelihood

    def visited(observed: Observed) -> Tensor:
        return residual_at_visits(observed, stage.segment, likelihood)

    return products(stage.driving, vectors, visited)


def along_full(walk: Sequence[FullStage], opened: Session, test: Session) -> Tensor:
    """Influences [N_train, N_test]: one walk of every training example.

    Args:
        walk: stages of the training, in their order.
        opened: the model at the end of training, with the training data.
        test: the same with the test data.
    """
    layout = walk[0].layout
    tested = torch.cat(list(gradient_rows(test, layout)))
    rows = [
        layout.flatten(walked(walk, observed)) @ tested.mT
        for observed in opened.passes("influence")
    ]
    return torch.cat(rows).cpu()
