r"""Where an optimizer's curvature comes from; each choice is an object with its own settings.

All of them return the gradient and the curvature of the *mean* loss of a batch. A full-matrix
optimizer takes those with ``matrix``, a diagonal one those with ``diagonal``. To add one, write a
class with one of these methods, or both; the checks of what a closure returns are at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from engram.core.arguments import MANY, whole
from engram.core.dtypes import wide
from engram.curvature.batched_gradients import many_gradients
from engram.curvature.kinds import Curvature
from engram.curvature.operators import hessian_rows
from engram.engine.self_check import LACKING, doubtful_functions, no_second_derivative
from engram.errors import ArgumentError, NonFiniteError, brief
from engram.likelihoods import Likelihood, resolve

ROWS_AT_ONCE = 64  # backward passes run as one batch: memory grows with it, overhead shrinks
Parameters = Sequence[Tensor]


@dataclass(frozen=True)
class Draw:
    """Where the closure ran: theta = m + offset, and the random numbers of the step.

    Args:
        generator: of the optimizer.
        offset: theta - m, [P]; None at the mean.
        precision: S of the distribution that theta was drawn from.
        baseline: the loss at the mean, where the curvature asks for it.
    """

    generator: torch.Generator
    offset: Tensor | None
    precision: Tensor
    baseline: Tensor | None = None


@dataclass(frozen=True)
class Measured:
    """Mean loss of the batch [], its gradient [P] and its curvature, [P, P] or [P]."""

    loss: Tensor
    gradient: Tensor
    curvature: Tensor

    def __add__(self, other: Measured) -> Measured:
        return Measured(
            self.loss + other.loss,
            self.gradient + other.gradient,
            self.curvature + other.curvature,
        )

    def over(self, count: int) -> Measured:
        """Divided by the number of points that were added up."""
        return Measured(self.loss / count, self.gradient / count, self.curvature / count)


@runtime_checkable
class MatrixCurvature(Protocol):
    """A curvature that full-matrix optimizers can use."""

    def matrix(self, returned: Any, parameters: Parameters, draw: Draw) -> Measured:
        """Gradient [P] and curvature [P, P] from what the closure returned."""
        ...


@runtime_checkable
class DiagonalCurvature(Protocol):
    """A curvature that diagonal optimizers can use."""

    def diagonal(self, returned: Any, parameters: Parameters, draw: Draw) -> Measured:
        """Gradient [P] and the diagonal [P] of the curvature from what the closure returned."""
        ...


CurvatureSource = MatrixCurvature | DiagonalCurvature


@dataclass(frozen=True)
class Hessian:
    """The exact Hessian, row by row; the closure returns the mean loss.

    It need not be positive definite away from a minimum. A diagonal optimizer takes its exact
    diagonal, which costs as many backward passes as there are parameters: for small models, and to
    judge :class:`Hutchinson` by.
    """

    kind: ClassVar[Curvature] = Curvature.HESSIAN

    def diagonal(self, returned: Any, parameters: Parameters, draw: Draw) -> Measured:
        """Gradient and the exact diagonal of the Hessian of the mean loss."""
        loss = mean_loss(returned)
        gradient = curved_gradient(loss, parameters)
        entries = torch.zeros_like(gradient, requires_grad=False)
        if gradient.requires_grad:
            for start in range(0, len(gradient), ROWS_AT_ONCE):
                count = min(ROWS_AT_ONCE, len(gradient) - start)
                unit = gradient.new_zeros(count, len(gradient))
                places = torch.arange(count, device=unit.device)
                unit[places, start + places] = 1
                found = many_gradients([gradient], parameters, [unit], count)
                rows = torch.cat([g.reshape(count, -1) for g in found], dim=1)
                entries[start : start + count] = rows[places, start + places]
        return Measured(loss.detach(), gradient.detach(), entries)

    def matrix(self, returned: Any, parameters: Parameters, draw: Draw) -> Measured:
        """Gradient and Hessian of the mean loss."""
        loss = mean_loss(returned)
        gradient = curved_gradient(loss, parameters)
        try:
            rows = hessian_rows(gradient, parameters)
        except RuntimeError as error:
            if "is not implemented" not in str(error):
                raise
            raise no_second_derivative([brief(error)]) from error
        return Measured(loss.detach(), gradient.detach(), 0.5 * (rows + rows.mT))


@dataclass(frozen=True)
class GaussNewton:
    r"""The Gauss-Newton matrix :math:`\sum_i J_i' \Lambda_i J_i`, never indefinite.

    The closure returns ``(outputs, targets)``.

    Args:
        likelihood: a name or an object.
        probes: None for the exact matrix, at one backward pass per example and output; a number
            for as many backward passes with random signs, whose squares have it as their mean.
    """

    kind: ClassVar[Curvature] = Curvature.GGN
    likelihood: str | Likelihood
    probes: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "likelihood", resolve(self.likelihood))
        if self.probes is not None:
            _check_probes(self.probes)

    def matrix(self, returned: Any, parameters: Parameters, draw: Draw) -> Measured:
        """Gradient and Gauss-Newton matrix of the mean loss."""
        outputs, targets, loss = outputs_and_targets(returned, resolve(self.likelihood))
        gradient = flat_gradient(loss, parameters)
        total = wide(gradient.new_zeros(len(gradient), len(gradient)))
        for rows in self._rows(outputs, targets, parameters, draw.generator):
            total += wide(rows.mT @ rows)
        return Measured(loss.detach(), gradient, total / len(outputs))

    def diagonal(self, returned: Any, parameters: Parameters, draw: Draw) -> Measured:
        """Gradient and diagonal of the Gauss-Newton matrix of the mean loss."""
        outputs, targets, loss = outputs_and_targets(returned, resolve(self.likelihood))
        gradient = flat_gradient(loss, parameters)
        total = torch.zeros_like(gradient)
        for rows in self._rows(outputs, targets, parameters, draw.generator):
            total += (rows * rows).sum(0)
        return Measured(loss.detach(), gradient, total / len(outputs))

    def _rows(
        self, outputs: Tensor, targets: Tensor, parameters: Parameters, generator: torch.Generator
    ) -> Iterator[Tensor]:
        """J' u in chunks [.., P], over vectors u whose outer products add up to Lambda."""
        factor = resolve(self.likelihood).hessian_factor(outputs.detach(), targets)
        examples, _, rank = factor.shape
        count = examples * rank if self.probes is None else self.probes
        for start in range(0, count, ROWS_AT_ONCE):
            size = min(ROWS_AT_ONCE, count - start)
            if self.probes is None:
                weights = factor.new_zeros(size, examples * rank)
                weights[torch.arange(size), torch.arange(start, start + size)] = 1.0
            else:
                weights = signs((size, examples * rank), generator).to(factor) / count**0.5
            seeds = torch.einsum("mbr,bkr->mbk", weights.view(size, examples, rank), factor)
            found = many_gradients([outputs], parameters, [seeds], size)
            yield torch.cat([g.reshape(size, -1) for g in found], dim=1)


@dataclass(frozen=True)
class Hutchinson:
    """The Hessian's diagonal from random signs v, v * (H v); the closure returns the mean loss.

    Unbiased, and exact for a diagonal Hessian; entries may be negative.

    Args:
        probes: products with the Hessian a step.
    """

    kind: ClassVar[Curvature] = Curvature.HESSIAN
    probes: int = 1

    def __post_init__(self) -> None:
        _check_probes(self.probes)

    def diagonal(self, returned: Any, parameters: Parameters, draw: Draw) -> Measured:
        """Gradient of the mean loss and an estimate of its Hessian's diagonal."""
        loss = mean_loss(returned)
        gradient = curved_gradient(loss, parameters)
        total = torch.zeros_like(gradient, requires_grad=False)
        if gradient.requires_grad:
            for _ in range(self.probes):
                probe = signs(gradient.shape, draw.generator).to(gradient)
                total += probe * flat_gradient(gradient @ probe, parameters)
        return Measured(loss.detach(), gradient.detach(), total / self.probes)


@dataclass(frozen=True)
class Reparameterised:
    r"""The Hessian's diagonal from gradients at samples, :math:`E_q[\nabla\ell \cdot S(\theta-m)]`.

    One backward pass a sample and no second derivative; for :class:`engram.optimizers.DiagonalVON`
    only. Noisy: use a small ``precision_lr``. The closure returns the mean loss.
    """

    kind: ClassVar[Curvature] = Curvature.HESSIAN

    def diagonal(self, returned: Any, parameters: Parameters, draw: Draw) -> Measured:
        """Gradient of the mean loss at a sample, and that gradient times S (theta - m)."""
        if draw.offset is None:
            raise ArgumentError(
                "an optimizer that draws samples, with Reparameterised()",
                "one that stays at the mean",
                "use DiagonalVON, or Hutchinson() or GaussNewton(likelihood)",
            )
        loss = mean_loss(returned)
        gradient = flat_gradient(loss, parameters)
        return Measured(loss.detach(), gradient, gradient * draw.precision * draw.offset)


@dataclass(frozen=True)
class ScoreFunction:
    r"""Gradient and curvature from values of the loss alone, for losses without derivatives.

    .. math:: \nabla_m E_q[\ell] = E_q[(\ell - b)\, u], \qquad
        2 \nabla_\Sigma E_q[\ell] = E_q[(\ell - b)(u u' - S)], \qquad u = S(\theta - m)

    the derivative outside of the expectation, with the loss at the mean as the baseline b. For
    :class:`engram.optimizers.VON` and :class:`engram.optimizers.DiagonalVON`. Its noise grows with
    the number of parameters: take many samples, a small ``lr`` and a smaller ``precision_lr``. The
    closure returns the mean loss, which need not have a graph.
    """

    kind: ClassVar[Curvature] = Curvature.HESSIAN
    needs_baseline: ClassVar[bool] = True

    def matrix(self, returned: Any, parameters: Parameters, draw: Draw) -> Measured:
        """Gradient and curvature [P, P] of the expected loss, from one sample."""
        excess, offset, loss = self._excess(returned, draw)
        pull = draw.precision @ offset
        curvature = excess * (torch.outer(pull, pull) - draw.precision)
        return Measured(loss, (excess * pull).to(loss), curvature)

    def diagonal(self, returned: Any, parameters: Parameters, draw: Draw) -> Measured:
        """The same with a diagonal precision, [P]."""
        excess, offset, loss = self._excess(returned, draw)
        pull = draw.precision * offset
        return Measured(loss, (excess * pull).to(loss), excess * (pull.square() - draw.precision))

    def _excess(self, returned: Any, draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
        """Loss less baseline, theta - m, and the loss."""
        if draw.offset is None or draw.baseline is None:
            raise ArgumentError(
                "an optimizer that draws samples, with ScoreFunction()",
                "one that stays at the mean",
                "use VON or DiagonalVON",
            )
        loss = loss_value(returned)
        return (loss - draw.baseline).to(draw.precision), draw.offset, loss


def signs(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Random +1 and -1."""
    return 2.0 * torch.randint(2, tuple(shape), generator=generator) - 1.0


def _check_probes(probes: int) -> None:
    whole("number of probes", probes, 1, MANY, remedy="use probes=1 or more")


def loss_value(returned: Any) -> Tensor:
    """The scalar loss that a closure returned, which needs no graph, without one."""
    found = torch.as_tensor(returned) if isinstance(returned, float | int) else returned
    return _finite(_one_number(found)).detach()


def mean_loss(returned: Any) -> Tensor:
    """The scalar loss that a closure returned."""
    return _checked(_one_number(returned))


def _one_number(returned: Any) -> Tensor:
    if not isinstance(returned, Tensor) or returned.numel() != 1:
        got = type(returned).__name__
        if isinstance(returned, Tensor):
            got = f"a tensor of shape {tuple(returned.shape)}"
        raise ArgumentError(
            "a closure that returns the mean loss of the batch, one number",
            got,
            "return the loss; (outputs, targets) are for curvature=GaussNewton(likelihood)",
        )
    return returned.reshape(())


def outputs_and_targets(returned: Any, likelihood: Likelihood) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs [B, K], prepared targets and the mean loss of a closure that returned a pair."""
    pair = isinstance(returned, (tuple, list)) and len(returned) == 2
    if not pair or not all(isinstance(part, Tensor) for part in returned):
        raise ArgumentError(
            "a closure that returns (outputs, targets), as the Gauss-Newton matrix needs",
            type(returned).__name__,
            "return model(x), y; or use another curvature and return the mean loss",
        )
    outputs, targets = returned
    outputs = outputs[:, None] if outputs.dim() == 1 else outputs
    if outputs.dim() != 2 or not len(outputs):
        raise ArgumentError(
            "outputs of shape [batch, outputs] with at least one example",
            f"shape {tuple(outputs.shape)}",
            "give each example one row",
        )
    prepared = likelihood.prepare(outputs.detach(), targets)
    return outputs, prepared, _checked(likelihood.loss(outputs, prepared).mean())


def _checked(loss: Tensor) -> Tensor:
    if not loss.requires_grad:
        raise ArgumentError(
            "a loss that can be differentiated",
            "one without a graph",
            "return the loss itself: no .item(), no detach(), no torch.no_grad()",
        )
    return _finite(loss)


def _finite(loss: Tensor) -> Tensor:
    if not torch.isfinite(loss):
        raise NonFiniteError(
            "a finite loss",
            f"{float(loss.detach())}",
            "lower lr, or start nearer to a minimum; nothing was changed by this step",
        )
    return loss


def flat_gradient(loss: Tensor, parameters: Sequence[Tensor], create_graph: bool = False) -> Tensor:
    """d loss / d theta, [P]; zeros for parameters that the loss does not use."""
    try:
        found = torch.autograd.grad(
            loss,
            parameters,
            create_graph=create_graph,
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
    except RuntimeError as error:
        if "is not implemented" in str(error):
            raise no_second_derivative([brief(error)]) from error
        if "second time" not in str(error):
            raise
        raise ArgumentError(
            "a closure that leaves differentiating to the optimizer",
            "a loss whose graph is gone",
            "do not call backward() in the closure",
        ) from error
    gradient = torch.cat([g.flatten() for g in found])
    if not torch.isfinite(gradient).all():
        raise NonFiniteError(
            "finite gradients", "NaN or infinity", "lower lr, or start nearer to a minimum"
        )
    return gradient


def curved_gradient(loss: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """The same with its graph; EngineError where PyTorch's own derivative of it lacks a part."""
    lacking = [name for name in doubtful_functions(loss) if name in LACKING.values()]
    if lacking:
        raise no_second_derivative(lacking)
    return flat_gradient(loss, parameters, create_graph=True)
