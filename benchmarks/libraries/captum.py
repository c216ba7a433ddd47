"""captum: TracIn at the trained net, gradients without a preconditioner."""

from __future__ import annotations

import copy

import torch
from captum.influence import TracInCP, TracInCPFast
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.libraries.case import Case, Way


def every_layer(case: Case) -> TracInCP:
    """Over all layers."""
    return TracInCP(
        copy.deepcopy(case.model),
        TensorDataset(*case.train),
        sample_wise_grads_per_batch=True,
        **_common(case),
    )


def last_layer(case: Case) -> TracInCPFast:
    """Over the last linear layer alone."""
    model = copy.deepcopy(case.model)
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    return TracInCPFast(model, last, TensorDataset(*case.train), **_common(case))


def _common(case: Case) -> dict[str, object]:
    return {
        "checkpoints": ["trained"],
        "checkpoints_load_func": lambda model, checkpoint: 1.0,  # the weights are there already
        "loss_fn": nn.CrossEntropyLoss(reduction="sum"),
        "batch_size": case.batch_size,
    }


def own(case: Case) -> Tensor:
    """Squared gradient norms."""
    return every_layer(case).self_influence().detach()


def own_fast(case: Case) -> Tensor:
    """Squared gradient norms of the last layer."""
    return last_layer(case).self_influence().detach()


def pairs(case: Case) -> Tensor:
    """Products of gradients."""
    return every_layer(case).influence(case.test).detach().mT


def pairs_fast(case: Case) -> Tensor:
    """Products of gradients of the last layer."""
    with torch.no_grad():
        return last_layer(case).influence(case.test).detach().mT


OWN: dict[str, Way] = {"captum, TracInCP": own, "captum, TracInCPFast (last layer)": own_fast}
PAIRS: dict[str, Way] = {"captum, TracInCP": pairs, "captum, TracInCPFast (last layer)": pairs_fast}
