"""Laplace posteriors: the precision is the curvature at the trained model, plus the prior's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engram.core.arguments import AUTO, is_auto, one_of, seed_number
from engram.core.data.batches import Data
from engram.core.dtypes import wide
from engram.core.errors import ArgumentError, LikelihoodError
from engram.core.memory import backing_off
from engram.core.parameters import check_module, trainable
from engram.curvature.kinds import CURVATURES, Curvature
from engram.engine.session import Session, session
from engram.likelihoods import Likelihood
from engram.likelihoods.from_loss import LossLikelihood
from engram.posteriors.automatic import chosen_fit
from engram.posteriors.gaussian import Posterior, check_prior_precision
from engram.posteriors.structures import STRUCTURES, Fit
from engram.posteriors.tolerance import chosen_tolerance, within

LIKE_PRIOR = 1e-6  # relative difference of the precision from the prior's, along one vector
NO_CURVATURE = 1e-8  # of the residual that it changes by over the size of the outputs


@backing_off
def laplace(
    model: nn.Module,
    data: Data,
    *,
    likelihood: str | Likelihood = "categorical",
    structure: str = AUTO,
    prior_precision: float = 1.0,
    curvature: str = AUTO,
    tolerance: float | str = AUTO,
    batch_size: int | str = AUTO,
    seed: int = 0,
    progress: bool = True,
) -> Posterior:
    r"""The Gaussian posterior at a trained model, :math:`S = \sum_i J_i' \Lambda_i J_i + \delta I`.

    ``"auto"`` for structure and curvature is the most faithful way that costs seconds: the full
    matrix up to N P^2 = 2e10 and P = 6000, of the exact Hessian where that is positive definite and
    affordable (weights used once per example), else of the Gauss-Newton matrix; above, the exact
    Hessian in up to 1206 directions, where it is positive definite and that takes some tens of
    seconds; else Kronecker factors. The posterior's ``structure`` and ``curvature`` say what it
    was.

    Args:
        model: trained; it is not changed.
        data: the training data.
        likelihood: a name or an object.
        structure: ``isotropic``, ``diagonal``, ``kronecker`` (K-FAC), ``ekfac`` (K-FAC with
            eigenvalues corrected, two passes), ``low_rank`` (exact in the directions that matter,
            found by products with the curvature), ``full``, or ``last_layer`` (full over it).
        prior_precision: delta of the regulariser delta/2 |theta|^2 on the sum of the losses.
        curvature: ``ggn`` exact, ``fisher`` with one sampled label per example, ``empirical``, or
            ``hessian`` (exact Hessian; ``full``, ``last_layer`` and ``low_rank``; an error where
            it is not positive definite). With a named structure ``"auto"`` is ``ggn``.
        tolerance: how far an average example's sensitivity may change for speed. Eigenvalues of
            wide Kronecker factors are merged, wide diagonals at one position are taken as a short
            sum of products, and of the exact curvature the classes with the last 3 tolerance of
            the outputs' variance are sampled (not in ``full``, ``last_layer``, ``low_rank``).
            ``"auto"`` is 0.03 in single precision and 0, everything exact, in double.
        batch_size: most examples at a time; ``"auto"`` is what the free memory has room for.
        seed: of the sampled labels, and of the random directions of ``low_rank``.
        progress: show a bar when it takes longer than a few seconds.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> data = (torch.randn(20, 3), torch.randint(0, 2, (20,)))
        >>> laplace(model, data, structure="diagonal", prior_precision=2.0)
        Posterior(diagonal, 8 parameters, N=20, prior_precision=2, curvature=ggn, ...)
    """
    check_module(model)
    prior_precision, seed = check_prior_precision(prior_precision), seed_number(seed)
    one_of("structure", structure, (AUTO, *STRUCTURES), 'use "auto"')
    one_of("curvature", curvature, (AUTO, *CURVATURES), 'use "auto"')
    _check_combination(structure, curvature)
    tolerance = chosen_tolerance(tolerance, model)
    with session(model, data, likelihood, batch_size, progress) as opened:
        return fitted(opened, structure, prior_precision, curvature, tolerance, seed)


def fitted(
    opened: Session,
    structure: str,
    prior_precision: float,
    curvature: str = AUTO,
    tolerance: float | str = AUTO,
    seed: int = 0,
) -> Posterior:
    """The Laplace posterior of an opened model; arguments as for :func:`laplace`, checked there."""
    tolerance = chosen_tolerance(tolerance, opened.model)
    chosen, fit_blocks = chosen_fit(opened, structure, curvature)
    kind = "ggn" if is_auto(curvature) else curvature
    fit = Fit(opened, prior_precision, kind, seed, tolerance)
    blocks = within(fit_blocks(fit), prior_precision, tolerance)
    settings: dict[str, Any] = {
        "method": "laplace",
        "curvature": str(fit.curvature),
        "likelihood": repr(opened.likelihood),
        "tolerance": tolerance,
        "seed": seed,
        **fit.record,
    }
    posterior = Posterior(
        fit.structure or chosen,
        {name: p.detach().clone() for name, p in trainable(opened.model).items()},
        blocks,
        prior_precision,
        opened.batches.num_data,
        settings,
        curvature=Curvature(fit.curvature),
        exact=fit.curvature == Curvature.HESSIAN,
        likelihood=opened.likelihood,
    )
    check_curved(opened, posterior)
    return posterior


def _check_combination(structure: str, curvature: str) -> None:
    """Some structures have the Hessian, and one has nothing but exact products."""
    if curvature == "hessian" and structure not in (AUTO, "full", "last_layer", "low_rank"):
        raise ArgumentError(
            'structure "full", "last_layer" or "low_rank" with curvature="hessian"',
            repr(structure),
            'use curvature="ggn" for the other structures',
        )
    if curvature in ("fisher", "empirical") and structure == "low_rank":
        raise ArgumentError(
            'curvature "ggn" or "hessian" with structure="low_rank"',
            repr(curvature),
            'use structure="kronecker" for sampled labels',
        )


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
    for observed in opened.passes("curvature of the loss"):
        residual = observed.residual
        weighted = opened.likelihood.hessian_times(observed.outputs, observed.targets, residual)
        slope += float(wide(residual).square().sum())
        bent += float(wide(weighted).norm(dim=1).sum())
        outputs += float(wide(observed.outputs).square().sum())
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
    """Whether no block is unlike it; the smallest first, since one is enough to tell."""
    mean = posterior.mean
    for block in sorted(posterior.blocks, key=lambda b: sum(mean[n].numel() for n in b.names)):
        ones: dict[str, Tensor] = {name: torch.ones_like(mean[name]) for name in block.names}
        for name, image in block.multiply(ones).items():
            prior = posterior.prior_of(name)
            if bool(((image - prior).abs() > LIKE_PRIOR * prior).any()):
                return False
    return True
