r"""The walk along a recorded training with full matrices, on the remaining data.

In a segment with curvature A (mean per example, with the prior), training time k (a matrix, mostly
diagonal) and the example's residual e, output Hessian L and Jacobian J at the checkpoint in its
middle, the difference D of the trainings with and without the example obeys
:math:`\dot D = -A D + J'(e + L J D) / N`: the second part takes the example's own curvature out of
A. With the residual's mean over the segment, :math:`u`, in its place,

.. math::
    F &= (1 - e^{-k A}) A^{-1}, \qquad V = J F J' / N \\
    u &= \big(I - \tfrac12 L V\big)^{-1} \big(e + \tfrac12 L J (D + e^{-k A} D)\big) \\
    D &\leftarrow e^{-k A} D + F J' u / N

Since A holds the example's own curvature, no eigenvalue of L V exceeds 1: the solve cannot explode.
An eigendecomposition, P^3, for every checkpoint, and N K P^2 for the examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engram.core.dtypes import eigh, wide
from engram.core.parameters import Layout, Named
from engram.core.progress import progress_over
from engram.core.state.model import device_of
from engram.curvature.kinds import ggn_roots
from engram.curvature.moments import OuterMoments
from engram.engine.dropout import dropping
from engram.engine.session import Observed, Session
from engram.sensitivity.trajectory.stages import at_checkpoint, residual_at_visits
from engram.training.segments import NamedTraining, Segment

SHORTEST = 1e-12  # training time of an entry: one that never had a step moves nowhere
COPIES = 3  # of an example's Jacobian that are held at a time
SMALL = 1e-6  # k A below which (1 - e^-kA) / kA is 1 - kA / 2


@dataclass(frozen=True)
class FullStage:
    """The model at a checkpoint, and what its segment does to displacements.

    Args:
        session: passes over the data with the weights of the checkpoint.
        segment: of the training, with the checkpoint in its middle.
        layout: of the parameters that move.
        root: of the training time k of every entry, [P].
        vectors: eigenvectors of :math:`k^{1/2} A k^{1/2}`, [P, P].
        decay: e^-x for its eigenvalues x, [P].
        gain: (1 - e^-x) / x over N, [P].
    """

    session: Session
    segment: Segment
    layout: Layout
    root: Tensor = field(repr=False)
    vectors: Tensor = field(repr=False)
    decay: Tensor = field(repr=False)
    gain: Tensor = field(repr=False)

    @classmethod
    def of(cls, session: Session, segment: Segment, layout: Layout, seed: int) -> FullStage:
        """With the Gauss-Newton matrix over all data, and dropout as while training."""
        time = _flat(segment.time_of_middle, layout).clamp(min=SHORTEST)
        number = session.batches.num_data
        matrix = _gauss_newton(session, layout, seed) / number
        matrix.diagonal().add_(_flat(segment.decay, layout).to(matrix) / time.to(matrix))
        root = time.to(matrix).sqrt()
        values, vectors = eigh(matrix * torch.outer(root, root))
        values = values.clamp(min=0)
        small = values < SMALL
        safe = torch.where(small, 1.0, values)
        gain = torch.where(small, 1 - values / 2, -torch.expm1(-safe) / safe) / number
        like = next(iter(session.engine.parameters.values()))
        kept = (part.to(like) for part in (root, vectors, torch.exp(-values), gain))
        return cls(session, segment, layout, *kept)

    def advanced(self, batch: Observed, displacement: Tensor | None) -> Tensor:
        """D [B, P] at the end of the segment from D at its start; None stands for 0.

        Args:
            batch: the examples, as observed at the end of training.
            displacement: D.
        """
        seen = self.session.observe(batch.batch)
        jacobian = (self._jacobian(seen) * self.root) @ self.vectors  # [B, K, P]
        factor = self.session.likelihood.hessian_factor(seen.outputs, seen.targets)
        start = jacobian.new_zeros(len(jacobian), jacobian.shape[2])
        if displacement is not None:
            start = (displacement / self.root) @ self.vectors
        kept = start * self.decay
        moved = jacobian @ ((start + kept) / 2)[:, :, None]
        right = self._residual(seen)[:, :, None] + factor @ (factor.mT @ moved)
        variance = (jacobian * self.gain) @ jacobian.mT
        own = factor @ (factor.mT @ variance)
        pull = torch.linalg.solve(torch.eye(own.shape[1]).to(own) - own / 2, right)
        seen.trace.release()
        end = kept + self.gain * (jacobian.mT @ pull)[:, :, 0]
        return (end @ self.vectors.mT) * self.root

    def _jacobian(self, seen: Observed) -> Tensor:
        """J of every example, [B, K, P], by a backward pass for each output."""
        rows = []
        for k in range(seen.outputs.shape[1]):
            seed = torch.zeros_like(seen.outputs)
            seed[:, k] = 1
            rows.append(seen.trace.own_gradient_rows(seed, self.layout))
        return torch.stack(rows, dim=1)

    def _residual(self, seen: Observed) -> Tensor:
        """e: at the visits of the segment, where they were recorded, else at the checkpoint."""
        return residual_at_visits(seen, self.segment, self.session.likelihood)


def full_stages(
    opened: Session, training: NamedTraining, layout: Layout, count: int, seed: int
) -> list[FullStage]:
    """The stages of a recorded training.

    Args:
        opened: the model at the end of it, with the data.
        training: with checkpoints.
        layout: of the parameters that move.
        count: of stages; fewer where there are not two checkpoints for each, so that one of them
            is in the middle.
        seed: of dropout's masks.
    """
    points = sum(snapshot.step > 0 for snapshot in training.snapshots)
    segments = training.segments(max(1, min(count, points // 2)))
    shown = progress_over(segments, "full matrices along the training", opened.progress)
    return [
        FullStage.of(at_checkpoint(opened, s, training.augment, seed), s, layout, seed)
        for s in shown
    ]


def bytes_carried(layout: Layout, outputs: Tensor) -> int:
    """What an example takes on the walk."""
    return COPIES * outputs.shape[1] * layout.num_params * outputs.element_size()


def walked(stages: Sequence[FullStage], batch: Observed) -> Named:
    """D of every example at the end of training, [B, *shape] by name."""
    displacement: Tensor | None = None
    for stage in stages:
        displacement = stage.advanced(batch, displacement)
    assert displacement is not None
    return stages[0].layout.unflatten(displacement)


def _gauss_newton(session: Session, layout: Layout, seed: int) -> Tensor:
    """The sum over all examples, [P, P]."""
    moments = OuterMoments(layout, device_of(session.model))
    with dropping(session.model, seed):
        for observed in session.passes("curvature along the training"):
            roots = ggn_roots(observed, session.likelihood, "ggn", seed)
            with torch.no_grad():
                per_root = [
                    observed.trace.arranged(roots[:, :, r].contiguous())
                    for r in range(roots.shape[2])
                ]
                moments.update(observed.trace, per_root)
    return moments.matrix


def _flat(values: Named, layout: Layout) -> Tensor:
    """A number or tensor for each parameter as one vector, [P]."""
    shapes = zip(layout.names, layout.shapes, strict=True)
    return layout.flatten({name: wide(values[name]).expand(shape) for name, shape in shapes})
