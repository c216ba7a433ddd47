r"""Other predictors of generalisation beside the leave-one-out loss.

The Laplace approximation of the marginal likelihood, with N examples and P parameters,

.. math:: \log p(D) \approx -\sum_i \ell_i(m) + \log p_0(m) + \frac{P}{2} \log 2\pi
    - \frac12 \log |S|

and the sharpness of the mean loss L: the largest eigenvalue and the trace of its Hessian, and how
far it rises over the posterior, :math:`\mathbb{E}_q[L(\theta)] - L(m)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engram.core.arguments import AUTO, MANY, seed_number, whole
from engram.core.data.batches import Data, call
from engram.core.dtypes import wide
from engram.core.memory import backing_off
from engram.core.parameters import Layout, trainable
from engram.core.progress import progress_over
from engram.core.state.model import device_of
from engram.curvature.operators import CurvatureOperator, exact_curvature
from engram.engine.session import Session
from engram.errors import PosteriorError
from engram.linalg.krylov import ritz_values
from engram.posteriors.gaussian import Posterior
from engram.problem import opened_problem
from engram.sensitivity.sampling import Draws, weights

FEW_PARAMETERS = 512  # up to here the trace is exact: as many products as parameters


@dataclass(frozen=True)
class MarginalLikelihood:
    """The logarithm of the marginal likelihood and its parts, in nats over all examples.

    Attributes:
        log_likelihood: minus the sum of the losses at the mean.
        log_prior: log density of the prior at the mean, over the parameters that are covered.
        log_volume: of the posterior, P/2 log 2 pi - log |S| / 2.
        num_data: N.
    """

    log_likelihood: float
    log_prior: float
    log_volume: float
    num_data: int

    @property
    def value(self) -> float:
        """log p(D)."""
        return self.log_likelihood + self.log_prior + self.log_volume

    @property
    def per_example(self) -> float:
        """Minus log p(D) over N, to be seen beside a loss per example."""
        return -self.value / self.num_data

    def __repr__(self) -> str:
        return (
            f"MarginalLikelihood(log p(D) = {self.value:.6g}: likelihood "
            f"{self.log_likelihood:.6g}, prior {self.log_prior:.6g}, volume "
            f"{self.log_volume:.6g} nats; {self.per_example:.4f} per example)"
        )


@backing_off
def marginal_likelihood(
    model: nn.Module,
    data: Data,
    posterior: Posterior | Any,
    *,
    batch_size: int | str = AUTO,
    progress: bool = True,
) -> MarginalLikelihood:
    """Laplace's approximation of log p(D), exact for linear regression.

    Args:
        model: trained to a minimum; it is not changed.
        data: the training data.
        posterior: of this model at its present weights, with a proper prior.

    Example:
        >>> import engram
        >>> x, y = torch.tensor([[1.0], [2.0]]).double(), torch.tensor([[3.0], [1.0]]).double()
        >>> model = nn.Linear(1, 1, bias=False).double()
        >>> _ = model.weight.data.fill_(5 / 6)  # ridge: x'y / (x'x + 1)
        >>> posterior = engram.laplace(model, (x, y), likelihood="gaussian", prior_precision=1.0)
        >>> found = marginal_likelihood(model, (x, y), posterior)
        >>> exact = torch.distributions.MultivariateNormal(
        ...     torch.zeros(2).double(), torch.eye(2).double() + x @ x.T
        ... ).log_prob(y[:, 0])
        >>> abs(found.value - float(exact)) < 1e-9
        True
    """
    with opened_problem(model, data, posterior, batch_size, progress) as problem:
        found = problem.posterior
        _check_proper(found)
        loss = sum(
            float(wide(observed.loss).sum())
            for observed in problem.session.passes("marginal likelihood")
        )
        prior = found.prior_vector
        mean = found.layout.flatten({name: found.mean[name] for name in found.names})
        squares = float((prior * mean.double().cpu().square()).sum())
        constant = found.num_params * math.log(2 * math.pi)
        log_prior = 0.5 * (float(prior.log().sum()) - constant - squares)
        volume = 0.5 * (constant - found.log_det())
        return MarginalLikelihood(-loss, log_prior, volume, problem.num_data)


def _check_proper(posterior: Posterior) -> None:
    if posterior.stopped:
        raise PosteriorError(
            "the posterior of a minimum, which has a marginal likelihood",
            "that of a training that was stopped",
            "train on, and fit it without training=",
        )
    if not bool((posterior.prior_vector > 0).all()):
        raise PosteriorError(
            "a proper prior on every parameter",
            "a prior precision of 0",
            "fit the posterior with prior_precision above 0",
        )


@dataclass(frozen=True)
class Sharpness:
    """How sharp the minimum of the mean loss is; without the regulariser.

    Attributes:
        largest_eigenvalue: of the Hessian of the mean loss.
        trace: of that Hessian.
        trace_error: standard error of it; 0 where it is exact.
        expected_increase: mean loss over the posterior minus that at its mean, nats per example.
        expected_error: standard error of it over the draws.
    """

    largest_eigenvalue: float
    trace: float
    trace_error: float
    expected_increase: float
    expected_error: float

    def __repr__(self) -> str:
        error = f" +- {self.trace_error:.2g}" if self.trace_error else ""
        return (
            f"Sharpness(largest eigenvalue {self.largest_eigenvalue:.4g}, trace "
            f"{self.trace:.4g}{error}; over the posterior the loss rises by "
            f"{self.expected_increase:.4g} +- {self.expected_error:.2g} nats per example)"
        )


@backing_off
def sharpness(
    model: nn.Module,
    data: Data,
    posterior: Posterior | Any,
    *,
    curvature: str = "hessian",
    products: int = 30,
    samples: int = 16,
    seed: int = 0,
    batch_size: int | str = AUTO,
    progress: bool = True,
) -> Sharpness:
    """Largest eigenvalue and trace of the mean loss's curvature, and its rise over the posterior.

    Args:
        model: trained; it is not changed.
        data: the training data.
        posterior: of this model at its present weights; what it covers is what is looked at.
        curvature: ``hessian`` or ``ggn``, the Gauss-Newton matrix.
        products: with the curvature, a pass over the data each: as many for the eigenvalue, by
            Lanczos' method, and for the trace, by random signs; with few parameters the trace is
            exact.
        samples: draws from the posterior, a pass each.
        seed: of signs and draws.

    Example:
        >>> import engram
        >>> x, model = torch.randn(9, 2).double(), nn.Linear(2, 1, bias=False).double()
        >>> data = (x, x.sum(1, keepdim=True))
        >>> posterior = engram.laplace(model, data, likelihood="gaussian", prior_precision=1.0)
        >>> found, gram = sharpness(model, data, posterior), x.T @ x / 9
        >>> abs(found.largest_eigenvalue - float(torch.linalg.eigvalsh(gram)[-1])) < 1e-9
        True
    """
    products = whole("number of products", products, 1, MANY, "use products=30")
    samples = whole("number of samples", samples, 2, MANY, "use samples=16")
    seed = seed_number(seed)
    with opened_problem(model, data, posterior, batch_size, progress) as problem:
        opened, posterior, layout = problem.session, problem.posterior, problem.posterior.layout
        operator = exact_curvature(curvature, opened, layout)
        number = problem.num_data
        generator = torch.Generator().manual_seed(seed)
        largest = _largest(operator, layout, opened, products, generator)
        traces = _traces(operator, layout, opened, products, generator)
        draws = Draws(posterior, samples, seed, device_of(opened.model))
        at_mean, losses = _mean_loss(opened), []
        for draw in draws:
            with weights(opened.model, draw):
                losses.append(_mean_loss(opened) - at_mean)
        rises = torch.tensor(losses, dtype=torch.float64)
        exact = layout.num_params <= FEW_PARAMETERS
        error = 0.0 if exact else float(traces.std() / len(traces) ** 0.5)
        return Sharpness(
            largest / number,
            float(traces.sum() if exact else traces.mean()) / number,
            error / number,
            float(rises.mean()),
            float(rises.std() / samples**0.5),
        )


def _largest(
    operator: CurvatureOperator,
    layout: Layout,
    opened: Session,
    products: int,
    generator: torch.Generator,
) -> float:
    like = next(iter(trainable(opened.model).values()))
    start = torch.randn(layout.num_params, generator=generator, dtype=torch.float64).to(like)
    steps = progress_over(range(products), "sharpness", opened.progress, products)
    found = ritz_values(lambda v: (operator @ v[None])[0], torch.clone, torch.clone, start, steps)
    return float(found[-1])


def _traces(
    operator: CurvatureOperator,
    layout: Layout,
    opened: Session,
    products: int,
    generator: torch.Generator,
) -> Tensor:
    """Entries of the diagonal, or z'Hz of random signs z, [n]."""
    like = next(iter(trainable(opened.model).values()))
    size = layout.num_params
    if size <= FEW_PARAMETERS:
        probes = torch.eye(size, dtype=torch.float64)
    else:
        probes = 2.0 * torch.randint(0, 2, (products, size), generator=generator) - 1
    found = [
        (wide(operator @ rows.to(like)) * wide(rows.to(like))).sum(1) for rows in probes.split(32)
    ]
    return torch.cat(found).double().cpu()


def _mean_loss(opened: Session) -> float:
    """At the present weights: a forward pass."""
    total = 0.0
    with torch.no_grad():
        for part in opened.parts(opened.batches, "mean loss", len(opened.batches)):
            batch = opened.placed(part)
            outputs = call(opened.model, batch.inputs)
            targets = opened.likelihood.prepare(outputs, batch.targets)
            total += float(wide(opened.likelihood.loss(outputs, targets)).sum())
    return total / opened.batches.num_data
