r"""Newton's method and its online forms: curvature and gradient at the mean itself.

The precision is the curvature of the last step (Newton), or a moving average of curvatures (Online
Newton), as a full matrix or as its diagonal.
"""

from __future__ import annotations

from abc import ABC
from typing import Any, ClassVar

from engram.optimizers.base import BayesianOptimizer
from engram.optimizers.curvatures import CurvatureSource, Hessian, Hutchinson
from engram.optimizers.structures import Diagonal, FullMatrix, Structure


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
        seed: of the probes, where the curvature draws some.

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

    structure: ClassVar[Structure] = FullMatrix()
    _default_curvature: ClassVar[CurvatureSource] = Hessian()

    def __init__(
        self,
        params: Any,
        *,
        num_data: int,
        prior_precision: float,
        lr: float = 1.0,
        curvature: CurvatureSource | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            params,
            {"num_data": num_data, "prior_precision": prior_precision, "lr": lr}
            | {"precision_lr": 1.0, "initial_precision": None},
            curvature,
            seed,
        )


class _Online(BayesianOptimizer, ABC):
    """Abstract: both step sizes are free, and everything is taken at the mean."""

    def __init__(
        self,
        params: Any,
        *,
        num_data: int,
        prior_precision: float,
        lr: float = 0.1,
        precision_lr: float = 0.1,
        curvature: CurvatureSource | None = None,
        initial_precision: float | None = None,
        seed: int = 0,
    ) -> None:
        size = {"num_data": num_data, "prior_precision": prior_precision}
        rates = {"lr": lr, "precision_lr": precision_lr, "initial_precision": initial_precision}
        super().__init__(params, size | rates, curvature, seed)


class OnlineNewton(_Online):
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
        seed: of the probes, where the curvature draws some.

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

    structure: ClassVar[Structure] = FullMatrix()
    _default_curvature: ClassVar[CurvatureSource] = Hessian()


class DiagonalOnlineNewton(_Online):
    r"""Online Newton with a diagonal precision and minibatches.

    .. math:: s_t = (1 - \rho_S) s_{t-1} + \rho_S\, \mathrm{diag}\,\hat\nabla^2\bar\ell, \qquad
        \theta_t = \theta_{t-1} - \rho\, s_t^{-1} \cdot \hat\nabla\bar\ell

    Args:
        params: parameters, or groups of them with their own settings.
        num_data: N, the number of training examples (not of the batch).
        prior_precision: delta of the regulariser delta/2 |theta|^2 on the sum of the losses.
        lr: rho, the step size of the mean.
        precision_lr: rho_S, the step size of the precision; the paper has both equal.
        curvature: ``Hutchinson(probes)``, ``Hessian()`` for the exact diagonal at as many backward
            passes as there are parameters, or ``GaussNewton(likelihood, probes)``; the first two
            may turn negative far from a minimum, which is an error, the last cannot.
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

    structure: ClassVar[Structure] = Diagonal()
    _default_curvature: ClassVar[CurvatureSource] = Hutchinson()
