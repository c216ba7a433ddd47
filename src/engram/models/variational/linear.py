r"""A linear model with a Gaussian posterior, trained by natural gradients on any loss.

The expected loss is smooth whatever the loss is, so hinge, 0-1, absolute and quantile losses are
fitted, and examples left out, as in any other model:

.. math:: m^{\setminus i} - m = (S^{\setminus i})^{-1}\, \nabla_m \mathbb{E}_q[\ell_i]
"""

from __future__ import annotations

import torch
from torch import Tensor

from engram.core.arguments import positive
from engram.likelihoods import ExpectedLoss, Likelihood, expected_loss
from engram.models.latent.latent_gaussian import LatentGaussian, at_prior
from engram.models.numbers import checked_inputs
from engram.models.variational.natural_gradient import fit

# length of the natural gradient at which a fit stops: what rounding leaves
TOLERANCE = 1e-10  # in double precision
SINGLE_TOLERANCE = 1e-5


def fit_variational_linear(
    inputs: Tensor,
    targets: Tensor,
    loss: str | Likelihood | ExpectedLoss = "hinge",
    *,
    prior_precision: float = 1.0,
    max_steps: int = 1000,
    tolerance: float | None = None,
    progress: bool = True,
) -> LatentGaussian:
    """Fit N(m, S^-1) over the weights of a linear model to the sum of expected losses.

    Args:
        inputs: [N, D]; append a column of ones for an intercept.
        targets: [N], in the support of the loss.
        loss: ``hinge``, ``zero_one``, ``absolute``, ``bernoulli`` and so on, or an object such as
            ``Quantile(0.9)`` or ``Sampled(function)``.
        prior_precision: delta.
        max_steps: at most so many steps of the natural gradient.
        tolerance: on its length where the fit stops; 1e-10, in single precision 1e-5, if not given.
        progress: show a bar when it takes longer than a few seconds.

    Returns:
        The posterior, with ``sensitivities()``, ``remove(indices)`` and ``mean_deviations()``.

    Example:
        Leaving out an example is exact for Gaussian noise:

        >>> x, y = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([1.0, 1.0, 4.0])
        >>> fitted = fit_variational_linear(x, y, "gaussian")
        >>> without = fit_variational_linear(x[:2], y[:2], "gaussian")
        >>> torch.allclose(fitted.remove([2]).mean, without.mean)
        True

    Reference:
        Nickl et al., *The Memory-Perturbation Equation*, 2023, appendix on non-differentiable loss
        functions.
    """
    inputs, targets = checked_inputs(inputs, targets)
    start = at_prior(
        inputs[None],
        targets,
        expected_loss(loss),
        positive("prior precision", prior_precision, "use 1.0"),
        settings={"model": "variational linear"},
    )
    if tolerance is None:
        tolerance = TOLERANCE if inputs.dtype == torch.float64 else SINGLE_TOLERANCE
    return fit(start, 1.0, max_steps, positive("tolerance", tolerance, "use 1e-10"), progress)
