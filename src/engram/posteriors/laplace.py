"""Laplace posteriors: the precision is the curvature at the trained model, plus the prior's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from engram.core.arguments import AUTO, is_auto, one_of, seed_number
from engram.core.data.batches import Data
from engram.core.errors import ArgumentError, PosteriorError
from engram.core.memory import available_bytes, backing_off
from engram.core.parameters import Layout, Named, check_module, trainable
from engram.core.state.model import device_of
from engram.curvature.ggn_roots import ggn_roots
from engram.curvature.kfac import KroneckerFactors
from engram.curvature.kinds import CURVATURES, Curvature
from engram.curvature.moments import OuterMoments, SquareMoments
from engram.curvature.operators import Hessian
from engram.engine.refusals import pass_on
from engram.engine.session import Observed, Session, session
from engram.likelihoods import Likelihood
from engram.linalg.block import Block
from engram.linalg.dense import DenseBlock
from engram.linalg.diagonal import DiagonalBlock
from engram.linalg.kronecker import KroneckerBlock
from engram.posteriors.automatic import (
    SMALLEST_SHARE,
    affordable_directions,
    default_structure,
    dense_bytes,
    hessian_is_affordable,
    is_safely_definite,
)
from engram.posteriors.fit import Fit, Gradients
from engram.posteriors.flat import check_curved
from engram.posteriors.gaussian import Posterior, check_prior_precision
from engram.posteriors.low_rank_fit import fit_low_rank
from engram.posteriors.tolerance import chosen_tolerance, within

FitBlocks = Callable[[Fit], tuple[Block, ...]]


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
    chosen, fit_blocks = _chosen(opened, structure, curvature)
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


def _chosen(opened: Session, structure: str, curvature: str) -> tuple[str, FitBlocks]:
    """The structure that is asked for, or the one that ``"auto"`` stands for, and its fit."""
    if not is_auto(structure):
        return structure, STRUCTURES[structure]
    if curvature == "hessian":
        return "full", _full
    chosen = default_structure(opened.model, opened.batches)
    if not is_auto(curvature):  # low rank pays with the Hessian and its rule only
        chosen = "kronecker" if chosen == "low_rank" else chosen
        return chosen, STRUCTURES[chosen]
    if chosen == "full" and hessian_is_affordable(opened):
        return chosen, _full_hessian_first
    if chosen == "low_rank":
        return chosen, _low_rank_hessian_first
    return chosen, STRUCTURES[chosen]


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


def _diagonal(fit: Fit) -> tuple[Block, ...]:
    names = list(fit.parameters)
    return fit.diagonal(fit.square_moments(set(names)), names)


def _isotropic(fit: Fit) -> tuple[Block, ...]:
    moments = fit.square_moments(set(fit.parameters))
    trace = sum(float(m.sum()) for m in moments.by_name.values())
    value = trace / sum(p.numel() for p in fit.parameters.values()) + fit.delta
    return tuple(
        DiagonalBlock.of(name, torch.full_like(p.detach(), value))
        for name, p in fit.parameters.items()
    )


def kronecker_sums(fit: Fit) -> tuple[KroneckerFactors, SquareMoments]:
    """Kronecker factors, and squares for what has no factors, in one pass."""
    factors, moments = KroneckerFactors(), SquareMoments()

    def each(observed: Observed, gradients: Gradients, number: int) -> None:
        if number == 0:
            factors.update_columns(observed.trace)
        factors.update_rows(observed.trace, gradients, number)
        rest = set(fit.parameters) - factors.covered()
        if rest:
            moments.update(observed.trace, gradients, rest)

    fit.passes("curvature", each)
    factors.drop_unused()
    return factors, moments


def kronecker_blocks(
    fit: Fit, factors: KroneckerFactors, moments: SquareMoments
) -> tuple[tuple[KroneckerBlock, ...], tuple[DiagonalBlock, ...]]:
    """K-FAC blocks, and diagonal blocks for the rest."""
    blocks = tuple(f.block(fit.delta, fit.dtype) for f in factors.layers.values())
    rest = [name for name in fit.parameters if name not in factors.covered()]
    return blocks, fit.diagonal(moments, rest)


def _kronecker(fit: Fit) -> tuple[Block, ...]:
    blocks, rest = kronecker_blocks(fit, *kronecker_sums(fit))
    return blocks + rest


def _ekfac(fit: Fit) -> tuple[Block, ...]:
    blocks, rest = kronecker_blocks(fit, *kronecker_sums(fit))
    moments = fit.square_moments({n for b in blocks for n in b.names}, blocks)
    corrected = tuple(
        KroneckerBlock(
            block.layout,
            (moments.by_block[block.names] + fit.delta).to(fit.dtype),
            block.rows,
            block.columns,
        )
        for block in blocks
    )
    return corrected + rest


def _dense(fit: Fit, names: Sequence[str]) -> tuple[Block, ...]:
    parameters: Named = {name: fit.parameters[name].detach() for name in names}
    layout = Layout.of(parameters)
    device = device_of(fit.session.model)
    _check_size(layout, device)
    if fit.curvature == "hessian":
        matrix = Hessian(fit.session, layout).matrix()
    else:
        moments = OuterMoments(layout, device)
        for observed in fit.session.passes("curvature"):
            vectors = ggn_roots(observed, fit.session.likelihood, fit.curvature, fit.seed)
            with torch.no_grad():
                per_seed = [
                    observed.trace.arranged(vectors[:, :, r].contiguous())
                    for r in range(vectors.shape[2])
                ]
                moments.update(observed.trace, per_seed)
        matrix = moments.matrix
    matrix.diagonal().add_(fit.delta)
    return (DenseBlock.factorise(layout, matrix),)


def _check_size(layout: Layout, device: torch.device) -> None:
    needed, free = dense_bytes(layout.num_params), available_bytes(device)
    if needed > free:
        raise PosteriorError(
            f"a full precision that fits in the free {free / 2**30:.1f} GiB",
            f"{layout.num_params:,} parameters, which need {needed / 2**30:.1f} GiB",
            'use structure="kronecker" or "last_layer"',
        )


def _full(fit: Fit) -> tuple[Block, ...]:
    return _dense(fit, list(fit.parameters))


def _full_hessian_first(fit: Fit) -> tuple[Block, ...]:
    """The exact Hessian where it is safely positive definite, else the Gauss-Newton matrix."""
    layout = Layout.of({name: p.detach() for name, p in fit.parameters.items()})
    try:
        matrix = Hessian(fit.session, layout).matrix()
    except RuntimeError as error:  # an operation without a second derivative
        pass_on(error)
        return _full(fit)
    matrix.diagonal().add_(fit.delta)
    if not is_safely_definite(matrix, fit.delta):
        return _full(fit)
    fit.curvature = "hessian"
    return (DenseBlock.factorise(layout, matrix),)


def _low_rank(fit: Fit) -> tuple[Block, ...]:
    block, record = fit_low_rank(fit.session, fit.delta, fit.curvature, fit.seed)
    fit.record = {"low_rank": record}
    return (block,)


def _low_rank_hessian_first(fit: Fit) -> tuple[Block, ...]:
    """The exact Hessian where it is safely positive definite, else Kronecker factors."""
    most = affordable_directions(fit.session.model, fit.session.batches)
    try:
        block, record = fit_low_rank(fit.session, fit.delta, "hessian", fit.seed, most)
        definite = float(block.inside.min()) > SMALLEST_SHARE * fit.delta
    except (RuntimeError, PosteriorError) as error:  # no second derivative, or not definite
        pass_on(error)
        definite = False
    if not definite:
        fit.structure = "kronecker"
        return _kronecker(fit)
    fit.curvature, fit.record = "hessian", {"low_rank": record}
    return (block,)


def _last_layer(fit: Fit) -> tuple[Block, ...]:
    """The layer whose result is the model's output, or comes last before it."""
    first = next(fit.session.passes("curvature"))
    with torch.no_grad():
        gradients = first.trace.gradients(first.residual)
    used = [s for s, g in zip(first.trace.sites, gradients, strict=True) if g is not None]
    owner = used[-1].names[-1].rpartition(".")[0]
    reaching = {name for site in used for name in site.names}
    names = [n for n in fit.parameters if n.rpartition(".")[0] == owner and n in reaching]
    return _dense(fit, names)


STRUCTURES: dict[str, FitBlocks] = {
    "isotropic": _isotropic,
    "diagonal": _diagonal,
    "kronecker": _kronecker,
    "ekfac": _ekfac,
    "low_rank": _low_rank,
    "full": _full,
    "last_layer": _last_layer,
}
