r"""Variational Online Newton: expectations over the Gaussian instead of values at its mean.

The same rule as Online Newton, with curvature and gradient averaged over samples of
:math:`q = \mathcal{N}(m, S^{-1})`, as a full matrix or as its diagonal.
"""

from __future__ import annotations

from abc import ABC
from typing import Any, ClassVar

from engram.optimizers.base import BayesianOptimizer
from engram.optimizers.curvatures import CurvatureSource, Hessian, Hutchinson
from engram.optimizers.structures import Diagonal, FullMatrix, Structure


class _Variational(BayesianOptimizer, ABC):
    """Abstract: Online Newton with draws from q in every step."""

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
        samples: int = 1,
        seed: int = 0,
    ) -> None:
        size = {"num_data": num_data, "prior_precision": prior_precision, "samples": samples}
        rates = {"lr": lr, "precision_lr": precision_lr, "initial_precision": initial_precision}
        super().__init__(params, size | rates, curvature, seed)


class VON(_Variational):
    r"""Variational Online Newton with a full matrix; between steps the weights are the mean m.

    .. math:: S_t = (1 - \rho_S) S_{t-1} + \rho_S E_q[\nabla^2\bar\ell(\theta)], \qquad
        m_t = m_{t-1} - \rho\, S_t^{-1} E_q[\nabla\bar\ell(\theta)], \qquad
        q = \mathcal{N}(m_{t-1}, S_{t-1}^{-1})

    It stops where N(m, S^-1) is the best Gaussian posterior: the variational optimum. The closure
    runs once for every sample, with the weights at the sample.

    Args:
        params: parameters, or groups of them; all share one matrix.
        num_data: N, the number of training examples.
        prior_precision: delta of the regulariser delta/2 |theta|^2 on the sum of the losses.
        lr: rho, the step size of the mean.
        precision_lr: rho_S, the step size of the precision.
        curvature: ``Hessian()``, ``GaussNewton(likelihood)``, or ``ScoreFunction()`` for losses
            without derivatives.
        initial_precision: S_0 as a multiple of the identity; N + delta if not given.
        samples: draws from q a step.
        seed: of the draws.

    Example:
        A quadratic has the same curvature everywhere, here 1 + 4 + 0.5.

        >>> import torch
        >>> x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> optimizer = VON(model.parameters(), num_data=2, prior_precision=0.5)
        >>> for _ in range(200):
        ...     _ = optimizer.step(lambda: 0.5 * ((model(x) - y) ** 2).sum(1).mean())
        >>> print(f"{optimizer.state['shared']['precision'].item():.3f}")
        5.500

    Reference:
        Khan et al., *Fast and Scalable Bayesian Deep Learning by Weight-Perturbation in Adam*,
        ICML 2018; Nickl et al., *The Memory-Perturbation Equation*, NeurIPS 2023, the VON update.
    """

    structure: ClassVar[Structure] = FullMatrix()
    _default_curvature: ClassVar[CurvatureSource] = Hessian()


class DiagonalVON(_Variational):
    r"""Variational Online Newton with a diagonal precision and minibatches; the weights are m.

    .. math:: s_t = (1 - \rho_S) s_{t-1} + \rho_S E_q[\mathrm{diag}\,\hat\nabla^2\bar\ell], \qquad
        m_t = m_{t-1} - \rho\, s_t^{-1} \cdot E_q[\hat\nabla\bar\ell(\theta)], \qquad
        q = \mathcal{N}(m_{t-1}, \mathrm{diag}(s_{t-1})^{-1})

    The closure runs once for every sample, with the weights at the sample.

    Args:
        params: parameters, or groups of them with their own settings.
        num_data: N, the number of training examples (not of the batch).
        prior_precision: delta of the regulariser delta/2 |theta|^2 on the sum of the losses.
        lr: rho, the step size of the mean.
        precision_lr: rho_S, the step size of the precision.
        curvature: ``Hutchinson(probes)``, ``Hessian()``, ``GaussNewton(likelihood, probes)``,
            ``Reparameterised()``, also for losses with kinks, or ``ScoreFunction()``, for losses
            without derivatives; with all but the Gauss-Newton matrix a precision may turn negative,
            which is an error.
        initial_precision: s_0; N + delta if not given.
        samples: draws from q a step.
        seed: of the draws and probes.

    Example:
        With one parameter the diagonal is all there is, here 1 + 4 + 0.5.

        >>> import torch
        >>> x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> optimizer = DiagonalVON(model.parameters(), num_data=2, prior_precision=0.5)
        >>> for _ in range(200):
        ...     _ = optimizer.step(lambda: 0.5 * ((model(x) - y) ** 2).sum(1).mean())
        >>> print(f"{optimizer.state[model.weight]['precision'].item():.3f}")
        5.500

    Reference:
        Khan et al., *Fast and Scalable Bayesian Deep Learning by Weight-Perturbation in Adam*,
        ICML 2018; Nickl et al., *The Memory-Perturbation Equation*, NeurIPS 2023, the VON update.
    """

    structure: ClassVar[Structure] = Diagonal()
    _default_curvature: ClassVar[CurvatureSource] = Hutchinson()
