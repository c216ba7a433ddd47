r"""The step size of the equation, as a precision.

A step of :math:`\rho` takes :math:`\rho` of an example's natural gradient out of a Gaussian,

.. math:: (S - \rho H_i)^{-1} \rho\, \nabla \ell_i = (S / \rho - H_i)^{-1} \nabla \ell_i

so that every rule has it with the precision :math:`S / \rho`, and a group with weights
:math:`\rho \epsilon`. A step of 1 makes the equation exact for conjugate models, and is no change.
"""

from __future__ import annotations

from dataclasses import replace

from engram.posteriors.gaussian import Posterior


def with_step_size(posterior: Posterior, step_size: float) -> Posterior:
    """The posterior with S / rho in place of S.

    Kronecker factors no longer know the part of a single input, and the record of a training is
    left out: rules that need them are for whole examples.

    Example:
        >>> import torch, engram
        >>> model, data = torch.nn.Linear(2, 1), (torch.randn(9, 2), torch.randn(9, 1))
        >>> posterior = engram.laplace(model, data, likelihood="gaussian", prior_precision=1.0)
        >>> halved = with_step_size(posterior, 0.5)
        >>> round(halved.log_det() - posterior.log_det(), 4)  # three parameters, log 2 each
        2.0794
    """
    if step_size == 1.0:
        return posterior
    blocks = tuple(block.scaled(1 / step_size) for block in posterior.blocks)
    return replace(posterior, blocks=blocks, training=None)
