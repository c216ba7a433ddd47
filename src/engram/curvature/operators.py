r"""Exact curvature of a sum of losses as an operator: products ``operator @ rows``, no matrix.

With the weights :math:`w_i` of the examples, 1 unless said otherwise, and a prior,

.. math:: G = \sum_i w_i J_i' \Lambda_i J_i + \mathrm{diag}(\delta), \qquad
    H = G + \sum_i w_i \sum_k e_{ik} \nabla^2 f_{ik}

G is the Gauss-Newton matrix (:class:`GaussNewton`), H the Hessian (:class:`Hessian`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from engram.core.data.batches import Batch, call
from engram.core.dtypes import widest
from engram.core.parameters import Layout, trainable
from engram.core.processes.group import Processes
from engram.core.state.model import device_of
from engram.core.state.process import plain_attention
from engram.curvature.batched_gradients import many_gradients
from engram.curvature.kinds import Curvature, check_exact
from engram.engine.session import ALONE, Session

# Vectors, or rows of a whole Hessian, found in one batched backward pass, where memory holds them:
# more share its cost, and take memory
VECTORS_AT_ONCE = 64


@dataclass(frozen=True)
class Weighted:
    """Some examples of the data, each with a weight.

    Args:
        indices: positions in the data, [n].
        weights: theirs, [n].
    """

    indices: Tensor
    weights: Tensor


class Operator(Protocol):
    """Products with a matrix over the parameters."""

    def __matmul__(self, vectors: Tensor) -> Tensor:
        """[M, P] -> [M, P]."""


class CurvatureOperator(ABC):
    """Products with the curvature at the model's present weights, over some parameters.

    Args:
        opened: model, data and likelihood.
        layout: the parameters; all others count as fixed.
        prior: delta, added to the diagonal; [P], or one number.
        examples: those that are summed over, with weights; all of them if not given.
        scale: of the whole.
        peers: processes that share the examples, and make every product together; this one alone
            if not given, as for products that each makes of examples of its own.

    Attributes:
        products: vectors multiplied so far, each of them one pass over the data.
    """

    kind: ClassVar[Curvature]

    def __init__(
        self,
        opened: Session,
        layout: Layout,
        prior: Tensor | float = 0.0,
        examples: Weighted | None = None,
        scale: float = 1.0,
        peers: Processes = ALONE,
    ) -> None:
        self.opened, self.layout, self.prior, self.scale = opened, layout, prior, scale
        self.peers = peers
        parameters = trainable(opened.model)
        self.parameters = [parameters[name] for name in layout.names]
        self.products = 0
        self._examples = examples
        self._weight_of: Tensor | None = None
        if examples is not None:
            self._weight_of = torch.zeros(opened.batches.num_data, dtype=torch.float64)
            self._weight_of[examples.indices.cpu()] = examples.weights.double().cpu()
        self._check()

    @abstractmethod
    def _check(self) -> None:
        """EngineError for a model that has no such products."""

    @abstractmethod
    def _of_batch(
        self, batch: Batch, directions: Sequence[Tensor], weights: Tensor | None
    ) -> list[Tensor]:
        """The sum over a batch for directions [M, *shape], its examples weighted [B]."""

    def __matmul__(self, vectors: Tensor) -> Tensor:
        """[M, P] -> [M, P], in one pass over the data for as many vectors as memory holds."""
        self.products += len(vectors)
        parts = [self._times(part) for part in vectors.split(self._vectors_at_once())]
        found = torch.cat(parts) if parts else vectors
        found = self.peers.summed("curvature products", {"products": found})["products"]
        prior = self.prior.to(vectors) if isinstance(self.prior, Tensor) else self.prior
        return self.scale * (found + prior * vectors)

    def _vectors_at_once(self) -> int:
        fitting = self.opened.largest_part // max(1, self.opened.batches.batch_size)
        return max(1, min(VECTORS_AT_ONCE, fitting))

    def _times(self, vectors: Tensor) -> Tensor:
        total = torch.zeros_like(vectors)
        directions = list(self.layout.unflatten(vectors).values())
        for batch in self._batches():
            weights = None if self._weight_of is None else self._weight_of[batch.indices.cpu()]
            with torch.enable_grad(), plain_attention():
                found = self._of_batch(batch, directions, weights)
            named = dict(zip(self.layout.names, found, strict=True))
            total += self.layout.flatten(named).detach()
        return total

    def _batches(self) -> Iterator[Batch]:
        opened, source = self.opened, iter(self.opened.batches)
        length = len(opened.batches)
        chosen = None if self._examples is None else self._examples.indices
        if not self.peers.alone:
            chosen = opened.own_rows(chosen)
        if chosen is not None:
            size = opened.batches.batch_size
            source = iter(opened.batches.subset(chosen, size))
            length = -(-len(chosen) // size)
        for part in opened.parts(source, "curvature products", length):
            yield opened.placed(part)


class GaussNewton(CurvatureOperator):
    """Products with the Gauss-Newton matrix G.

    Example:
        For linear regression it is the Gram matrix of the inputs.

        >>> from engram.engine.session import session
        >>> x, model = torch.randn(9, 2).double(), torch.nn.Linear(2, 1, bias=False).double()
        >>> layout = Layout.of(trainable(model))
        >>> with session(model, (x, x.sum(1, keepdim=True)), "gaussian") as opened:
        ...     found = GaussNewton(opened, layout, prior=3.0) @ torch.eye(2).double()
        >>> torch.allclose(found, x.T @ x + 3 * torch.eye(2).double())
        True
    """

    kind = Curvature.GGN

    def _check(self) -> None:
        self.opened.engine.check_twice()

    def _of_batch(
        self, batch: Batch, directions: Sequence[Tensor], weights: Tensor | None
    ) -> list[Tensor]:
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
        ).view_as(moved)
        if weights is not None:
            weighted = weights.to(weighted)[:, None] * weighted
        return many_gradients([outputs], self.parameters, [weighted], count)


class TangentGaussNewton(CurvatureOperator):
    """The same by tangent passes, a vector at a time, for models without second derivatives."""

    kind = Curvature.GGN

    def _check(self) -> None:
        pass

    def _of_batch(
        self, batch: Batch, directions: Sequence[Tensor], weights: Tensor | None
    ) -> list[Tensor]:
        opened, names = self.opened, self.layout.names
        observed = opened.observe(batch)
        rows = []
        for number in range(len(directions[0])):
            vector = {n: v[number] for n, v in zip(names, directions, strict=True)}
            moved = observed.trace.tangent(vector)
            seed = opened.likelihood.hessian_times(observed.outputs, observed.targets, moved)
            if weights is not None:
                seed = weights.to(seed)[:, None] * seed
            parameters = dict(zip(names, self.parameters, strict=True))
            rows.append(list(opened.pull_back(observed.batch, seed, parameters).values()))
        observed.trace.release()
        return [torch.stack(column) for column in zip(*rows, strict=True)]


class Summed:
    """The sum of operators over different data.

    Args:
        operators: over the same parameters.
    """

    def __init__(self, operators: Sequence[CurvatureOperator]) -> None:
        self.operators = tuple(operators)

    @property
    def products(self) -> int:
        """Vectors multiplied so far."""
        return self.operators[0].products

    def __matmul__(self, vectors: Tensor) -> Tensor:
        """[M, P] -> [M, P]."""
        total = self.operators[0] @ vectors
        for operator in self.operators[1:]:
            total = total + operator @ vectors
        return total


class Hessian(CurvatureOperator):
    """Products with the Hessian H, and H itself.

    Example:
        For linear regression it is the Gram matrix of the inputs.

        >>> from engram.engine.session import session
        >>> x, model = torch.randn(9, 2).double(), torch.nn.Linear(2, 1, bias=False).double()
        >>> layout = Layout.of(trainable(model))
        >>> with session(model, (x, x.sum(1, keepdim=True)), "gaussian") as opened:
        ...     hessian = Hessian(opened, layout)
        ...     found = hessian @ torch.eye(2).double(), hessian.matrix()
        >>> torch.allclose(found[0], x.T @ x), torch.allclose(found[1], x.T @ x)
        (True, True)
    """

    kind = Curvature.HESSIAN

    def _check(self) -> None:
        self.opened.engine.check_hessian()

    def _gradient(self, batch: Batch, weights: Tensor | None) -> list[Tensor]:
        """Of the weighted sum of losses of a batch, with its graph; zeros for what is not used."""
        likelihood = self.opened.likelihood
        outputs = call(self.opened.model, batch.inputs)
        targets = likelihood.prepare(outputs.detach(), batch.targets)
        losses = likelihood.loss(outputs, targets)
        loss = losses.sum() if weights is None else (weights.to(losses) * losses).sum()
        return list(
            torch.autograd.grad(
                loss, self.parameters, create_graph=True, allow_unused=True, materialize_grads=True
            )
        )

    def _of_batch(
        self, batch: Batch, directions: Sequence[Tensor], weights: Tensor | None
    ) -> list[Tensor]:
        """The derivative of the gradient along v, by the symmetry of the Hessian."""
        gradient = self._gradient(batch, weights)
        used = [(g, v) for g, v in zip(gradient, directions, strict=True) if g.requires_grad]
        return many_gradients(
            [g for g, _ in used], self.parameters, [v for _, v in used], len(directions[0])
        )

    def matrix(self) -> Tensor:
        """H without the prior, [P, P], in the widest precision; one forward pass over the data."""
        size, device = self.layout.num_params, device_of(self.opened.model)
        total = torch.zeros(size, size, dtype=widest(device), device=device)
        for batch in self._batches():
            with torch.enable_grad(), plain_attention():
                flat = torch.cat([g.flatten() for g in self._gradient(batch, None)])
            total += hessian_rows(flat, self.parameters)
        total = self.peers.summed("Hessian", {"matrix": total})["matrix"]
        return 0.5 * (total + total.mT)


def hessian_rows(flat: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """[P, P] from a gradient [P] that still has its graph; zeros where it depends on nothing."""
    size = flat.numel()
    if not flat.requires_grad:
        return flat.new_zeros(size, size)
    identity = torch.eye(size, dtype=flat.dtype, device=flat.device)
    rows = []
    for chunk in identity.split(VECTORS_AT_ONCE):
        parts = many_gradients([flat], parameters, [chunk], len(chunk))
        rows.append(torch.cat([part.reshape(len(chunk), -1) for part in parts], dim=1))
    return torch.cat(rows)


EXACT: dict[str, type[CurvatureOperator]] = {"hessian": Hessian, "ggn": GaussNewton}


def exact_curvature(
    kind: str,
    opened: Session,
    layout: Layout,
    prior: Tensor | float = 0.0,
    peers: Processes = ALONE,
) -> CurvatureOperator:
    """The operator of this name, ``hessian`` or ``ggn``."""
    check_exact(kind)
    return EXACT[kind](opened, layout, prior, peers=peers)
