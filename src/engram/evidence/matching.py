"""Check that a result belongs to the model and the data that are passed with it."""

from __future__ import annotations

import torch
from torch import nn

from engram.core.data.batches import Batches, call
from engram.core.selection import spread
from engram.core.state.model import device_of, state_preserved
from engram.engine.refusals import named_failures
from engram.errors import LikelihoodError, ModelMismatchError
from engram.sensitivity.result import Result

EXAMPLES = 64  # spread over the data whose outputs are compared: rarer differences against time
# Difference over the largest output that rounding may make between two runs of one model: in double
# precision, and in all others, where kernels differ with the batch
DOUBLE_DIFFERENCE = 1e-8
DIFFERENCE = 1e-3


def check_outputs(result: Result, model: nn.Module, batches: Batches) -> None:
    """Raise unless targets and the model's outputs are the result's, on examples spread over it."""
    likelihood = result.basis.known_likelihood
    if not likelihood.keeps_outputs:
        raise LikelihoodError(
            "a result that has all outputs of its examples",
            f"one with {likelihood!r}, of which it has the given tokens alone",
            "hold single sequences against trainings without them by engram.retrain",
        )
    chosen = spread(batches.num_data, EXAMPLES)
    batch = batches.take(chosen)
    if not torch.equal(result.targets[chosen], batch.targets.cpu()):
        raise ModelMismatchError(
            "a result of this model on this data", "other targets", "pass the data it is about"
        )
    with state_preserved(model), torch.no_grad(), named_failures("on the data"):
        found = call(model, batch.to(device_of(model)).inputs).cpu()
    expected = result.outputs[chosen]
    share = DOUBLE_DIFFERENCE if found.dtype == torch.float64 else DIFFERENCE
    limit = share * (1 + result.outputs.abs().max())
    same = found.shape == expected.shape
    if not same or not bool(((found.to(expected) - expected).abs() <= limit).all()):
        raise ModelMismatchError(
            "a result of this model on this data",
            "other outputs",
            "compute the sensitivities again with the present model and data",
        )
