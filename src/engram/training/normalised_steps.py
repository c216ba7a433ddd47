r"""Lion and Muon: steps whose size does not depend on that of the gradients.

Lion steps by the signs of a momentum c. A nudge of all gradients moves such a step only where
their noise lets it: by Stein's lemma the mean derivative of a step F(c), for c with Gaussian noise,
is the slope of the step on the momentum,

.. math:: P^{-1} = \frac{\mathrm{E}[F(c)\, c]}{\mathrm{E}[c^2]},

for the sign :math:`\sqrt{2 / \pi}` over the standard deviation of c. Lion keeps no such averages,
so they are kept here, by optimizer, while a training is recorded.

Muon steps by the orthogonal matrix next to :math:`c = U \mathrm{diag}(s) V'`, found by a
polynomial f of the singular values. That is a precision over one axis, the shorter one:

.. math:: U f(s) V' = P^{-1} c, \qquad P = U \mathrm{diag}(s / f(s))\, U' .

Its time per entry is by the diagonal of :math:`P^{-1}`. The slope above does not do for it: where
few directions hold most of c, it takes their roots for those of all (on a small net 0.22 of the
true increase, where the diagonal has 0.99).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from engram.training.step_rules import Step

REMEMBERED = 64  # readings that an average goes back: fewer are noise, more are of other gradients
PSEUDO = 4  # readings that the mean over the parameter counts as: one entry alone may be near 0
FORGETTING = 1 / 200  # share of what is read that a step replaces: every fourth is read


@dataclass
class Slope:
    """Running averages of F(c) c and of c^2.

    Args:
        number: of the last step that is in them.
        count: of readings.
        products, squares: the averages.
    """

    number: int
    count: int
    products: Tensor
    squares: Tensor

    def add(self, number: int, products: Tensor, squares: Tensor) -> None:
        """Another reading."""
        self.number, self.count = number, min(self.count + 1, REMEMBERED)
        self.products.lerp_(products, 1 / self.count)
        self.squares.lerp_(squares, 1 / self.count)

    def root(self) -> Tensor:
        """P, infinite where no gradient has come."""
        own = self.count / (self.count + PSEUDO)
        products = self.products.mean().lerp(self.products, own)
        squares = self.squares.mean().lerp(self.squares, own)
        return torch.where(self.squares > 0, squares / products, math.inf)


_slopes: WeakKeyDictionary[Optimizer, dict[int, Slope]] = WeakKeyDictionary()


def _slope(step: Step, products: Tensor, squares: Tensor) -> Tensor:
    """P with this reading; a step is read once, however often it is asked for."""
    kept = _slopes.setdefault(step.optimizer, {})
    found = kept.get(id(step.parameter))
    if found is None or found.number > step.number:
        kept[id(step.parameter)] = found = Slope(step.number, 1, products.clone(), squares.clone())
    elif found.number < step.number:
        found.add(step.number, products, squares)
    return found.root().expand(step.parameter.shape).clone()


def lion_root(step: Step) -> Tensor:
    """c^2 over |c|, each averaged."""
    first, second = (float(beta) for beta in step.group["betas"])
    momentum, gradient = step.state["exp_avg"], step.parameter.grad
    if gradient is not None:  # the momentum before this step, and what the step made of it
        before = (momentum - (1 - second) * gradient) / second
        momentum = first * before + (1 - first) * gradient
    return _slope(step, momentum.abs(), momentum.square())


def lion_weight(step: Step, memory: float, share: float) -> tuple[float, float]:
    """c = beta1 m + (1 - beta1) g with m <- beta2 m + (1 - beta2) g, which starts at 0."""
    first, second = (float(beta) for beta in step.group["betas"])
    return second * memory + (1 - second) * share, first * memory + (1 - first) * share


def noise_of_lion(group: Mapping[str, Any], momentum: Tensor) -> Tensor:
    """The standard deviation of c from m alone, where gradients are noise: m^2 by rows and columns.

    One entry of m says little about its own noise, so means over rows and columns stand for it.
    """
    first, second = (float(beta) for beta in group["betas"])
    share = (1 - second) / (1 + second)  # of a gradient's variance that m has
    more = ((1 - first) ** 2 + first**2 * share) / share
    square = momentum.square().reshape(len(momentum), -1) if momentum.dim() else momentum.square()
    mean = square.mean()
    if momentum.dim() < 2:
        return (mean * more).sqrt().expand(momentum.shape)
    rows, columns = square.mean(1, keepdim=True), square.mean(0, keepdim=True)
    return (rows * columns / mean * more).sqrt().reshape(momentum.shape)


def muon_momentum(step: Step) -> Tensor:
    """What the step orthogonalises."""
    buffer: Tensor = step.state["momentum_buffer"]
    gradient = step.parameter.grad
    if gradient is None or not step.group["nesterov"]:
        return buffer
    return gradient.lerp(buffer, float(step.group["momentum"]))


def muon_ratio(group: Mapping[str, Any], shape: torch.Size) -> float:
    """What the learning rate is multiplied by for a weight of this shape."""
    kind = group["adjust_lr_fn"]
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(shape))
    return math.sqrt(max(1.0, shape[0] / shape[1]))


def orthogonalised(values: Tensor, group: Mapping[str, Any]) -> Tensor:
    """What Muon's polynomial makes of singular values, whose squares sum to 1."""
    a, b, c = group["ns_coefficients"]
    for _ in range(group["ns_steps"]):
        values = a * values + b * values**3 + c * values**5
    return values


def root_of_muon(momentum: Tensor, group: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """c = U diag(s) V' and p with step = U diag(s / p) V': U, V and p, each of the shorter axis."""
    left, values, right = torch.linalg.svd(momentum, full_matrices=False)
    norm = values.norm().clamp(min=float(group["eps"]))
    share = (values / norm).clamp(min=torch.finfo(values.dtype).eps)  # no 0 over 0
    root = norm * share / orthogonalised(share, group)
    return left, right.mT, root / muon_ratio(group, momentum.shape)


def muon_root(step: Step) -> Tensor:
    """1 / diag(P^-1) of the shorter axis."""
    momentum = muon_momentum(step)
    left, right, root = root_of_muon(momentum, step.group)
    if len(left) <= len(right):
        inverse = (left.square() / root).sum(1, keepdim=True)
    else:
        inverse = (right.square() / root).sum(1)
    return inverse.reciprocal_().expand(momentum.shape).clone()


def muon_weight(step: Step, memory: float, share: float) -> tuple[float, float]:
    """M <- mu M + (1 - mu) g, which starts at 0; with Nesterov mu M + (1 - mu) g once more."""
    momentum = float(step.group["momentum"])
    memory = momentum * memory + (1 - momentum) * share
    return memory, momentum * memory + (1 - momentum) * share if step.group["nesterov"] else memory


def steadily(group: Mapping[str, Any]) -> float:
    """The share of what is read that a step replaces."""
    return FORGETTING
