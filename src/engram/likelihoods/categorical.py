r"""Softmax over K logits, and its loss averaged over Gaussian outputs by sampling.

The derivatives of the loss stand under the expectation; with logits :math:`W f` and
:math:`p = \mathrm{softmax}(W f)`

.. math:: e = \mathbb{E}[W'(p - y)], \qquad
    \beta = \mathrm{diag}\,\mathbb{E}[W'(\mathrm{diag}(p) - p p') W]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engram.core.arguments import is_number, shown
from engram.errors import LikelihoodError, TargetError
from engram.likelihoods.base import ExpectedLoss, Likelihood, Recession
from engram.likelihoods.draws import Draws
from engram.likelihoods.sampled import NUM_SAMPLES, DrawnAverage
from engram.likelihoods.targets import classes


class Categorical(Likelihood):
    r"""Softmax over K logits; targets are class numbers [N] or probabilities [N, K].

    With both settings it is torch's ``cross_entropy(label_smoothing=s, weight=w)``, example by
    example: for targets y, as probabilities,

    .. math:: \ell = -\sum_k a_k \log p_k, \qquad
        a_k = w_k \bigl((1 - s)\, y_k + s / K\bigr), \qquad A = \sum_k a_k

    .. math:: e = A p - a, \qquad \Lambda = A\, (\mathrm{diag}(p) - p p')

    Args:
        label_smoothing: s, the share of every target that is spread over all classes.
        class_weights: w, a number above 0 for every class; losses are then in weighted nats. Torch
            divides their sum by the sum of the weights w_y, not by N: the prior precision of a
            weight decay is that sum times it.

    Example:
        >>> f = torch.zeros(1, 4)
        >>> Categorical().residual(f, Categorical().prepare(f, torch.tensor([2])))
        tensor([[ 0.2500,  0.2500, -0.7500,  0.2500]])
        >>> Categorical(label_smoothing=0.2).residual(f, torch.tensor([2]))
        tensor([[ 0.2000,  0.2000, -0.6000,  0.2000]])
    """

    name, shift_invariant = "categorical", True

    def __init__(
        self, label_smoothing: float = 0.0, class_weights: Sequence[float] | Tensor | None = None
    ) -> None:
        self.label_smoothing = _smoothing(label_smoothing)
        self.class_weights = None if class_weights is None else _weights(class_weights)
        self.is_plain = self.label_smoothing == 0 and self.class_weights is None

    @property
    def arguments(self) -> Mapping[str, Any]:
        """What differs from the usual."""
        smoothing = {"label_smoothing": self.label_smoothing} if self.label_smoothing else {}
        weights = {"class_weights": list(self.class_weights)} if self.class_weights else {}
        return smoothing | weights

    @property
    def identity(self) -> str:
        """What is printed, which has all settings."""
        return repr(self)

    @property
    def unit(self) -> str:
        return "nats" if self.class_weights is None else "weighted nats"

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value}" for name, value in self.arguments.items())
        return f"Categorical({shown})"

    def prepare(self, outputs: Tensor, targets: Tensor) -> Tensor:
        found = classes(outputs, targets)
        if self.class_weights is not None and len(self.class_weights) != outputs.shape[1]:
            raise LikelihoodError(
                f"a weight for each of the {outputs.shape[1]} classes",
                f"{len(self.class_weights)} class_weights",
                "give as many weights as the model has outputs",
            )
        return found

    def labels(self, outputs: Tensor, targets: Tensor) -> Tensor:
        found = classes(outputs, targets)
        return found.argmax(1) if found.is_floating_point() else found

    def aims(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """a, the targets as they count: smoothed, and times the classes' weights; [N, K]."""
        smoothing = self.label_smoothing
        shares = (1 - smoothing) * self.form(outputs, targets) + smoothing / outputs.shape[1]
        return (
            shares if self.class_weights is None else shares * shares.new_tensor(self.class_weights)
        )

    def _counted(self, outputs: Tensor, targets: Tensor) -> Tensor | float:
        """A, by which an example's Hessian is multiplied; [N, 1], or 1 for all."""
        if self.class_weights is None:
            return 1.0
        return self.aims(outputs, targets).sum(1, keepdim=True)

    def _root_counted(self, outputs: Tensor, targets: Tensor) -> Tensor | float:
        counted = self._counted(outputs, targets)
        return counted.sqrt() if isinstance(counted, Tensor) else counted

    def form(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if targets.is_floating_point():
            return targets.to(outputs.dtype)
        hot = outputs.new_zeros(outputs.shape)
        return hot.scatter_(1, targets.long().reshape(-1, 1), 1.0)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if not self.is_plain:
            return -(self.aims(outputs, targets) * outputs.log_softmax(1)).sum(1)
        if targets.is_floating_point():
            return -(targets * outputs.log_softmax(1)).sum(1)
        return -outputs.log_softmax(1).gather(1, targets.reshape(-1, 1))[:, 0]

    def loss_statistics(self, outputs: Tensor) -> Tensor:
        return outputs.log_softmax(1)

    def loss_from_statistics(self, statistics: Tensor, targets: Tensor) -> Tensor:
        if self.is_plain and not targets.is_floating_point():
            return -statistics.gather(1, targets.reshape(-1, 1))[:, 0]
        return -(self.aims(statistics, targets) * statistics).sum(1)

    def residual(self, outputs: Tensor, targets: Tensor) -> Tensor:
        probability = outputs.softmax(1)
        if not self.is_plain:
            aims = self.aims(outputs, targets)
            return aims.sum(1, keepdim=True) * probability - aims
        if targets.is_floating_point():
            return probability - targets
        return probability.scatter_add(1, targets.reshape(-1, 1), _minus_ones(probability))

    def hessian_times(self, outputs: Tensor, targets: Tensor, vector: Tensor) -> Tensor:
        probability = outputs.softmax(1)
        product = probability * (vector - (probability * vector).sum(1, keepdim=True))
        return product * self._counted(outputs, targets)

    def hessian_factor(self, outputs: Tensor, targets: Tensor) -> Tensor:
        # diag(s) - p s' with s = sqrt(p) squares to diag(p) - p p' and maps s to zero; reflecting
        # s onto the first axis therefore empties the first column, and K - 1 columns remain.
        probability = outputs.softmax(1)
        root = probability.sqrt()
        factor = torch.diag_embed(root) - probability[:, :, None] * root[:, None, :]
        axis = root.clone()
        axis[:, 0] += 1.0
        axis = axis / axis.norm(dim=1, keepdim=True)
        reflected = factor - 2 * (factor @ axis[:, :, None]) * axis[:, None, :]
        return self._scaled(reflected[:, :, 1:], outputs, targets)

    def _scaled(self, factor: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
        """A factor [N, K, R] of the Hessian, for the weight that the example has."""
        root = self._root_counted(outputs, targets)
        return factor * (root[:, :, None] if isinstance(root, Tensor) else root)

    def hessian_rank(self, num_outputs: int) -> int:
        return num_outputs - 1

    def num_leading(self, outputs: Tensor, share: float) -> int | None:
        count = _num_leading(outputs.softmax(1).sort(dim=1, descending=True).values, share)
        return count if count + 1 < outputs.shape[1] - 1 else None

    def leading_factor(self, outputs: Tensor, targets: Tensor, count: int, draws: Draws) -> Tensor:
        def sampled(rest: Tensor) -> Tensor:
            return rest.scatter_add(1, draws.chosen(rest), _minus_ones(rest))

        return self._scaled(_led(outputs, count, sampled), outputs, targets)

    def signed_factor(self, outputs: Tensor, targets: Tensor, count: int, draws: Draws) -> Tensor:
        def signed(rest: Tensor) -> Tensor:  # (diag(s) - p s') times signs, squares to Lambda
            signs = draws.signs(rest) * rest.sqrt()
            return signs - rest * signs.sum(1, keepdim=True)

        return self._scaled(_led(outputs, count, signed), outputs, targets)

    def sampled_residual(self, outputs: Tensor, targets: Tensor, draws: Draws) -> Tensor:
        probability = outputs.softmax(1)
        drawn = probability.scatter_add(1, draws.chosen(probability), _minus_ones(probability))
        return drawn * self._root_counted(outputs, targets)

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(1)

    def mean_derivative(self, outputs: Tensor) -> Tensor:
        probability = outputs.softmax(1)
        return probability * (1 - probability)

    def target_probability(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        return (self.mean(outputs) * self.form(outputs, targets)).sum(1)

    def at_limit(self, targets: Tensor) -> Tensor:
        if self.label_smoothing > 0:
            return torch.zeros(len(targets), dtype=torch.bool, device=targets.device)
        if not targets.is_floating_point():
            return torch.ones(len(targets), dtype=torch.bool, device=targets.device)
        return ((targets == 0) | (targets == 1)).all(1)

    def recession(self, targets: Tensor) -> Recession | None:
        if self.label_smoothing > 0:
            return None
        # the loss falls for ever as the own logit, the likeliest target's, grows past every other
        identity = torch.eye(targets.shape[1], dtype=targets.dtype, device=targets.device)
        own = identity[targets.argmax(1)]
        return Recession(own[:, None, :] - identity, torch.zeros_like(targets, dtype=torch.bool))

    def expectation(self) -> ExpectedLoss:
        return ExpectedCategorical() if self.is_plain else super().expectation()


def _smoothing(value: Any) -> float:
    if is_number(value) and 0 <= value < 1:
        return float(value)
    raise LikelihoodError(
        "label_smoothing from 0 to below 1", shown(value), "use that of the training, such as 0.1"
    )


def _weights(values: Any) -> tuple[float, ...]:
    """A finite number above 0 for every class: a class without weight cannot be said here."""
    found = values.tolist() if isinstance(values, Tensor) else values
    listed = list(found) if isinstance(found, Sequence) and not isinstance(found, str) else []
    if listed and all(is_number(w) and 0 < w < math.inf for w in listed):
        return tuple(float(w) for w in listed)
    raise LikelihoodError(
        "class_weights above 0, one per class",
        shown(values),
        "pass the weight= of the training; leave the examples of a class without weight out",
    )


class ExpectedCategorical(DrawnAverage):
    """E[-log softmax(W f)_y] for class numbers or probabilities y.

    Args:
        mixing: W, [classes, outputs]; the identity if not given.
        num_samples, seed: of the draws.

    Example:
        >>> f = torch.zeros(1, 4)
        >>> ExpectedCategorical().residual(f, torch.full_like(f, 1e-12), torch.tensor([2]))
        tensor([[ 0.2500,  0.2500, -0.7500,  0.2500]])
    """

    name, base = "categorical", Categorical()

    def __init__(
        self, mixing: Tensor | None = None, num_samples: int = NUM_SAMPLES, seed: int = 0
    ) -> None:
        super().__init__(num_samples, seed)
        self.mixing = mixing

    def prepare(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.mixing is not None and self.mixing.shape[1] != outputs.shape[1]:
            raise TargetError(
                f"{self.mixing.shape[1]} latent outputs, as the mixing weights have",
                f"{outputs.shape[1]}",
                "give the model as many latent functions",
            )
        return self.base.prepare(self._logits(outputs), targets)

    def pointwise(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.base.loss(self._logits(outputs), targets)

    def loss(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        return self._losses(mean, variance, targets).mean(0)

    def residual(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        probability = self.prediction(mean, variance)
        return self._mixed(probability - self.base.form(probability, targets))

    def curvature(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros_like(mean)
        for points in self._points(mean, variance):
            probability = self._logits(points).softmax(-1)
            square = probability if self.mixing is None else probability @ self.mixing**2
            total += (square - self._mixed(probability) ** 2).sum(0)
        return total / self.count

    def predictive_loss(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        losses = self._losses(mean, variance, targets)
        return math.log(self.count) - torch.logsumexp(-losses, 0)

    def prediction(self, mean: Tensor, variance: Tensor) -> Tensor:
        total = torch.zeros_like(self._logits(mean))
        for points in self._points(mean, variance):
            total += self._logits(points).softmax(-1).sum(0)
        return total / self.count

    def _losses(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        """At every draw, [C, N]."""
        return torch.cat([self._at(points, targets) for points in self._points(mean, variance)])

    def _at(self, points: Tensor, targets: Tensor) -> Tensor:
        """The loss at a block of points [C, N, K], [C, N]."""
        repeated = targets.expand(len(points), *targets.shape).flatten(0, 1)
        return self.pointwise(points.flatten(0, 1), repeated).unflatten(0, points.shape[:2])

    def _logits(self, outputs: Tensor) -> Tensor:
        return outputs if self.mixing is None else outputs @ self.mixing.T

    def _mixed(self, vector: Tensor) -> Tensor:
        return vector if self.mixing is None else vector @ self.mixing

    def _points(self, mean: Tensor, variance: Tensor) -> Iterator[Tensor]:
        for step in self.steps(variance):
            yield torch.cat([mean + step, mean - step])

    def __repr__(self) -> str:
        return f"expected Categorical(num_samples={self.num_samples}, seed={self.seed})"


def _minus_ones(rows: Tensor) -> Tensor:
    return torch.full_like(rows[:, :1], -1.0)


def _tail_sums(values: Tensor) -> Tensor:
    """sum_(t >= r) of [N, K], kept from zero so that it can be divided by."""
    sums = values.flip(1).cumsum(1).flip(1)
    return sums.clamp(min=torch.finfo(values.dtype).tiny)


def _num_leading(probability: Tensor, share: float) -> int:
    """Classes to take exactly so that the others carry at most a share of tr Lambda."""
    tail = _tail_sums(probability)
    left = (tail - _tail_sums(probability.square()) / tail).clamp(min=0).sum(0)
    return int((left > share * left[0]).sum())


def _led(outputs: Tensor, count: int, drawn: Callable[[Tensor], Tensor]) -> Tensor:
    """Cholesky columns of the likeliest classes, and a column that is drawn for all others.

    After r classes what is left of diag(p) - p p' is that of the other classes, with their
    probabilities among themselves [N, K - r]: from these the last column is drawn.
    """
    probability, order = outputs.softmax(1).sort(dim=1, descending=True, stable=True)
    tail = _tail_sums(probability)
    head = _leading_columns(probability[:, :, None], tail, count)
    rest = probability[:, count:] / tail[:, count, None]
    last = torch.cat([torch.zeros_like(probability[:, :count]), drawn(rest)], dim=1)
    factor = torch.cat([head, (last * tail[:, count, None].sqrt())[:, :, None]], dim=2)
    return torch.empty_like(factor).scatter_(1, order[:, :, None].expand_as(factor), factor)


def _leading_columns(probability: Tensor, tail: Tensor, count: int) -> Tensor:
    """The first Cholesky columns of diag(p) - p p' for sorted p [N, K, 1], [N, K, count]."""
    own, following = tail[:, None, :count], tail[:, None, 1 : count + 1]
    leading = probability[:, :count].mT
    below = -probability * (leading / following / own).sqrt()
    columns = torch.tril(below, diagonal=-1)
    columns.diagonal(dim1=1, dim2=2).copy_((leading * following / own).sqrt()[:, 0])
    return columns
