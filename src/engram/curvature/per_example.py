r"""Each example's own curvature as an operator: products ``operator @ rows``, a row an example.

.. math:: G_i = J_i' \Lambda_i J_i, \qquad
    H_i = \nabla^2 \ell_i = G_i + \sum_k e_{ik} \nabla^2 f_{ik}

H_i is that of :class:`PerExampleHessian`, G_i that of :class:`PerExampleGaussNewton`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from engram.core.data.batches import Batch, call, flat_outputs
from engram.core.data.inputs import handed, mapped
from engram.core.parameters import Layout, Named, trainable
from engram.core.state.process import plain_attention
from engram.engine.session import Observed, Session
from engram.likelihoods import Likelihood
from engram.linalg.cg import for_some


class PerExampleCurvature(ABC):
    """Products of each example's own curvature with a vector of its own."""

    @abstractmethod
    def of(self, vectors: Tensor, rows: Tensor) -> Tensor:
        """Those of the examples numbered [R], with vectors [R, P]."""

    def __matmul__(self, vectors: Tensor) -> Tensor:
        """[B, P] -> [B, P]."""
        return self.of(vectors, torch.arange(len(vectors), device=vectors.device))


class PerExampleHessian(PerExampleCurvature):
    """Products H_i v_i, many examples at once where the operations can be vectorised.

    Args:
        opened: model, data and likelihood.
        batch: the examples, on the model's device.
        targets: theirs, in the likelihood's own form.
        layout: the parameters; all others count as fixed.

    Example:
        For linear regression it is x_i x_i'.

        >>> from engram.engine.session import session
        >>> x, model = torch.randn(3, 2).double(), nn.Linear(2, 1, bias=False).double()
        >>> vectors, layout = torch.randn(3, 2).double(), Layout.of(trainable(model))
        >>> with session(model, (x, x.sum(1, keepdim=True)), "gaussian") as opened:
        ...     batch = opened.batches.take(torch.arange(3))
        ...     found = PerExampleHessian(opened, batch, batch.targets, layout) @ vectors
        >>> torch.allclose(found, x * (x * vectors).sum(1, keepdim=True))
        True
    """

    def __init__(self, opened: Session, batch: Batch, targets: Tensor, layout: Layout) -> None:
        self.model, self.likelihood = opened.model, opened.likelihood
        self.batch, self.targets, self.layout = batch, targets, layout
        self.at_once = opened.largest_part

    def of(self, vectors: Tensor, rows: Tensor) -> Tensor:
        """H_i v_i of the examples numbered [R], with vectors [R, P]."""
        parts = zip(vectors.split(self.at_once), rows.split(self.at_once), strict=True)
        return torch.cat([self._of(*part) for part in parts])

    def _of(self, vectors: Tensor, rows: Tensor) -> Tensor:
        parameter = trainable(self.model)[self.layout.names[0]]
        named = self.layout.unflatten(vectors.to(parameter.dtype))
        batch, targets = self.batch.select(rows.cpu()), self.targets[rows]
        with torch.enable_grad(), plain_attention():
            try:
                found = _vectorised(self.model, self.likelihood, batch, targets, named)
            except Exception:  # whatever vmap cannot do, one example after the other can
                found = _one_by_one(self.model, self.likelihood, batch, targets, named)
        return self.layout.flatten(found).detach().to(vectors)


class PerExampleGaussNewton(PerExampleCurvature):
    """Products J_i' Lambda_i J_i v_i, by a tangent and a backward pass.

    Args:
        opened: model, data and likelihood.
        observed: the examples.
        layout: the parameters; all others count as fixed.

    Example:
        For linear regression it is x_i x_i'.

        >>> from engram.engine.session import session
        >>> x, model = torch.randn(3, 2).double(), nn.Linear(2, 1, bias=False).double()
        >>> vectors, layout = torch.randn(3, 2).double(), Layout.of(trainable(model))
        >>> with session(model, (x, x.sum(1, keepdim=True)), "gaussian") as opened:
        ...     observed = opened.observe(opened.batches.take(torch.arange(3)))
        ...     found = PerExampleGaussNewton(opened, observed, layout) @ vectors
        >>> torch.allclose(found, x * (x * vectors).sum(1, keepdim=True))
        True
    """

    def __init__(self, opened: Session, observed: Observed, layout: Layout) -> None:
        self.likelihood, self.observed, self.layout = opened.likelihood, observed, layout

    def of(self, vectors: Tensor, rows: Tensor) -> Tensor:
        """The same; the passes are over all examples, whose others have zeros."""
        observed = self.observed
        like = vectors.new_zeros(len(observed.outputs), self.layout.num_params)
        return for_some(self._of_all, like)(vectors, rows)

    def _of_all(self, vectors: Tensor) -> Tensor:
        observed, trace = self.observed, self.observed.trace
        moved = trace.own_tangents(self.layout.unflatten(vectors))
        seed = self.likelihood.hessian_times(observed.outputs, observed.targets, moved)
        return trace.own_gradient_rows(seed, self.layout)


def _vectorised(
    model: nn.Module, likelihood: Likelihood, batch: Batch, targets: Tensor, vectors: Named
) -> Named:
    parameters = {name: trainable(model)[name].detach() for name in vectors}

    def product(inputs: Any, target: Tensor, vector: Named) -> Named:
        def loss(values: Named) -> Tensor:
            args, kwargs = handed(inputs)
            outputs = flat_outputs(functional_call(model, values, args, kwargs))
            return likelihood.loss(outputs, target[None]).sum()

        return _derivative_along(loss, vector)(parameters)

    with_batch_of_one = mapped(batch.inputs, lambda t: t[:, None])
    result: Named = vmap(product)(with_batch_of_one, targets, vectors)
    return result


def _derivative_along(loss: Callable[[Named], Tensor], vector: Named) -> Callable[[Named], Named]:
    """The gradient of <grad loss, v>, which is the Hessian times v."""

    def slope(values: Named) -> Tensor:
        gradient = grad(loss)(values)
        return torch.stack([(gradient[name] * v).sum() for name, v in vector.items()]).sum()

    derivative: Callable[[Named], Named] = grad(slope)
    return derivative


def _one_by_one(
    model: nn.Module, likelihood: Likelihood, batch: Batch, targets: Tensor, vectors: Named
) -> Named:
    parameters = [trainable(model)[name] for name in vectors]
    rows = []
    for i in range(len(batch)):
        outputs = call(model, batch.select(slice(i, i + 1)).inputs)
        loss = likelihood.loss(outputs, targets[i : i + 1]).sum()
        gradient = torch.autograd.grad(
            loss, parameters, create_graph=True, allow_unused=True, materialize_grads=True
        )
        parts = [(g * v[i]).sum() for g, v in zip(gradient, vectors.values(), strict=True)]
        slope = torch.stack(parts).sum()
        if not slope.requires_grad:
            rows.append([torch.zeros_like(p) for p in parameters])
            continue
        rows.append(
            list(torch.autograd.grad(slope, parameters, allow_unused=True, materialize_grads=True))
        )
    columns = zip(*rows, strict=True)
    return {name: torch.stack(column) for name, column in zip(vectors, columns, strict=True)}
