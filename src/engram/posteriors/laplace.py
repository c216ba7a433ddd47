"""Laplace posteriors: the precision is the curvature at the trained model, plus the prior's.

What ``"auto"`` stands for is decided here too, by counting operations before anything is fitted:
the most faithful structure and curvature that cost seconds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from engram.core.arguments import AUTO, is_auto, one_of, seed_number
from engram.core.data.batches import Batches, Data, call
from engram.core.memory import available_bytes, backing_off
from engram.core.parameters import Layout, check_module, trainable
from engram.core.processes.meeting import together
from engram.core.progress import announce
from engram.core.state.model import device_of, state_preserved
from engram.curvature.kinds import CURVATURES, Curvature
from engram.curvature.operators import Hessian
from engram.engine.refusals import named_failures, pass_on
from engram.engine.session import Session, session
from engram.errors import ArgumentError, PosteriorError
from engram.likelihoods import Likelihood
from engram.linalg.block import Block
from engram.linalg.dense import DenseBlock
from engram.posteriors.curved import check_curved
from engram.posteriors.fitting_prior import fitting_prior
from engram.posteriors.gaussian import Posterior, check_prior_precision
from engram.posteriors.low_rank_fit import LEADING, MOST_OWN, fit_low_rank
from engram.posteriors.stopped import Stopped, check_training
from engram.posteriors.structures import (
    OVER,
    STRUCTURES,
    Fit,
    FitBlocks,
    dense_bytes,
    fit_full,
    fit_kronecker,
)
from engram.posteriors.tolerance import chosen_tolerance, within
from engram.training.training import Training

# What "auto" may cost. Operations are multiplications and additions; the limits were chosen so that
# a fit takes seconds, some tens of seconds with a low rank, on two cores (docs/decisions.md).
FULL_WORK = 2e10  # N P^2 up to which the full matrix is the default
FULL_PARAMETERS = 6000  # P; beyond, factorising takes more than seconds, however few the examples
WALK_WORK = 4e11  # operations of a walk with full matrices up to which they are a record's default
WALK_STAGES = 4  # checkpoints of a walk: an eigendecomposition each, and Jacobians of all examples
EIGEN_WORK, JACOBIAN_WORK = 10, 6  # operations of these, over P^3 and over N K P^2
OPERATIONS_PER_PARAMETER = 3  # of a forward pass; a weight that is used once costs two
SHARED_WORK = 5e9  # N P times the operations of a forward pass, where weights are used more often
LOW_RANK_WORK = 7.3e10  # N times the operations of a forward pass times the explored directions
LARGEST_BASIS = 3e10  # P times the square of their number, for making them orthogonal
FEWEST_DIRECTIONS = 500  # fewer leave too much of the examples' own curvature out
LOW_RANK_COPIES = 6  # of the basis that are held during a fit
LOW_RANK_MEMORY_SHARE = 0.25  # of the free memory, for these copies
SMALLEST_SHARE = 0.01  # of the prior precision: Hessians with a smaller eigenvalue are refused


@backing_off
def laplace(
    model: nn.Module,
    data: Data,
    *,
    likelihood: str | Likelihood = "categorical",
    structure: str = AUTO,
    prior_precision: float | str = AUTO,
    curvature: str = AUTO,
    tolerance: float | str = AUTO,
    batch_size: int | str = AUTO,
    seed: int = 0,
    progress: bool = True,
    training: Training | None = None,
    across_ranks: bool = False,
) -> Posterior:
    r"""The Gaussian posterior at a trained model, :math:`S = \sum_i J_i' \Lambda_i J_i + \delta I`.

    ``"auto"`` for structure and curvature is the most faithful way that costs seconds: the full
    matrix up to N P^2 = 2e10 and P = 6000, of the exact Hessian where that is positive definite and
    affordable (weights used once per example), else of the Gauss-Newton matrix; above, the exact
    Hessian in up to 1206 directions, where it is positive definite and that takes some tens of
    seconds; else Kronecker factors. The posterior's ``structure`` and ``curvature`` say what it
    was.

    That is the posterior of a minimum. With the record of the ``training`` it is that of weights as
    training left them, :math:`S + N C^{-1}` with the training time C: stopping early is a prior of
    that precision around the first weights. ``"auto"`` takes no Hessian then.

    Args:
        model: trained; it is not changed.
        data: the training data.
        likelihood: a name or an object.
        structure: ``isotropic``, ``diagonal``, ``kronecker`` (K-FAC), ``ekfac`` (K-FAC with
            eigenvalues corrected, two passes), ``low_rank`` (exact in the directions that matter,
            found by products with the curvature), ``full``, or ``last_layer`` (full over it).
        prior_precision: delta of the regulariser delta/2 |theta|^2 on the sum of the losses, N
            times the weight decay of the mean loss. ``"auto"`` is the one that the weights fit
            best, by a pass over the data: at a minimum the very one of the training; with
            ``training`` it is that of the weight decay, as the optimizer applied it. Where the
            losses had a regulariser of their own, its delta is given here, in place of both.
        curvature: ``ggn`` exact, ``fisher`` with one sampled label per example, ``empirical``, or
            ``hessian`` (exact Hessian; ``full``, ``last_layer`` and ``low_rank``; an error where
            it is not positive definite). With a named structure ``"auto"`` is ``ggn``, and
            ``fisher`` for sequences of tokens (not in ``low_rank``).
        tolerance: how far an average example's sensitivity may change for speed. Eigenvalues of
            wide Kronecker factors are merged, wide diagonals at one position are taken as a short
            sum of products, and of the exact curvature the classes with the last 3 tolerance of
            the outputs' variance are sampled (not in ``full``, ``last_layer``, ``low_rank``).
            ``"auto"`` is 0.03 in single precision and 0, everything exact, in double.
        batch_size: most examples at a time; ``"auto"`` is what the free memory has room for.
        seed: of the sampled labels, and of the random directions of ``low_rank``.
        progress: show a bar when it takes longer than a few seconds.
        training: the record of :func:`engram.record`, or a guess of it. Parameters that training
            cannot move count as fixed.
        across_ranks: divide the examples among the processes of ``torch.distributed``, which must
            all make the call; each gets the whole posterior.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> data = (torch.randn(20, 3), torch.randint(0, 2, (20,)))
        >>> laplace(model, data, structure="diagonal", prior_precision=2.0)
        Posterior(diagonal, 8 parameters, N=20, prior_precision=2, curvature=ggn, ...)
    """
    check_module(model)
    given = None if is_auto(prior_precision) else check_prior_precision(prior_precision)
    seed = seed_number(seed)
    one_of("structure", structure, (AUTO, *STRUCTURES), 'use "auto"')
    one_of("curvature", curvature, (AUTO, *CURVATURES), 'use "auto"')
    _check_combination(structure, curvature, training is not None)
    tolerance = chosen_tolerance(tolerance, model)
    asked = {
        "structure": structure,
        "prior_precision": prior_precision,
        "curvature": curvature,
        "tolerance": tolerance,
        "seed": seed,
        "likelihood": likelihood,
        "training": training is not None,
    }
    only = None
    if training is None and structure in OVER:
        only = OVER[structure](model, Batches(data, 1))
    with (
        together(across_ranks, model, data, "laplace", asked) as peers,
        session(model, data, likelihood, batch_size, progress, peers=peers, only=only) as opened,
    ):
        if training is not None:
            check_training(training).check_data(opened.batches.num_data)
            stopped = Stopped.of(training, model, opened.batches.num_data, given)
            return fitted(opened, structure, stopped.base, curvature, tolerance, seed, stopped)
        if given is not None:
            return fitted(opened, structure, given, curvature, tolerance, seed)
        prior = fitting_prior(opened)
        return prior.noted(
            fitted(opened, structure, prior.prior_precision, curvature, tolerance, seed)
        )


def fitted(
    opened: Session,
    structure: str,
    prior_precision: float,
    curvature: str = AUTO,
    tolerance: float | str = AUTO,
    seed: int = 0,
    stopped: Stopped | None = None,
) -> Posterior:
    """The Laplace posterior of an opened model; arguments as for :func:`laplace`, checked there.

    Where training was ``stopped``, its own prior replaces the prior precision in the blocks.
    """
    tolerance = chosen_tolerance(tolerance, opened.model)
    sampled = opened.likelihood.samples_curvature and structure != "low_rank"  # which has products
    usual = "fisher" if sampled else "ggn"
    kind = usual if is_auto(curvature) else curvature
    if stopped is not None and is_auto(structure) and not walk_is_affordable(opened):
        structure = "kronecker"
    chosen, fit_blocks = chosen_fit(opened, structure, curvature if stopped is None else kind)
    fixed = None if stopped is None else stopped.fixed
    fit = Fit(opened, prior_precision, kind, seed, tolerance, fixed)
    blocks = fit_blocks(fit)
    if stopped is None:
        blocks = within(blocks, prior_precision, tolerance)
    else:
        blocks = stopped.with_time(blocks, prior_precision, tolerance)
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
        {name: p.detach().clone() for name, p in opened.trained.items()},
        blocks,
        prior_precision,
        opened.batches.num_data,
        settings,
        curvature=Curvature(fit.curvature),
        exact=fit.curvature == Curvature.HESSIAN,
        likelihood=opened.likelihood,
    )
    check_curved(opened, posterior)
    return posterior if stopped is None else stopped.noted(posterior)


def _check_combination(structure: str, curvature: str, stopped: bool) -> None:
    """ArgumentError for a structure or a record that the curvature does not exist for."""
    if curvature == "hessian" and stopped:
        raise ArgumentError(
            'curvature "ggn", "fisher" or "empirical" with training=',
            repr(curvature),
            'use curvature="ggn": short of a minimum the Hessian is not positive definite',
        )
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


def default_structure(model: nn.Module, batches: Batches) -> str:
    """``full`` where that takes seconds and fits, else ``low_rank`` or ``kronecker``."""
    num_params = sum(p.numel() for p in trainable(model).values())
    quick = batches.num_data * num_params**2 <= FULL_WORK and num_params <= FULL_PARAMETERS
    if quick and dense_bytes(num_params) <= available_bytes(device_of(model)):
        return "full"
    return "low_rank" if affordable_directions(model, batches) else "kronecker"


def walk_is_affordable(opened: Session) -> bool:
    """Whether going along a recorded training with full matrices takes seconds."""
    num_params = sum(p.numel() for p in trainable(opened.model).values())
    first = opened.observe(opened.batches.take(torch.zeros(1, dtype=torch.long)))
    jacobians = JACOBIAN_WORK * opened.batches.num_data * first.outputs.shape[1]
    first.trace.release()
    return WALK_STAGES * (EIGEN_WORK * num_params + jacobians) * num_params**2 <= WALK_WORK


def affordable_directions(model: nn.Module, batches: Batches) -> int:
    """In how many directions the Hessian can be explored, a pass over the data each; 0 if too few.

    Where every weight is used once per example that takes some ten seconds, where they are used at
    many positions up to a minute.
    """
    if not _has_quick_products(model):
        return 0
    num_params = sum(p.numel() for p in trainable(model).values())
    free = LOW_RANK_MEMORY_SHARE * available_bytes(device_of(model))
    budget = free / (LOW_RANK_COPIES * torch.float64.itemsize * num_params)
    budget = min(budget, (LARGEST_BASIS / num_params) ** 0.5, LEADING + MOST_OWN)
    if budget < FEWEST_DIRECTIONS:  # before the model is called at all
        return 0
    work = batches.num_data * max(1, _forward_operations(model, batches))
    budget = min(budget, LOW_RANK_WORK / work)
    return int(budget) if budget >= FEWEST_DIRECTIONS else 0


def _has_quick_products(model: nn.Module) -> bool:
    """Whether many products with the Hessian at once take what their operations suggest.

    For normalisations, recurrence, attention and convolutions of other dimensions the library may
    have no second derivative for many vectors at once; one by one they take far longer.
    """
    owners = [module for module in model.modules() if module._parameters]
    return all(isinstance(module, (nn.Linear, nn.Conv2d)) for module in owners)


def hessian_is_affordable(session: Session) -> bool:
    """Whether the exact Hessian, P passes over the data, costs about what the full GGN does.

    So it does where every weight is used once per example. Convolutions and sequences use theirs
    at every position: only small ones are affordable.
    """
    num_params = sum(p.numel() for p in trainable(session.model).values())
    operations = _forward_operations(session.model, session.batches)
    if operations <= OPERATIONS_PER_PARAMETER * num_params:
        return True
    return session.batches.num_data * num_params * operations <= SHARED_WORK


def _forward_operations(model: nn.Module, batches: Batches) -> int:
    """Multiplications and additions that the model takes for one example."""
    one = batches.take(torch.zeros(1, dtype=torch.long)).to(device_of(model))
    with (
        state_preserved(model),
        torch.no_grad(),
        named_failures("on the first example of the data"),
        FlopCounterMode(display=False) as counter,
    ):
        call(model, one.inputs)
    return int(counter.get_total_flops())


def is_safely_definite(precision: Tensor, prior_precision: float) -> bool:
    """Whether all eigenvalues are above a small share of the prior's; no error if they are not.

    A smaller one is as good as zero: steps along it would be anything.
    """
    lowered = precision.clone()
    lowered.diagonal().sub_(SMALLEST_SHARE * prior_precision)
    factor, failed = torch.linalg.cholesky_ex(lowered)
    return not int(failed) and bool(torch.isfinite(factor).all())


def chosen_fit(opened: Session, structure: str, curvature: str) -> tuple[str, FitBlocks]:
    """The structure that is asked for, or the one that ``"auto"`` stands for, and its fit."""
    if not is_auto(structure):
        return structure, STRUCTURES[structure]
    if curvature == "hessian":
        return "full", fit_full
    usual = default_structure(opened.model, opened.batches)
    chosen = str(opened.peers.agreed("structure", usual))
    if not is_auto(curvature):  # low rank pays with the Hessian and its rule only
        chosen = "kronecker" if chosen == "low_rank" else chosen
        return chosen, STRUCTURES[chosen]
    if chosen == "full" and hessian_is_affordable(opened):
        return chosen, _full_hessian_first
    if chosen == "low_rank":
        return chosen, _low_rank_hessian_first
    return chosen, STRUCTURES[chosen]


def _full_hessian_first(fit: Fit) -> tuple[Block, ...]:
    """The exact Hessian where it is safely positive definite, else the Gauss-Newton matrix."""
    layout = Layout.of({name: p.detach() for name, p in fit.parameters.items()})
    try:
        matrix = Hessian(fit.session, layout, peers=fit.session.peers).matrix()
    except RuntimeError as error:  # an operation without a second derivative
        pass_on(error)
        return fit_full(fit)
    matrix.diagonal().add_(fit.delta)
    if not is_safely_definite(matrix, fit.delta):
        return fit_full(fit)
    fit.curvature = "hessian"
    return (DenseBlock.factorise(layout, matrix),)


def _low_rank_hessian_first(fit: Fit) -> tuple[Block, ...]:
    """The exact Hessian where it is safely positive definite, else Kronecker factors."""
    opened = fit.session
    most = affordable_directions(opened.model, opened.batches)
    most = int(opened.peers.agreed("directions", most))
    announce(
        f"laplace: the exact Hessian in up to {most:,} directions, a pass over "
        f"{opened.batches.num_data:,} examples each, takes some tens of seconds; "
        'structure="kronecker" takes few passes',
        opened.progress,
    )
    try:
        block, record = fit_low_rank(fit.session, fit.delta, "hessian", fit.seed, most)
        definite = float(block.inside.min()) > SMALLEST_SHARE * fit.delta
    except (RuntimeError, PosteriorError) as error:  # no second derivative, or not definite
        pass_on(error)
        definite = False
    if not definite:
        fit.structure = "kronecker"
        return fit_kronecker(fit)
    fit.curvature, fit.record = "hessian", {"low_rank": record}
    return (block,)
