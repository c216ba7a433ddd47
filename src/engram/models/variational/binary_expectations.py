r"""Expected losses of a linear model with random weights of -1 and 1, and their derivatives.

For independent weights with means :math:`\mu_j = \tanh \lambda_j` the expectation is linear in each
mean, so its derivatives are differences of conditional expectations:

.. math:: \frac{\partial}{\partial \mu_j} \mathbb{E}[\ell]
    = \tfrac12 \big(\mathbb{E}[\ell \mid w_j = 1] - \mathbb{E}[\ell \mid w_j = -1]\big)

and likewise, over pairs, the second ones. Three ways to take the expectations: enumerating all
weights, a normal output by the central limit theorem, and sampling.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from engram.core.arguments import one_of
from engram.errors import ArgumentError
from engram.likelihoods import ExpectedLoss
from engram.likelihoods.sampled import check_samples

# weights whose 2^D values are summed over: exact, and twice the time for each more
MOST_ENUMERATED = 16  # if asked for: 65,536 values
ENUMERATED_BY_DEFAULT = 12  # without asking: 4,096 values
NUM_SAMPLES = 256  # draws of the weights: the error falls with the root of their number
PAIRS = tuple((a, b) for a in (1.0, -1.0) for b in (1.0, -1.0))


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs [N, D], targets in the form that the loss prepares, and the loss."""

    inputs: Tensor = field(repr=False)
    targets: Tensor = field(repr=False)
    loss: ExpectedLoss

    def on(self, indices: Tensor) -> Examples:
        """Some of them."""
        return Examples(self.inputs[indices], self.targets[indices], self.loss.on(indices))

    def losses_at(self, outputs: Tensor) -> Tensor:
        """The loss itself at outputs [N, S], [N, S]."""
        count = outputs.shape[1]
        repeated = self.targets.repeat_interleave(count, 0)
        return self.loss.pointwise(outputs.reshape(-1, 1), repeated).reshape(outputs.shape)


class Expectation(ABC):
    """A way to average the loss of every example over the weights."""

    @abstractmethod
    def losses(self, examples: Examples, natural: Tensor) -> Tensor:
        """E[loss_i], each example under its own natural parameters [N, D]; [N]."""

    @abstractmethod
    def gradients(self, examples: Examples, natural: Tensor) -> Tensor:
        """Derivatives by the means of the weights under natural parameters [D]; [N, D]."""

    @abstractmethod
    def hessians(self, examples: Examples, natural: Tensor) -> Tensor:
        """Second derivatives by the means under natural parameters [D]; [N, D, D]."""


class Enumerated(Expectation):
    """The sum over all 2^D weights, for D up to 16: exact."""

    def losses(self, examples: Examples, natural: Tensor) -> Tensor:
        signs = self._signs(natural)
        log_probability = logsigmoid(2 * natural[:, None, :] * signs).sum(2)
        return (self._table(examples, signs) * log_probability.exp()).sum(1)

    def gradients(self, examples: Examples, natural: Tensor) -> Tensor:
        signs = self._signs(natural)
        each = logsigmoid(2 * natural * signs)
        others = (each.sum(1, keepdim=True) - each).exp()
        return self._table(examples, signs) @ (0.5 * signs * others)

    def hessians(self, examples: Examples, natural: Tensor) -> Tensor:
        signs = self._signs(natural)
        each = logsigmoid(2 * natural * signs)
        others = (each.sum(1)[:, None, None] - each[:, :, None] - each[:, None, :]).exp()
        weights = 0.25 * signs[:, :, None] * signs[:, None, :] * others
        table = self._table(examples, signs)
        return _without_diagonal((table @ weights.flatten(1)).unflatten(1, weights.shape[1:]))

    def _signs(self, natural: Tensor) -> Tensor:
        """All weights, [2^D, D]."""
        size = natural.shape[-1]
        if size > MOST_ENUMERATED:
            raise ArgumentError(
                f"at most {MOST_ENUMERATED} weights to enumerate",
                str(size),
                'use expectation="gaussian" or "sampled"',
            )
        numbers = torch.arange(2**size, device=natural.device)[:, None]
        bits = (numbers >> torch.arange(size, device=natural.device)) & 1
        return 2 * bits.to(natural.dtype) - 1

    def _table(self, examples: Examples, signs: Tensor) -> Tensor:
        """The loss of every example with all weights, [N, 2^D]."""
        return examples.losses_at(examples.inputs @ signs.T)


class GaussianOutputs(Expectation):
    """The output as a normal variable: good for many weights of similar size."""

    def losses(self, examples: Examples, natural: Tensor) -> Tensor:
        means = natural.tanh()
        output = (examples.inputs * means).sum(1, keepdim=True)
        variance = (examples.inputs**2 * (1 - means**2)).sum(1, keepdim=True)
        return examples.loss.loss(output, variance, examples.targets)

    def gradients(self, examples: Examples, natural: Tensor) -> Tensor:
        inputs, own, spread = self._parts(examples, natural)
        output = own.sum(1, keepdim=True) - own
        variance = spread.sum(1, keepdim=True) - spread
        above = self._at(examples, output + inputs, variance)
        return 0.5 * (above - self._at(examples, output - inputs, variance))

    def hessians(self, examples: Examples, natural: Tensor) -> Tensor:
        inputs, own, spread = self._parts(examples, natural)
        output = own.sum(1)[:, None, None] - own[:, :, None] - own[:, None, :]
        variance = spread.sum(1)[:, None, None] - spread[:, :, None] - spread[:, None, :]
        total = torch.zeros_like(output)
        for a, b in PAIRS:
            shifted = output + a * inputs[:, :, None] + b * inputs[:, None, :]
            total += 0.25 * a * b * self._at(examples, shifted, variance)
        return _without_diagonal(total)

    def _parts(self, examples: Examples, natural: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        means = natural.tanh()
        return examples.inputs, examples.inputs * means, examples.inputs**2 * (1 - means**2)

    def _at(self, examples: Examples, output: Tensor, variance: Tensor) -> Tensor:
        """E[loss] at normal outputs of any shape [N, ...]."""
        targets = examples.targets.repeat_interleave(output[0].numel(), 0)
        flat = variance.clamp(min=0).reshape(-1, 1)
        return examples.loss.loss(output.reshape(-1, 1), flat, targets).reshape(output.shape)


class SampledWeights(Expectation):
    """Weights drawn from the posterior: for any size and loss, with conditional differences.

    Args:
        num_samples: how many draws of the weights.
        seed: of the uniform numbers behind them, the same in every call.
    """

    def __init__(self, num_samples: int = NUM_SAMPLES, seed: int = 0) -> None:
        self.num_samples = check_samples(num_samples)
        self.seed = seed

    def losses(self, examples: Examples, natural: Tensor) -> Tensor:
        total = torch.zeros_like(examples.inputs[:, 0])
        for uniform in self._uniform(natural):
            signs = self._signs(natural, uniform)
            total += examples.losses_at((examples.inputs * signs).sum(1, keepdim=True))[:, 0]
        return total / self.num_samples

    def gradients(self, examples: Examples, natural: Tensor) -> Tensor:
        inputs = examples.inputs
        total = torch.zeros_like(inputs)
        for uniform in self._uniform(natural):
            own = inputs * self._signs(natural, uniform)
            rest = own.sum(1, keepdim=True) - own
            total += examples.losses_at(rest + inputs) - examples.losses_at(rest - inputs)
        return 0.5 * total / self.num_samples

    def hessians(self, examples: Examples, natural: Tensor) -> Tensor:
        inputs = examples.inputs
        total = torch.zeros(*inputs.shape, inputs.shape[1], dtype=inputs.dtype).to(inputs)
        for uniform in self._uniform(natural):
            own = inputs * self._signs(natural, uniform)
            rest = own.sum(1)[:, None, None] - own[:, :, None] - own[:, None, :]
            for a, b in PAIRS:
                shifted = rest + a * inputs[:, :, None] + b * inputs[:, None, :]
                at = examples.losses_at(shifted.flatten(1)).reshape(shifted.shape)
                total += 0.25 * a * b * at
        return _without_diagonal(total / self.num_samples)

    def _uniform(self, natural: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.num_samples, natural.shape[-1])
        return torch.rand(shape, generator=generator, dtype=torch.float64).to(natural)

    def _signs(self, natural: Tensor, uniform: Tensor) -> Tensor:
        return torch.where(uniform < torch.sigmoid(2 * natural), 1.0, -1.0).to(natural)


def _without_diagonal(matrices: Tensor) -> Tensor:
    """An expectation is linear in each mean: the second derivative by one of them is zero."""
    return matrices - torch.diag_embed(matrices.diagonal(dim1=1, dim2=2))


EXPECTATIONS: dict[str, type[Expectation]] = {
    "enumerated": Enumerated,
    "gaussian": GaussianOutputs,
    "sampled": SampledWeights,
}


def expectation_named(name: str | Expectation | None, num_weights: int) -> Expectation:
    """The way with this name; if none is given, exact for few weights and normal for many."""
    if isinstance(name, Expectation):
        return name
    if name is None:
        return Enumerated() if num_weights <= ENUMERATED_BY_DEFAULT else GaussianOutputs()
    return EXPECTATIONS[one_of("expectation", name, EXPECTATIONS, 'use "gaussian"')]()
