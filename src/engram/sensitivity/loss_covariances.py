r"""Sensitivities to losses of any kind, differentiable or not, from their values alone.

For a Gaussian q the derivative of an expectation is a covariance,

.. math:: S^{-1} \nabla_m \mathbb{E}_q[\ell_i(\theta)] = \mathrm{Cov}_q(\theta, \ell_i(\theta))

so that the memory-perturbation equation reads
:math:`\hat m^{\setminus i} - m = \rho\, \mathrm{Cov}_q(\theta, \ell_i)`, and, where outputs are
linear over the width of q, they deviate by :math:`d_i = \rho\, \mathrm{Cov}_q(f_i, \ell_i)`. The
posterior smooths the loss: hinge, absolute and 0-1 losses need no smoothing of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engram.core.arguments import AUTO, MANY, positive, seed_number, shown, whole
from engram.core.data.batches import Data, call
from engram.core.dtypes import wide
from engram.core.memory import backing_off
from engram.core.progress import progress_over
from engram.core.state.model import device_of
from engram.engine.session import Session
from engram.errors import ArgumentError
from engram.posteriors.gaussian import Posterior
from engram.problem import opened_problem
from engram.sensitivity.sampling import Draws, weights

#: Losses [n] of outputs [n, K] and targets, a number an example
AnyLoss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class LossCovariances:
    """What leaving examples out does, by the covariance of outputs and losses over a posterior.

    Attributes:
        deviation: of the outputs of each example without it, [N, K].
        error: standard error of it over the draws, [N, K].
        expected_loss: of each example over the posterior, [N].
        samples: draws.
    """

    deviation: Tensor
    error: Tensor
    expected_loss: Tensor
    samples: int

    def __repr__(self) -> str:
        count, outputs = self.deviation.shape
        return (
            f"LossCovariances({count:,} examples, {outputs} outputs, {self.samples:,} samples, "
            f"mean loss {float(self.expected_loss.mean()):.4g})"
        )


@backing_off
def loss_covariances(
    model: nn.Module,
    data: Data,
    posterior: Posterior | Any,
    loss: AnyLoss,
    *,
    samples: int = 256,
    step_size: float = 1.0,
    seed: int = 0,
    batch_size: int | str = AUTO,
    progress: bool = True,
) -> LossCovariances:
    """How far each example's outputs would move without it, for a loss of any kind.

    Args:
        model: trained; it is not changed.
        data: the training data.
        posterior: of this model at its present weights, for instance that of
            :class:`engram.optimizers.DiagonalVON`.
        loss: of outputs [n, K] and targets as the data gives them, a number an example; no
            derivative of it is taken.
        samples: draws from the posterior, a forward pass each.
        step_size: rho of the equation.
        seed: of the draws.

    Example:
        A 0-1 loss has a slope where the posterior is not sure:

        >>> import engram
        >>> x, y = torch.tensor([[0.1], [3.0]]).double(), torch.tensor([1.0, 1.0]).double()
        >>> model = nn.Linear(1, 1, bias=False).double()
        >>> _ = model.weight.data.fill_(1.0)
        >>> posterior = engram.laplace(
        ...     model, (x, y[:, None]), likelihood="gaussian", prior_precision=1.0
        ... )
        >>> wrong = lambda f, y: (f[:, 0] * y[:, 0] < 0).double()
        >>> found = loss_covariances(model, (x, y[:, None]), posterior, wrong, samples=64)
        >>> found.deviation.shape, bool((found.deviation <= 0).all())
        (torch.Size([2, 1]), True)
    """
    if not callable(loss):
        raise ArgumentError(
            "a loss function of outputs and targets", shown(loss), "return a number per example"
        )
    samples = whole("number of samples", samples, 2, MANY, "use samples=256")
    rho, seed = positive("step_size", step_size), seed_number(seed)
    with opened_problem(model, data, posterior, batch_size, progress) as problem:
        opened = problem.session
        draws = Draws(problem.posterior, samples, seed, device_of(opened.model))
        moments = _Moments()
        for draw in progress_over(draws, "samples", progress, samples):
            with weights(opened.model, draw):
                moments.add(*_at_present(opened, loss))
        return moments.covariances(samples, rho)


class _Moments:
    """Sums over draws of outputs, losses and their products, about the first draw."""

    def __init__(self) -> None:
        self.first: tuple[Tensor, Tensor] | None = None
        self.sums: dict[str, Tensor] = {}

    def add(self, outputs: Tensor, losses: Tensor) -> None:
        if self.first is None:
            self.first = outputs, losses
        f, own = outputs - self.first[0], (losses - self.first[1])[:, None]
        terms = {
            "f": f,
            "l": own,
            "fl": f * own,
            "ffll": (f * own).square(),
            "ff": f * f,
            "ll": own * own,
            "ffl": f * f * own,
            "fll": f * own * own,
        }
        for name, term in terms.items():
            self.sums[name] = self.sums[name] + term if name in self.sums else term

    def covariances(self, count: int, rho: float) -> LossCovariances:
        assert self.first is not None
        mean = {name: total / count for name, total in self.sums.items()}
        f, own = mean["f"], mean["l"]
        covariance = (mean["fl"] - f * own) * count / (count - 1)
        # E[(f - E f)^2 (l - E l)^2], the fourth moment that the error of a covariance is made of
        fourth = (
            mean["ffll"]
            - 2 * own * mean["ffl"]
            - 2 * f * mean["fll"]
            + own**2 * mean["ff"]
            + f**2 * mean["ll"]
            + 4 * f * own * mean["fl"]
            - 3 * f**2 * own**2
        )
        error = ((fourth - covariance**2).clamp(min=0) / count).sqrt()
        expected = self.first[1] + own[:, 0]
        return LossCovariances(rho * covariance, rho * error, expected, count)


def _at_present(opened: Session, loss: AnyLoss) -> tuple[Tensor, Tensor]:
    """Outputs [N, K] and losses [N] at the present weights, on the CPU."""
    outputs, losses = [], []
    with torch.no_grad():
        for part in opened.parts(opened.batches, "losses", len(opened.batches)):
            batch = opened.placed(part)
            found = call(opened.model, batch.inputs)
            own = loss(found, batch.targets)
            if not isinstance(own, Tensor) or own.shape != (len(batch),):
                got = tuple(own.shape) if isinstance(own, Tensor) else type(own).__name__
                raise ArgumentError(
                    f"a loss of shape ({len(batch)},), a number per example",
                    f"{got}",
                    'take no mean over the batch, as with reduction="none"',
                )
            outputs.append(wide(found).cpu())
            losses.append(wide(own).cpu())
    return torch.cat(outputs), torch.cat(losses)
