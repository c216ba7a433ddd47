r"""The memory-perturbation equation; every use of it in engram calls this module.

.. math:: \lambda^{\setminus M} - \lambda = \rho \sum_{j \in M} \epsilon_j \tilde g_j(\lambda)

:math:`\lambda` is the natural parameter of the posterior, :math:`\tilde g_j` the natural gradient
of the expected loss of example j, :math:`\rho` the step size and :math:`\epsilon_j` the share of
the example that is taken out (1 removes it; the derivative at 0 is its influence).

Of the natural gradients the equation needs nothing but their weighted sum. So they are handed over
as the map from the weights to that sum, and outer products over many examples are never built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from engram.core.parameters import Named

#: weights [M] -> sum_j weights_j g_j, one component of the natural parameter
WeightedSum = Callable[[Tensor], Tensor]


def perturbed(
    natural: Mapping[str, Tensor],
    natural_gradients: Mapping[str, WeightedSum],
    weights: Tensor,
    step_size: float = 1.0,
) -> Named:
    r""":math:`\lambda + \rho \sum_j \epsilon_j \tilde g_j`: the equation.

    Args:
        natural: :math:`\lambda`, by component.
        natural_gradients: for each component that the examples touch, the map from weights to the
            weighted sum of their natural gradients.
        weights: :math:`\epsilon_j`, the share of each example that is taken out, [M].
        step_size: :math:`\rho`.

    Returns:
        The natural parameter without the examples; components that they do not touch as they are.

    Example:
        >>> flips = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> perturbed({"counts": torch.tensor([2.0, 1.0])}, {"counts": rows(-flips)},
        ...           torch.tensor([0.5, 1.0]))
        {'counts': tensor([1.5000, 0.0000])}
    """
    moved = {name: _step(total(weights), step_size) for name, total in natural_gradients.items()}
    return {
        name: value + moved[name] if name in moved else value for name, value in natural.items()
    }


def divided(
    natural: Mapping[str, Tensor], likelihoods: Mapping[str, WeightedSum], powers: Tensor
) -> Named:
    r""":math:`q / \prod_j p_j^{\epsilon_j}` in a conjugate model, where the equation is exact.

    There the natural gradient is minus the natural parameter :math:`\tilde\lambda_j` of the
    likelihood and :math:`\rho = 1`, so that

    .. math:: \lambda^{\setminus M} = \lambda - \sum_{j \in M} \epsilon_j \tilde\lambda_j

    A power of -1 multiplies by the likelihood: Bayes' rule is the same equation.

    Args:
        natural: :math:`\lambda`, by component.
        likelihoods: for each component, the weighted sum of the :math:`\tilde\lambda_j`.
        powers: :math:`\epsilon_j`, [M].
    """
    # sum_j eps_j (-lambda_j) = sum_j (-eps_j) lambda_j: the sum is linear in the weights
    return perturbed(natural, likelihoods, -powers)


def natural_deviation(
    natural_gradients: Tensor, weights: Tensor | float = 1.0, step_size: float = 1.0
) -> Tensor:
    r""":math:`\rho \sum_j \epsilon_j \tilde g_j`: what the natural parameter changes by.

    Args:
        natural_gradients: one row per example that is perturbed, [M, ...].
        weights: :math:`\epsilon_j`, one number or one per row.
        step_size: :math:`\rho`.

    Returns:
        The deviation, without the examples minus with them, [...].

    Example:
        A Beta(1 + 2, 1 + 1) posterior has seen 1, 1, 0. The natural gradient of a coin flip y is
        minus its natural parameter (y, 1 - y), so forgetting the last flip gives Beta(3, 1):

        >>> natural = torch.tensor([2.0, 1.0])
        >>> natural + natural_deviation(-torch.tensor([[0.0, 1.0]]))
        tensor([2., 0.])
    """
    weights = torch.as_tensor(
        weights, dtype=natural_gradients.dtype, device=natural_gradients.device
    ).expand(natural_gradients.shape[0])
    origin = {"deviation": torch.zeros_like(natural_gradients[:0].sum(0))}
    return perturbed(origin, {"deviation": rows(natural_gradients)}, weights, step_size)[
        "deviation"
    ]


def mean_deviation(
    solve: Callable[[Named], Named], gradients: Mapping[str, Tensor], step_size: float = 1.0
) -> Named:
    r"""The same equation for a Gaussian posterior :math:`N(m, S^{-1})`, seen in its mean.

    The natural parameter is :math:`(S m, -S/2)` and the natural gradient
    :math:`(g - H m, H/2)`; substituting the second component in the first leaves

    .. math:: m^{\setminus M} - m
        = \rho\, (S^{\setminus M})^{-1} \sum_j \epsilon_j \mathbb{E}[\nabla \ell_j]

    Args:
        solve: applies the inverse precision; that of the remaining data, or of all of it where
            the two are taken as equal.
        gradients: the weighted sum of gradients, or one gradient per example along leading
            dimensions, by parameter name.
        step_size: :math:`\rho`.
    """
    # measured from m the natural parameter is (0, -S/2), so that its first component becomes this
    linear = {name: _step(total, step_size) for name, total in gradients.items()}
    return solve(linear)


def gaussian_natural(mean: Tensor, precision: Tensor) -> Named:
    """:math:`(S m, -S/2)`, the natural parameter of N(m, S^-1); also in batches."""
    return {"linear": (precision @ mean[..., None])[..., 0], "quadratic": -0.5 * precision}


def gaussian_natural_gradients(
    gradients: Tensor, hessians: Tensor, mean: Tensor
) -> dict[str, WeightedSum]:
    """:math:`(g_j - H_j m, H_j/2)` from expected gradients [M, P] and Hessians [M, P, P]."""
    return {"linear": rows(gradients - hessians @ mean), "quadratic": rows(0.5 * hessians)}


def _step(total: Tensor, step_size: float) -> Tensor:
    """rho times the sum; as it is where rho is 1, for the sum may be as large as a model."""
    return total if step_size == 1.0 else step_size * total


def rows(values: Tensor) -> WeightedSum:
    """One row per example, [M, ...]."""
    return lambda weights: torch.tensordot(weights.to(values), values, dims=1)


def products(left: Tensor, right: Tensor) -> WeightedSum:
    """Outer products left_j right_j' of rows [M, A] and [M, B], without building them."""
    return lambda weights: left.mT @ (weights.to(right)[:, None] * right)


def placed(values: Tensor, places: Tensor, length: int) -> WeightedSum:
    """Rows [M, ...] that each touch only the entry places_j of a component [length, ...]."""

    def total(weights: Tensor) -> Tensor:
        scaled = torch.einsum("m,m...->m...", weights.to(values), values)
        return values.new_zeros(length, *values.shape[1:]).index_add(0, places, scaled)

    return total
