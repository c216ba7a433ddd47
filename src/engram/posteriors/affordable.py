"""What `laplace` takes when nothing is asked for: the most faithful way that costs seconds."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from engram.batches import Batches, Data, call
from engram.engine.prepare import device_of
from engram.engine.session import Session, available_bytes
from engram.parameters import trainable

FULL_WORK = 2e10  # N P^2 up to which the full matrix is the default
FULL_PARAMETERS = 6000  # beyond, factorising it takes more than seconds, however few the examples
OPERATIONS_PER_PARAMETER = 3  # of a forward pass; a weight that is used once costs two
SHARED_WORK = 5e9  # N P times the operations of a forward pass, where weights are used more often
SMALLEST_SHARE = 0.01  # of the prior precision that the Hessian may come down to
COPIES = 3  # of a dense matrix that are held during a fit


def dense_bytes(num_params: int) -> int:
    """Memory that the fit of a full matrix takes."""
    return COPIES * 8 * num_params**2


def default_structure(model: nn.Module, data: Data) -> str:
    """``full`` where that takes seconds and fits, else ``kronecker``."""
    num_params = sum(p.numel() for p in trainable(model).values())
    work = Batches(data, 1).num_data * num_params**2
    quick = work <= FULL_WORK and num_params <= FULL_PARAMETERS
    fits = dense_bytes(num_params) <= available_bytes(device_of(model))
    return "full" if quick and fits else "kronecker"


def hessian_is_affordable(session: Session) -> bool:
    """Whether the exact Hessian, P passes over the data, costs about what the full GGN does.

    So it does where every weight is used once per example. Convolutions and sequences use theirs
    at every position: only small ones are affordable.
    """
    num_params = sum(p.numel() for p in trainable(session.model).values())
    operations = _forward_operations(session)
    if operations <= OPERATIONS_PER_PARAMETER * num_params:
        return True
    return session.batches.num_data * num_params * operations <= SHARED_WORK


def _forward_operations(session: Session) -> int:
    """Multiplications and additions that the model takes for one example."""
    one = session.batches.take(torch.zeros(1, dtype=torch.long)).to(device_of(session.model))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call(session.model, one.inputs)
    return int(counter.get_total_flops())


def is_safely_definite(precision: Tensor, prior_precision: float) -> bool:
    """Whether all eigenvalues are above a small share of the prior's; no error if they are not.

    A smaller one is as good as zero: steps along it would be anything.
    """
    lowered = precision.clone()
    lowered.diagonal().sub_(SMALLEST_SHARE * prior_precision)
    factor, failed = torch.linalg.cholesky_ex(lowered)
    return not int(failed) and bool(torch.isfinite(factor).all())
