"""Whether a loss curves at all: what a posterior is made of."""

from __future__ import annotations

import torch
from torch import Tensor

from engram.core.dtypes import wide
from engram.curvature.kinds import Curvature
from engram.engine.session import Session
from engram.errors import LikelihoodError
from engram.likelihoods.from_loss import LossLikelihood
from engram.posteriors.gaussian import Posterior

# When a posterior counts as having no curvature of the data: far below what rounding leaves of one
LIKE_PRIOR = 1e-6  # relative difference of the precision from the prior's, along one vector
NO_CURVATURE = 1e-8  # change of the residuals over their size, times the size of the outputs


def check_curved(opened: Session, posterior: Posterior) -> None:
    """LikelihoodError where the loss has slopes and no curvature.

    That takes a pass, for losses of the user's own and where the posterior looks like the prior.
    The Hessian of a net has curvature of the net's own, but none of such a loss's kinks.
    """
    if posterior.curvature is Curvature.EMPIRICAL:  # made of slopes
        return
    if not isinstance(opened.likelihood, LossLikelihood) and not _looks_like_prior(posterior):
        return
    slope = bent = outputs = 0.0
    for observed in opened.passes("curvature of the loss", opened.own_rows()):
        residual = observed.residual
        weighted = opened.likelihood.hessian_times(observed.outputs, observed.targets, residual)
        slope += float(wide(residual).square().sum())
        bent += float(wide(weighted).norm(dim=1).sum())
        outputs += float(wide(observed.outputs).square().sum())
    sums = torch.tensor([slope, bent, outputs], dtype=torch.float64)
    sums = opened.peers.summed("slopes of the loss", {"slopes": sums})["slopes"]
    slope, bent, outputs = sums.tolist()
    size = max(1.0, (outputs / opened.batches.num_data) ** 0.5)  # outputs may all be 0
    if slope > 0 and bent * size <= NO_CURVATURE * slope:
        raise LikelihoodError(
            "a loss that curves: its second derivative by the outputs is what a posterior is made "
            "of",
            f"{opened.likelihood!r}, whose slopes do not change with the outputs at any example, "
            "so that the posterior would be the prior",
            "use a smooth loss (Huber in place of absolute, softplus in place of hinge), smaller "
            'outputs where a softmax is saturated, or curvature="empirical"',
        )


def _looks_like_prior(posterior: Posterior) -> bool:
    """Whether every block equals the prior; the smallest first, since one that differs decides."""
    mean = posterior.mean
    for block in sorted(posterior.blocks, key=lambda b: sum(mean[n].numel() for n in b.names)):
        vector = {name: _rising(mean[name]) for name in block.names}
        for name, image in block.multiply(vector).items():
            prior = posterior.prior_of(name) * vector[name]
            if bool(((image - prior).abs() > LIKE_PRIOR * prior).any()):
                return False
    return True


def _rising(like: Tensor) -> Tensor:
    """Numbers from 1 to 2: a softmax has no curvature along ones."""
    numbers = torch.linspace(1, 2, max(like.numel(), 1), dtype=like.dtype, device=like.device)
    return numbers[: like.numel()].reshape(like.shape)
