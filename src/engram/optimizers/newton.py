r"""Newton's method: the precision is the curvature of the last step."""

from __future__ import annotations

from typing import Any

from engram.optimizers.base import BayesianOptimizer
from engram.optimizers.curvatures import Hessian, MatrixCurvature
from engram.optimizers.structures import FullMatrix


class Newton(BayesianOptimizer):
    r"""Newton's method on the regularised sum of losses.

    .. math:: \theta_t = \theta_{t-1} - \rho\, H_{t-1}^{-1} \nabla\bar\ell(\theta_{t-1}), \qquad
        H_{t-1} = \nabla^2 \bar\ell(\theta_{t-1})

    The closure runs the model on *all* training data. A Hessian that is not positive definite is
    an error that says so; :class:`~engram.optimizers.GaussNewton` never is.

    Args:
        params: parameters, or groups of them.
        num_data: N, the number of training examples.
        prior_precision: delta of the regulariser delta/2 |theta|^2 on the sum of the losses.
        lr: rho; 1 is the full step.
        curvature: ``Hessian()`` or ``GaussNewton(likelihood)``.

    Example:
        One step solves ridge regression.

        >>> import torch
        >>> x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> optimizer = Newton(model.parameters(), num_data=2, prior_precision=0.5)
        >>> _ = optimizer.step(lambda: 0.5 * ((model(x) - y) ** 2).sum(1).mean())
        >>> print(f"{model.weight.item():.3f} = 11 / 5.5")
        2.000 = 11 / 5.5

    Reference:
        Nickl et al., *The Memory-Perturbation Equation*, NeurIPS 2023, appendix on the Bayesian
        learning rule: Online Newton with both step sizes 1.
    """

    def __init__(
        self,
        params: Any,
        *,
        num_data: int,
        prior_precision: float,
        lr: float = 1.0,
        curvature: MatrixCurvature | None = None,
    ) -> None:
        defaults = {
            "num_data": num_data,
            "prior_precision": prior_precision,
            "lr": lr,
            "precision_lr": 1.0,
            "initial_precision": None,
        }
        super().__init__(params, defaults, FullMatrix(), curvature or Hessian(), seed=0)
