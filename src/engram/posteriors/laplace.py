"""Laplace posteriors: the precision is the curvature at the trained model, plus the prior's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engram.batches import Data
from engram.curvature.hessian import hessian
from engram.curvature.kronecker import KroneckerFactors
from engram.curvature.moments import OuterMoments, SquareMoments
from engram.curvature.seeds import check_curvature, seeds
from engram.engine.prepare import device_of
from engram.engine.session import Observed, Session, available_bytes, session
from engram.errors import ArgumentError, PosteriorError
from engram.likelihoods import Likelihood
from engram.parameters import Layout, Named, trainable
from engram.posteriors.affordable import (
    default_structure,
    dense_bytes,
    hessian_is_affordable,
    is_safely_definite,
)
from engram.posteriors.blocks import Block, DenseBlock, EigenBlock, diagonal_block
from engram.posteriors.gaussian import Posterior, check_prior_precision
from engram.posteriors.tolerance import chosen_tolerance, sampled_share, within
from engram.precision import wide

Gradients = Sequence[Tensor | None]


def laplace(
    model: nn.Module,
    data: Data,
    *,
    likelihood: str | Likelihood = "categorical",
    structure: str | None = None,
    prior_precision: float = 1.0,
    curvature: str | None = None,
    tolerance: float | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Posterior:
    r"""The Gaussian posterior at a trained model, :math:`S = \sum_i J_i' \Lambda_i J_i + \delta I`.

    Without a structure and a curvature the most faithful way is taken that costs seconds: the full
    matrix up to N P^2 = 2e10 and P = 6000, of the exact Hessian where that is positive definite and
    affordable (weights used once per example), else of the Gauss-Newton matrix; Kronecker factors
    above. The posterior's ``structure`` and ``settings["curvature"]`` say what it was.

    Args:
        model: trained; it is not changed.
        data: the training data.
        likelihood: a name or an object.
        structure: ``isotropic``, ``diagonal``, ``kronecker`` (K-FAC), ``ekfac`` (K-FAC with
            eigenvalues corrected, two passes), ``full``, or ``last_layer`` (full over it).
        prior_precision: delta of the regulariser delta/2 |theta|^2 on the sum of the losses.
        curvature: ``ggn`` exact, ``fisher`` with one sampled label per example, ``empirical``, or
            ``hessian`` (exact Hessian; ``full`` and ``last_layer``; an error where it is not
            positive definite). With a structure, ``ggn`` if not given.
        tolerance: how far an average example's sensitivity may change for speed. Eigenvalues of
            wide Kronecker factors are merged, wide diagonals at one position are taken as a short
            sum of products, and of the exact curvature the classes with the last 3 tolerance of
            the outputs' variance are sampled (not in ``full``, ``last_layer``). If not given, 0.03
            in single precision and 0, everything exact, in double.
        batch_size: most examples at a time; chosen from the free memory if not given.
        seed: of the sampled labels.
        progress: show a bar when it takes longer than a few seconds.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> data = (torch.randn(20, 3), torch.randint(0, 2, (20,)))
        >>> laplace(model, data, structure="diagonal", prior_precision=2.0)
        Posterior(diagonal, 8 parameters, N=20, prior_precision=2)
    """
    prior_precision = check_prior_precision(prior_precision)
    if curvature is not None:
        check_curvature(curvature)
    tolerance = chosen_tolerance(tolerance, model)
    undecided = structure is None and curvature is None
    if structure is None:
        structure = "full" if curvature == "hessian" else default_structure(model, data)
    fit_blocks = STRUCTURES.get(structure) if isinstance(structure, str) else None
    if fit_blocks is None:
        raise ArgumentError(
            f"structure to be one of {', '.join(STRUCTURES)}", repr(structure), 'use "kronecker"'
        )
    if curvature == "hessian" and structure not in ("full", "last_layer"):
        raise ArgumentError(
            'structure "full" or "last_layer" with curvature="hessian"',
            repr(structure),
            'use curvature="ggn" for the other structures',
        )
    with session(model, data, likelihood, batch_size, progress) as opened:
        fit = Fit(opened, prior_precision, curvature or "ggn", seed, tolerance)
        if undecided and structure == "full" and hessian_is_affordable(opened):
            fit_blocks = _full_hessian_first
        blocks = within(fit_blocks(fit), prior_precision, tolerance)
        mean = {name: p.detach().clone() for name, p in trainable(model).items()}
        settings: dict[str, Any] = {
            "method": "laplace",
            "curvature": fit.curvature,
            "likelihood": repr(opened.likelihood),
            "tolerance": tolerance,
            "seed": seed,
        }
        num_data = opened.batches.num_data
    return Posterior(structure, mean, blocks, prior_precision, num_data, settings)


class Fit:
    """One fit under way: the session and its settings."""

    def __init__(
        self, session: Session, delta: float, curvature: str, seed: int, tolerance: float = 0.0
    ) -> None:
        self.session, self.delta, self.curvature, self.seed = session, delta, curvature, seed
        self.sampled_share = sampled_share(tolerance)
        self.parameters = trainable(session.model)
        self.dtype = next(iter(self.parameters.values())).dtype

    def passes(self, description: str, each: Callable[[Observed, Gradients, int], None]) -> None:
        """Call ``each`` with the gradients of every output vector of every batch."""
        generator = torch.Generator(device=device_of(self.session.model)).manual_seed(self.seed)
        for observed in self.session.passes(description):
            vectors = seeds(
                observed, self.session.likelihood, self.curvature, generator, self.sampled_share
            )
            with torch.no_grad():
                for r in range(vectors.shape[2]):
                    each(observed, observed.trace.arranged(vectors[:, :, r].contiguous()), r)

    def square_moments(self, names: set[str], blocks: Sequence[EigenBlock] = ()) -> SquareMoments:
        """Squared gradients of these parameters over the data."""
        moments = SquareMoments(blocks)
        self.passes("curvature", lambda o, g, r: moments.update(o.trace, g, names))
        return moments

    def diagonal(self, moments: SquareMoments, names: Sequence[str]) -> tuple[EigenBlock, ...]:
        """Diagonal blocks; a parameter that no output depends on keeps the prior's precision."""
        blocks = []
        for name in names:
            zeros = wide(torch.zeros_like(self.parameters[name]))
            precision = moments.by_name.get(name, zeros) + self.delta
            blocks.append(diagonal_block(name, precision.to(self.dtype)))
        return tuple(blocks)


def _diagonal(fit: Fit) -> tuple[Block, ...]:
    names = list(fit.parameters)
    return fit.diagonal(fit.square_moments(set(names)), names)


def _isotropic(fit: Fit) -> tuple[Block, ...]:
    moments = fit.square_moments(set(fit.parameters))
    trace = sum(float(m.sum()) for m in moments.by_name.values())
    value = trace / sum(p.numel() for p in fit.parameters.values()) + fit.delta
    return tuple(
        diagonal_block(name, torch.full_like(p.detach(), value))
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
) -> tuple[tuple[EigenBlock, ...], tuple[EigenBlock, ...]]:
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
        EigenBlock(
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
        matrix = hessian(fit.session, layout)
    else:
        moments = OuterMoments(layout, device)
        generator = torch.Generator(device=device).manual_seed(fit.seed)
        for observed in fit.session.passes("curvature"):
            vectors = seeds(observed, fit.session.likelihood, fit.curvature, generator)
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
        matrix = hessian(fit.session, layout)
    except RuntimeError:  # an operation without a second derivative
        return _full(fit)
    matrix.diagonal().add_(fit.delta)
    if not is_safely_definite(matrix, fit.delta):
        return _full(fit)
    fit.curvature = "hessian"
    return (DenseBlock.factorise(layout, matrix),)


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


STRUCTURES: dict[str, Callable[[Fit], tuple[Block, ...]]] = {
    "isotropic": _isotropic,
    "diagonal": _diagonal,
    "kronecker": _kronecker,
    "ekfac": _ekfac,
    "full": _full,
    "last_layer": _last_layer,
}
