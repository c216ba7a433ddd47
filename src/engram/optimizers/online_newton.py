r"""Online Newton: the precision is a running average of curvatures."""

from __future__ import annotations

from typing import Any

from engram.optimizers.base import BayesianOptimizer
from engram.optimizers.curvatures import Hessian, MatrixCurvature
from engram.optimizers.structures import FullMatrix


class OnlineNewton(BayesianOptimizer):
    r"""Online Newton with a full matrix.

    .. math:: S_t = (1 - \rho_S) S_{t-1} + \rho_S \nabla^2\bar\ell(\theta_{t-1}), \qquad
        \theta_t = \theta_{t-1} - \rho\, S_t^{-1} \nabla\bar\ell(\theta_{t-1})

    Args:
        params: parameters, or groups of them; all share one matrix.
        num_data: N, the number of training examples.
        prior_precision: delta of the regulariser delta/2 |theta|^2 on the sum of the losses.
        lr: rho, the step size of the mean.
        precision_lr: rho_S, the step size of the precision; the paper has both equal.
        curvature: ``Hessian()`` or ``GaussNewton(likelihood)``.
        initial_precision: S_0 as a multiple of the identity; N + delta if not given.

    Example:
        The precision of a quadratic tends to its curvature, here 1 + 4 + 0.5.

        >>> import torch
        >>> x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> optimizer = OnlineNewton(model.parameters(), num_data=2, prior_precision=0.5)
        >>> for _ in range(200):
        ...     _ = optimizer.step(lambda: 0.5 * ((model(x) - y) ** 2).sum(1).mean())
        >>> print(f"{model.weight.item():.3f} {optimizer.state['shared']['precision'].item():.3f}")
        2.000 5.500

    Reference:
        Nickl et al., *The Memory-Perturbation Equation*, NeurIPS 2023, appendix on the Bayesian
        learning rule, the ON update.
    """

    def __init__(
        self,
        params: Any,
        *,
        num_data: int,
        prior_precision: float,
        lr: float = 0.1,
        precision_lr: float = 0.1,
        curvature: MatrixCurvature | None = None,
        initial_precision: float | None = None,
    ) -> None:
        defaults = {
            "num_data": num_data,
            "prior_precision": prior_precision,
            "lr": lr,
            "precision_lr": precision_lr,
            "initial_precision": initial_precision,
        }
        super().__init__(params, defaults, FullMatrix(), curvature or Hessian(), seed=0)
