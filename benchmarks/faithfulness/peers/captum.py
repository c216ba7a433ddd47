"""captum: TracIn self-influence at the trained net."""

from __future__ import annotations

import copy

from captum.influence import TracInCP, TracInCPFast
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.faithfulness.estimates import Estimate, Method
from benchmarks.faithfulness.truths import Problem

BATCH_SIZE = 40


def fast(problem: Problem) -> Estimate:
    """Squared gradient norm of the last layer."""
    model = copy.deepcopy(problem.model)
    return _self_influence(TracInCPFast(model, model[-1], _left_out(problem), **_common()))


def every_layer(problem: Problem) -> Estimate:
    """Squared gradient norm of all layers."""
    model = copy.deepcopy(problem.model)
    return _self_influence(
        TracInCP(model, _left_out(problem), sample_wise_grads_per_batch=True, **_common())
    )


def _common() -> dict[str, object]:
    return {
        "checkpoints": ["trained"],
        "checkpoints_load_func": lambda model, checkpoint: 1.0,  # the weights are there already
        "loss_fn": nn.CrossEntropyLoss(reduction="sum"),
        "batch_size": BATCH_SIZE,
    }


def _left_out(problem: Problem) -> TensorDataset:
    return TensorDataset(problem.inputs[problem.left_out], problem.targets[problem.left_out])


def _self_influence(tracin: TracInCP | TracInCPFast) -> Estimate:
    return Estimate(tracin.self_influence().detach())


METHODS: dict[str, Method] = {"captum, TracInCPFast": fast, "captum, TracInCP": every_layer}
