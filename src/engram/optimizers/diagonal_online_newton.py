r"""Online Newton with a diagonal, for minibatches and nets of any size."""

from __future__ import annotations

from typing import Any

from engram.optimizers.base import BayesianOptimizer
from engram.optimizers.curvatures import DiagonalCurvature, Hutchinson
from engram.optimizers.structures import Diagonal


class DiagonalOnlineNewton(BayesianOptimizer):
    r"""Online Newton with a diagonal precision and minibatches.

    .. math:: s_t = (1 - \rho_S) s_{t-1} + \rho_S\, \mathrm{diag}\,\hat\nabla^2\bar\ell, \qquad
        \theta_t = \theta_{t-1} - \rho\, s_t^{-1} \cdot \hat\nabla\bar\ell

    Args:
        params: parameters, or groups of them with their own settings.
        num_data: N, the number of training examples (not of the batch).
        prior_precision: delta of the regulariser delta/2 |theta|^2 on the sum of the losses.
        lr: rho, the step size of the mean.
        precision_lr: rho_S, the step size of the precision; the paper has both equal.
        curvature: ``Hutchinson(probes)`` or ``GaussNewton(likelihood, probes)``; the first may
            turn negative far from a minimum, which is an error, the second cannot.
        initial_precision: s_0; N + delta if not given.
        seed: of the probes.

    Example:
        With one parameter the diagonal is all there is, here 1 + 4 + 0.5.

        >>> import torch
        >>> x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> optimizer = DiagonalOnlineNewton(model.parameters(), num_data=2, prior_precision=0.5)
        >>> for _ in range(200):
        ...     _ = optimizer.step(lambda: 0.5 * ((model(x) - y) ** 2).sum(1).mean())
        >>> print(f"{optimizer.state[model.weight]['precision'].item():.3f}")
        5.500

    Reference:
        Nickl et al., *The Memory-Perturbation Equation*, NeurIPS 2023, appendix on the Bayesian
        learning rule, the ON update with diagonal and minibatches.
    """

    def __init__(
        self,
        params: Any,
        *,
        num_data: int,
        prior_precision: float,
        lr: float = 0.1,
        precision_lr: float = 0.1,
        curvature: DiagonalCurvature | None = None,
        initial_precision: float | None = None,
        seed: int = 0,
    ) -> None:
        defaults = {
            "num_data": num_data,
            "prior_precision": prior_precision,
            "lr": lr,
            "precision_lr": precision_lr,
            "initial_precision": initial_precision,
        }
        super().__init__(params, defaults, Diagonal(), curvature or Hutchinson(), seed)
