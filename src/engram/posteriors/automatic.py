"""What ``"auto"`` stands for: the most faithful structure and curvature that cost seconds."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from engram.core.arguments import is_auto
from engram.core.data.batches import Batches, call
from engram.core.errors import PosteriorError
from engram.core.memory import available_bytes
from engram.core.parameters import Layout, trainable
from engram.core.progress import announce
from engram.core.state.model import device_of, state_preserved
from engram.curvature.operators import Hessian
from engram.engine.refusals import named_failures, pass_on
from engram.engine.session import Session
from engram.linalg.block import Block
from engram.linalg.dense import DenseBlock
from engram.posteriors.low_rank_fit import LEADING, MOST_OWN, fit_low_rank
from engram.posteriors.structures import (
    STRUCTURES,
    Fit,
    FitBlocks,
    dense_bytes,
    fit_full,
    fit_kronecker,
)

FULL_WORK = 2e10  # N P^2 up to which the full matrix is the default
FULL_PARAMETERS = 6000  # beyond, factorising it takes more than seconds, however few the examples
OPERATIONS_PER_PARAMETER = 3  # of a forward pass; a weight that is used once costs two
SHARED_WORK = 5e9  # N P times the operations of a forward pass, where weights are used more often
LOW_RANK_WORK = 7.3e10  # N times the operations of a forward pass times the explored directions
LARGEST_BASIS = 3e10  # P times the square of their number, for making them orthogonal
FEWEST_DIRECTIONS = 500  # fewer leave too much of the examples' own curvature out
LOW_RANK_COPIES = 6  # of the basis that are held during a fit
SMALLEST_SHARE = 0.01  # of the prior precision that the Hessian may come down to


def default_structure(model: nn.Module, batches: Batches) -> str:
    """``full`` where that takes seconds and fits, else ``low_rank`` or ``kronecker``."""
    num_params = sum(p.numel() for p in trainable(model).values())
    quick = batches.num_data * num_params**2 <= FULL_WORK and num_params <= FULL_PARAMETERS
    if quick and dense_bytes(num_params) <= available_bytes(device_of(model)):
        return "full"
    return "low_rank" if affordable_directions(model, batches) else "kronecker"


def affordable_directions(model: nn.Module, batches: Batches) -> int:
    """In how many directions the Hessian can be explored, a pass over the data each; 0 if too few.

    Where every weight is used once per example that takes some ten seconds, where they are used at
    many positions up to a minute.
    """
    if not _has_quick_products(model):
        return 0
    num_params = sum(p.numel() for p in trainable(model).values())
    budget = 0.25 * available_bytes(device_of(model)) / (LOW_RANK_COPIES * 8 * num_params)
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
    chosen = default_structure(opened.model, opened.batches)
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
        matrix = Hessian(fit.session, layout).matrix()
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
