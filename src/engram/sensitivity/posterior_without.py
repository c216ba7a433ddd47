r"""The whole posterior without a group: its mean and its precision, and what the group told.

.. math:: \hat S = S - \rho \sum_{j \in M} \epsilon_j \mathbb{E}_q[H_j], \qquad
    \hat m - m = \rho\, \hat S^{-1} \sum_{j \in M} \epsilon_j \mathbb{E}_q[\nabla \ell_j]

The curvature is taken out in the structure of the posterior: of a matrix as it is, of a diagonal
its diagonal, of Kronecker factors the inputs of the group, or its diagonal in their eigenbasis
where inputs are not known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from engram.core import equation
from engram.core.arguments import AUTO, positive
from engram.core.data.batches import Data
from engram.core.memory import GRADIENT_BYTES, backing_off
from engram.core.parameters import Layout
from engram.core.selection import check_group
from engram.curvature.kinds import Curvature
from engram.curvature.roots import gauss_newton_roots
from engram.engine.session import Session
from engram.linalg.block import Block
from engram.posteriors.downdating import without_inputs
from engram.posteriors.gaussian import Posterior
from engram.posteriors.laplace_torch import as_posterior
from engram.problem import Problem, opened_problem
from engram.sensitivity.group import Group, Part
from engram.sensitivity.sampling import Sampling
from engram.sensitivity.sampling import weights as at_weights


@backing_off
def posterior_without(
    model: nn.Module,
    data: Data,
    posterior: Posterior | Any,
    indices: Sequence[int] | Tensor | None = None,
    *,
    weights: Sequence[float] | Tensor | None = None,
    samples: int = 0,
    step_size: float = 1.0,
    seed: int = 0,
    batch_size: int | str = AUTO,
    progress: bool = True,
) -> Posterior:
    """The posterior of a model without some examples: the mean it would move to, and the precision.

    Args:
        model: trained; it is not changed.
        data: the training data.
        posterior: of this model at its present weights, with a precision that curvature can be
            taken out of: any structure but ``low_rank``.
        indices, weights: the group, as for :func:`engram.remove`.
        samples, step_size, seed, batch_size, progress: as there.

    Returns:
        Another posterior, with ``entropy`` and ``kl``. Its mean is another model's: that of this
        one at the moved weights.

    Raises:
        PosteriorError: where nothing positive definite is left.

    Example:
        Without an example a ridge regression has the posterior of the others:

        >>> import engram
        >>> x, y = torch.tensor([[1.0], [2.0]]).double(), torch.tensor([[3.0], [1.0]]).double()
        >>> model = nn.Linear(1, 1, bias=False).double()
        >>> _ = model.weight.data.fill_(5 / 6)  # x'y / (x'x + 1)
        >>> posterior = engram.laplace(
        ...     model, (x, y), likelihood="gaussian", structure="full", prior_precision=1.0
        ... )
        >>> without = posterior_without(model, (x, y), posterior, [1])
        >>> without.mean["weight"], round(2.718281828 ** without.log_det(), 4)  # 3 / 2, and 1 + 1
        (tensor([[1.5000]], dtype=torch.float64), 2.0)
    """
    sampling = Sampling.checked(samples, seed=seed)
    rho = positive("step_size", step_size)
    with opened_problem(model, data, posterior, batch_size, progress) as problem:
        chosen, share = check_group(indices, weights, problem.num_data)
        return without_group(problem, chosen, rho * share, sampling)


def without_group(problem: Problem, chosen: Tensor, share: Tensor, sampling: Sampling) -> Posterior:
    """The posterior of an opened problem without a group, given as indices and weights [M]."""
    opened, posterior = problem.session, problem.posterior
    draws = sampling.draws(posterior, opened.model) if sampling.samples else None
    group = Group(opened, posterior, [Part.of(opened, chosen, share)], draws)
    left = replace(posterior, blocks=remaining_blocks(group))
    delta = equation.mean_deviation(left.solve, group.gradient())
    mean = {n: m + delta[n].to(m) if n in delta else m for n, m in posterior.mean.items()}
    count = max(1, round(posterior.num_data - float(share.sum())))
    settings = {**posterior.settings, "without": f"{len(chosen):,} examples"}
    return replace(left, mean=mean, num_data=count, settings=settings)


def remaining_blocks(group: Group) -> tuple[Block, ...]:
    """The blocks of the precision without a group."""
    posterior = group.posterior
    taken = group.inputs() if group.draws is None else {}
    downdated, _ = without_inputs(posterior, taken)
    open_blocks = [block for block in posterior.blocks if block.names not in taken]
    sums = _taken(group, open_blocks)
    return tuple(
        block.minus(sums[block.names], _floor(block, posterior)) if block.names in sums else block
        for block in downdated.blocks
    )


def _floor(block: Block, posterior: Posterior) -> float:
    return posterior.scale * min(posterior.prior_of(name) for name in block.names)


def _taken(group: Group, blocks: Sequence[Block]) -> dict[tuple[str, ...], Tensor]:
    """The group's curvature in the structure of each block."""
    posterior, layout = group.posterior, group.layout
    if posterior.curvature is Curvature.HESSIAN and posterior.is_dense and len(blocks) == 1:
        unit = torch.eye(layout.num_params, dtype=torch.float64)
        like = next(iter(group.parameters.values()))
        matrix = torch.cat([group.hessian @ rows.to(like) for rows in unit.split(64)])
        return {blocks[0].names: 0.5 * (matrix + matrix.mT)}
    sums = _Sums(blocks, layout)
    if group.draws is None:
        sums.add(group.parts, 1.0)
        return sums.by_names
    for draw in group.draws:
        with at_weights(group.opened.model, draw):
            sums.add(group.parts, 1 / group.draws.samples)
    return sums.by_names


class _Sums:
    """Curvature of examples in the structure of each block, by the block's names."""

    def __init__(self, blocks: Sequence[Block], layout: Layout) -> None:
        self.blocks, self.layout = blocks, layout
        self.by_names: dict[tuple[str, ...], Tensor] = {}

    def add(self, parts: Sequence[Part], scale: float) -> None:
        """Add that of some examples at the present weights."""
        for part in parts:
            for rows, share in present_roots(part, self.layout):
                each = scale * share.expand(rows.shape[:2]).reshape(-1)
                vectors = self.layout.unflatten(rows.flatten(0, 1))
                for block in self.blocks:
                    found = block.outer_sum(vectors, each)
                    self.by_names[block.names] = self.by_names.get(block.names, 0) + found


def present_roots(part: Part, layout: Layout) -> Iterator[tuple[Tensor, Tensor]]:
    """Roots [b, R, P] of some examples at a time, in order, with weights [b, 1]."""
    size = _examples_at_once(part.opened, layout)
    for start in range(0, len(part.chosen), size):
        here = slice(start, start + size)
        some = Part(part.opened, part.chosen[here], part.weights[here])
        for observed, share in some.passes("curvature of the group"):
            rows = gauss_newton_roots(observed, part.opened.likelihood, layout)
            yield rows, share.to(rows)


def _examples_at_once(opened: Session, layout: Layout) -> int:
    """Examples whose roots fit into the memory that gradients may take."""
    observed = opened.observe(opened.batches.take(torch.zeros(1, dtype=torch.long)))
    outputs = observed.outputs
    observed.trace.release()
    rank = opened.likelihood.hessian_rank(outputs.shape[1])
    return max(1, GRADIENT_BYTES // (rank * layout.num_params * outputs.element_size()))


@dataclass(frozen=True, eq=False)
class Information:
    """What a group of examples told a model, in nats.

    Attributes:
        posterior: of all data.
        without: the same without the group.
    """

    posterior: Posterior
    without: Posterior

    @property
    def kl(self) -> float:
        """KL(posterior || without), what a code for the weights gains by the group."""
        return self.posterior.kl(self.without)

    @property
    def kl_back(self) -> float:
        """KL(without || posterior)."""
        return self.without.kl(self.posterior)

    @property
    def entropy_change(self) -> float:
        """Entropy without the group minus with it, how much surer the group made the model."""
        return self.without.entropy - self.posterior.entropy

    def __repr__(self) -> str:
        return (
            f"Information(kl={self.kl:.4g}, kl_back={self.kl_back:.4g}, "
            f"entropy_change={self.entropy_change:+.4g} nats)"
        )


def information(
    model: nn.Module,
    data: Data,
    posterior: Posterior | Any,
    indices: Sequence[int] | Tensor | None = None,
    **given: Any,
) -> Information:
    """What some examples told a model: its posterior against the one without them.

    Args:
        model, data, posterior, indices: as for :func:`engram.posterior_without`.
        given: further arguments of it.

    Example:
        >>> import engram
        >>> model, data = nn.Linear(2, 2), (torch.randn(30, 2), torch.arange(30) % 2)
        >>> posterior = engram.laplace(model, data, structure="full", prior_precision=1.0)
        >>> information(model, data, posterior, [0, 1]).kl > 0
        True
    """
    posterior = as_posterior(posterior, model)
    return Information(posterior, posterior_without(model, data, posterior, indices, **given))
