r"""The exact curvature in the directions that leaving an example out moves the weights along.

Two kinds of directions are explored, a product with the curvature each. Those with the most
curvature of all data, by a Krylov space; and of every example the gradient that it adds by itself,
where most of its own curvature is not in the former:

.. math:: J_i' u_i \sqrt{u_i' \Lambda_i u_i}, \qquad u_i = e_i / |e_i|

What is left has the mean of the remaining trace, by random probes whose part in the explored
directions is known.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from engram.core.data.batches import Batches, call, flat_outputs
from engram.core.dtypes import widest
from engram.core.parameters import Layout, trainable
from engram.core.state.model import device_of
from engram.curvature.operators import CurvatureOperator, exact_curvature
from engram.engine.session import LARGEST_BATCH, Observed, Session
from engram.linalg.krylov import BlockKrylov
from engram.linalg.low_rank import LowRankBlock, check_definite

# Directions that are explored: a product with the curvature of all data each. With these the mean
# loss increase was 1.02 to 1.09 of the true one on three trainings (docs/decisions.md).
WHOLE = 512  # parameters up to which every direction is explored
LEADING = 256  # directions of the Krylov space
MOST_OWN = 950  # examples with a direction of their own
SMALLEST_OWN = 0.4  # curvature of an example that is not explored yet, over the prior's

PROBES = 16  # random directions that it starts from, and as many that the rest is estimated with
VECTORS = 32  # multiplied in one batched pass: more share its cost, and take memory


def fit_low_rank(
    opened: Session,
    prior_precision: float,
    kind: str,
    seed: int,
    most: int = LEADING + MOST_OWN,
    names: Collection[str] | None = None,
) -> tuple[LowRankBlock, dict[str, Any]]:
    """The block over all parameters, and a record of what was explored.

    Args:
        opened: model, data and likelihood.
        prior_precision: delta.
        kind: ``hessian`` or ``ggn``.
        seed: of the random directions.
        most: directions that are explored at most.
        names: of parameters, where others count as fixed.
    """
    parameters = trainable(opened.model)
    kept = parameters if names is None else names
    layout = Layout.of({name: p.detach() for name, p in parameters.items() if name in kept})
    device, size = device_of(opened.model), layout.num_params
    like = torch.empty(0, size, dtype=widest(device), device=device)
    multiply = _products(opened, layout, kind)
    explored = BlockKrylov(multiply, like, max(most, min(size, WHOLE)), opened.progress)
    generator = torch.Generator().manual_seed(seed)
    probes = torch.randn(2 * PROBES, size, generator=generator).to(like)
    if size <= WHOLE:
        explored.add(torch.eye(size, dtype=like.dtype, device=device))
    else:
        explored.krylov(multiply(probes[:PROBES]), LEADING)
        check_definite(explored.lowest() + prior_precision)  # before the larger part is explored
        explored.add(_own_directions(opened, layout, explored, prior_precision))
    values, basis, outside = explored.ritz()
    left = 0.0
    if explored.count < size:
        rest = probes[PROBES:]
        left = _remaining_trace(rest, multiply(rest), basis, outside)
    rest_precision = prior_precision + left / max(1, size - explored.count)
    record = {
        "rank": explored.count,
        "kept_trace": float(values.sum()),
        "remaining_trace": left,
        "rest": rest_precision,
    }
    if explored.count < size:  # what is left out matters far more than rounding, and it is faster
        values, basis, outside = values.float(), basis.float(), outside.float()
    inside = values + prior_precision
    return LowRankBlock(layout, basis, inside, outside, rest_precision), record


def _products(opened: Session, layout: Layout, kind: str) -> Callable[[Tensor], Tensor]:
    """M v for rows; in single precision where directions are left out, which matters far more."""
    size = min(opened.largest_part, LARGEST_BATCH)
    batches = Batches(opened.batches.data, max(1, size))
    quiet = replace(opened, progress=False, batches=batches, largest_part=VECTORS * size)
    exact = exact_curvature(kind, quiet, layout, peers=opened.peers)
    if layout.num_params > WHOLE and any(
        p.dtype == torch.float64 for p in trainable(opened.model).values()
    ):
        exact = _in_single(quiet, kind, layout) or exact
    kept = exact.parameters[0].dtype
    return lambda rows: (exact @ rows.to(kept)).to(rows)


def _in_single(opened: Session, kind: str, layout: Layout) -> CurvatureOperator | None:
    """None for a model that cannot be run in single precision."""
    first = opened.batches.take(torch.zeros(1, dtype=torch.long)).to(device_of(opened.model))
    try:
        model = Float32Copy(opened.model)
        call(model, first.inputs)
    except (RuntimeError, TypeError):  # it cannot be copied, or double precision is written into it
        return None
    layout = Layout(tuple(f"inner.{name}" for name in layout.names), layout.shapes)
    own = replace(opened, engine=replace(opened.engine, model=model))
    return exact_curvature(kind, own, layout, peers=opened.peers)


def _own_directions(
    opened: Session, layout: Layout, explored: BlockKrylov, prior_precision: float
) -> Tensor:
    """What single examples add outside the basis, largest first, [A, P]."""
    kept, room = explored.rows.new_empty(0, layout.num_params), explored.room
    for observed in opened.passes("own curvature"):
        with torch.no_grad():
            rows = observed.trace.own_gradient_rows(_own_seed(observed, opened), layout)
            new = explored.beyond(rows.to(kept))
        large = new.square().sum(1) > SMALLEST_OWN * prior_precision
        kept = torch.cat([kept, new[large]])
        if len(kept) > room:
            kept = kept[kept.square().sum(1).topk(room).indices]
    return kept[kept.square().sum(1).argsort(descending=True)]


def _own_seed(observed: Observed, opened: Session) -> Tensor:
    """u sqrt(u' Lambda u), [B, K]; 0 where there is no error, or no curvature."""
    error = observed.residual
    weighted = opened.likelihood.hessian_times(observed.outputs, observed.targets, error)
    curvature = (error * weighted).sum(1).clamp(min=0).sqrt()
    square = error.square().sum(1)
    scale = torch.where(square > 0, curvature / square, torch.zeros_like(square))
    return error * scale[:, None]


def _remaining_trace(probes: Tensor, images: Tensor, basis: Tensor, outside: Tensor) -> float:
    """Trace of the curvature outside the basis, at least 0; probes [M, P] and M times them."""
    kept = probes @ basis
    beyond = probes - kept @ basis.mT
    forms = (beyond * images).sum(1) - ((beyond @ outside) * kept).sum(1)
    return max(0.0, float(forms.mean()))


class Float32Copy(nn.Module):
    """A copy of a model in single precision that takes and returns what the model does.

    For products that need no more: they are several times faster than in double precision.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1).double()
        >>> Float32Copy(model)(torch.ones(3, 2, dtype=torch.float64)).dtype, model.weight.dtype
        (torch.float64, torch.float64)
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = copy.deepcopy(model).float()
        self.train(model.training)

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """Outputs in double precision."""
        args = [_single(value) for value in inputs]
        kwargs = {name: _single(value) for name, value in named.items()}
        return flat_outputs(self.inner(*args, **kwargs)).double()


def _single(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
