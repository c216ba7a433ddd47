r"""The Gaussian likelihoods of the conjugate model that a posterior stands for.

.. math:: q \propto p_0 \prod_j e^{\theta' i_j - \frac12 \theta' I_j \theta}, \qquad
    i_j = \rho\, (\hat H_j m - \hat g_j), \quad I_j = \rho\, \hat H_j

with the expected gradient :math:`\hat g_j` and Gauss-Newton matrix :math:`\hat H_j` of example j.
Their natural parameters :math:`(i_j, -I_j/2)` are minus the natural gradients, so that taking some
of them away is the memory-perturbation equation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from engram.core.arguments import AUTO, positive
from engram.core.data.batches import Data
from engram.core.memory import backing_off, check_room
from engram.core.parameters import Layout, Named
from engram.core.selection import check_indices
from engram.posteriors.gaussian import Posterior
from engram.problem import Problem, opened_problem
from engram.sensitivity.group import Part
from engram.sensitivity.posterior_without import present_roots
from engram.sensitivity.sampling import Sampling
from engram.sensitivity.sampling import weights as at_weights
from engram.sensitivity.trajectory.influence import gradient_rows


@dataclass(frozen=True, eq=False)
class LikelihoodFactors:
    """Natural parameters of M examples' Gaussian likelihoods over P parameters.

    Attributes:
        indices: the examples, [M].
        linear: i, [M, P].
        roots: R with I = R'R, [M, r, P].
        layout: where the parameters stand in a flat vector.
    """

    indices: Tensor
    linear: Tensor = field(repr=False)
    roots: Tensor = field(repr=False)
    layout: Layout = field(repr=False)

    def __repr__(self) -> str:
        count, size = self.linear.shape
        return f"LikelihoodFactors({count:,} examples, {size:,} parameters)"

    def information(self, number: int) -> Tensor:
        """I of one of the examples, [P, P]."""
        return self.roots[number].mT @ self.roots[number]

    def natural(self) -> Named:
        """The sum over the examples as a natural parameter: ``linear`` and ``quadratic``."""
        flat = self.roots.flatten(0, 1)
        return {"linear": self.linear.sum(0), "quadratic": -0.5 * flat.mT @ flat}


@backing_off
def likelihood_factors(
    model: nn.Module,
    data: Data,
    posterior: Posterior | Any,
    indices: Sequence[int] | Tensor | None = None,
    *,
    samples: int = 0,
    step_size: float = 1.0,
    seed: int = 0,
    batch_size: int | str = AUTO,
    progress: bool = True,
) -> LikelihoodFactors:
    """The Gaussian likelihood that stands for each of some examples in the posterior.

    Args:
        model: trained; it is not changed.
        data: the training data.
        posterior: of this model at its present weights.
        indices: the examples; all if not given.
        samples, step_size, seed, batch_size, progress: as for :func:`engram.remove`.

    Returns:
        Their natural parameters. With the exact Gauss-Newton matrix at a minimum, the prior's and
        those of all examples add up to the posterior's.

    Example:
        For linear regression they are (x y, -x x'/2), whatever the weights:

        >>> import engram
        >>> x, y = torch.tensor([[1.0], [2.0]]).double(), torch.tensor([[3.0], [1.0]]).double()
        >>> model = nn.Linear(1, 1, bias=False).double()
        >>> posterior = engram.laplace(model, (x, y), likelihood="gaussian", prior_precision=1.0)
        >>> found = likelihood_factors(model, (x, y), posterior)
        >>> found.linear, found.natural()["quadratic"]
        (tensor([[3.],
                [2.]], dtype=torch.float64), tensor([[-2.5000]], dtype=torch.float64))
    """
    sampling = Sampling.checked(samples, seed=seed)
    rho = positive("step_size", step_size)
    with opened_problem(model, data, posterior, batch_size, progress) as problem:
        chosen = check_indices(indices, problem.num_data, "name each example once")
        layout, posterior = problem.posterior.layout, problem.posterior
        gradients, roots = _expected(problem, chosen, sampling)
        mean = layout.flatten({name: posterior.mean[name] for name in layout.names})
        along = torch.einsum("mrp,mr->mp", roots, roots @ mean.to(roots))
        return LikelihoodFactors(chosen, rho * (along - gradients), rho**0.5 * roots, layout)


def _expected(problem: Problem, chosen: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Expected gradients [M, P] and roots of expected Gauss-Newton matrices [M, r, P]."""
    opened, posterior = problem.session, problem.posterior
    layout, draws = posterior.layout, sampling.draws(posterior, opened.model)
    part = Part(opened, chosen, torch.ones(len(chosen), dtype=torch.float64))
    times = max(1, sampling.samples)
    rank = opened.likelihood.hessian_rank(_num_outputs(problem))
    element = next(iter(posterior.mean.values())).element_size()
    what = f"factors of {len(chosen):,} examples over {layout.num_params:,} parameters"
    size = len(chosen) * (1 + times * rank) * layout.num_params * element
    check_room(size, torch.device("cpu"), what, "ask for fewer examples")

    def gradients() -> Tensor:
        return torch.cat([rows.cpu() for rows in gradient_rows(opened, layout, chosen=chosen)])

    if not sampling.samples:
        found = [rows for rows, _ in present_roots(part, layout)]
        return gradients(), torch.cat(found).cpu()
    total, roots = torch.zeros(()), []
    for draw in draws:
        with at_weights(opened.model, draw):
            total = total + gradients() / times
            here = [rows.cpu() for rows, _ in present_roots(part, layout)]
            roots.append(torch.cat(here) / times**0.5)
    return total, torch.cat(roots, dim=1)


def _num_outputs(problem: Problem) -> int:
    opened = problem.session
    observed = opened.observe(opened.batches.take(torch.zeros(1, dtype=torch.long)))
    observed.trace.release()
    return int(observed.outputs.shape[1])
