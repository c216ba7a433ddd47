r"""Exact products with the curvature of the sum of losses, for many vectors in one pass.

With the Gauss-Newton matrix :math:`\sum_i J_i' \Lambda_i J_i`, or the Hessian, which adds
:math:`\sum_i \sum_k e_{ik} \nabla^2 f_{ik}`; neither is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from engram.core.data.batches import Batch, call
from engram.core.parameters import Layout, trainable
from engram.core.state.process import plain_attention
from engram.curvature.batched_gradients import many_gradients
from engram.curvature.ggn_roots import check_exact
from engram.engine.session import Session

VECTORS_AT_ONCE = 64


class CurvatureOperator:
    """Products with the curvature at the model's present weights, over some parameters.

    Args:
        opened: model, data and likelihood.
        layout: the parameters; all others count as fixed.
        kind: ``ggn`` or ``hessian``.

    Attributes:
        products: vectors multiplied so far, each of them one pass over the data.
    """

    def __init__(self, opened: Session, layout: Layout, kind: str) -> None:
        check_exact(kind)
        self.opened, self.layout, self.kind = opened, layout, kind
        if kind == "hessian":
            opened.engine.check_hessian()
        else:
            opened.engine.check_twice()
        parameters = trainable(opened.model)
        self.parameters = [parameters[name] for name in layout.names]
        self.products = 0

    def times(self, vectors: Tensor) -> Tensor:
        """[M, P] -> [M, P], in one pass over the data for as many vectors as memory holds."""
        self.products += len(vectors)
        parts = [self._times(part) for part in vectors.split(self._vectors_at_once())]
        return torch.cat(parts) if parts else vectors

    def _vectors_at_once(self) -> int:
        fitting = self.opened.largest_part // max(1, self.opened.batches.batch_size)
        return max(1, min(VECTORS_AT_ONCE, fitting))

    def _times(self, vectors: Tensor) -> Tensor:
        total = torch.zeros_like(vectors)
        directions = list(self.layout.unflatten(vectors).values())
        product = PRODUCTS[self.kind]
        for batch in self._batches():
            with torch.enable_grad(), plain_attention():
                found = product(self, batch, directions)
            named = dict(zip(self.layout.names, found, strict=True))
            total += self.layout.flatten(named).detach()
        return total

    def _batches(self) -> Iterator[Batch]:
        opened = self.opened
        for part in opened.parts(opened.batches, "curvature products", len(opened.batches)):
            yield opened.placed(part)

    def gauss_newton(self, batch: Batch, directions: Sequence[Tensor]) -> list[Tensor]:
        """J' Lambda J v: the tangent as the derivative of the backward pass by its seed."""
        likelihood = self.opened.likelihood
        outputs = call(self.opened.model, batch.inputs)
        fixed = outputs.detach()
        targets = likelihood.prepare(fixed, batch.targets)
        seed = torch.zeros_like(fixed).requires_grad_()
        pulled = torch.autograd.grad(
            outputs, self.parameters, seed, create_graph=True, allow_unused=True
        )
        used = [(g, v) for g, v in zip(pulled, directions, strict=True) if g is not None]
        count = len(directions[0])
        (moved,) = many_gradients([g for g, _ in used], [seed], [v for _, v in used], count)
        weighted = likelihood.hessian_times(
            fixed.repeat(count, 1),
            targets.repeat(count, *[1] * (targets.dim() - 1)),
            moved.flatten(0, 1),
        )
        return many_gradients([outputs], self.parameters, [weighted.view_as(moved)], count)

    def hessian(self, batch: Batch, directions: Sequence[Tensor]) -> list[Tensor]:
        """The derivative of the gradient along v, by the symmetry of the Hessian."""
        likelihood = self.opened.likelihood
        outputs = call(self.opened.model, batch.inputs)
        targets = likelihood.prepare(outputs.detach(), batch.targets)
        gradient = torch.autograd.grad(
            likelihood.loss(outputs, targets).sum(),
            self.parameters,
            create_graph=True,
            allow_unused=True,
        )
        used = [
            (g, v)
            for g, v in zip(gradient, directions, strict=True)
            if g is not None and g.requires_grad
        ]
        return many_gradients(
            [g for g, _ in used], self.parameters, [v for _, v in used], len(directions[0])
        )


PRODUCTS: dict[str, Callable[[CurvatureOperator, Batch, Sequence[Tensor]], list[Tensor]]] = {
    "ggn": CurvatureOperator.gauss_newton,
    "hessian": CurvatureOperator.hessian,
}
