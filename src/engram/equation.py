r"""The memory-perturbation equation, once.

.. math:: \lambda^{\setminus M} - \lambda = \rho \sum_{j \in M} \epsilon_j \tilde g_j(\lambda)

:math:`\lambda` is the natural parameter of the posterior, :math:`\tilde g_j` the natural gradient
of the expected loss of example j, :math:`\rho` the step size and :math:`\epsilon_j` the share of
the example that is taken out (1 removes it; the derivative at 0 is its influence).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from engram.parameters import Named


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
    weights = torch.as_tensor(weights, dtype=natural_gradients.dtype).expand(
        natural_gradients.shape[0]
    )
    return step_size * torch.tensordot(weights, natural_gradients, dims=1)


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
    direction = solve(dict(gradients))
    if step_size == 1.0:
        return direction
    return {name: step_size * vector for name, vector in direction.items()}
