"""pyDVL: EK-FAC for linear layers."""

from __future__ import annotations

import copy

import torch
from pydvl.influence.torch import EkfacInfluence
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.libraries.case import Case, Way


def pairs(case: Case) -> Tensor:
    """g' (F + delta / N)^-1 g."""
    torch.manual_seed(0)
    influence = EkfacInfluence(
        copy.deepcopy(case.model), update_diagonal=True, hessian_regularization=case.damping
    ).fit(DataLoader(TensorDataset(*case.train), batch_size=case.batch_size))
    found = [
        influence.influences(*case.test, inputs, targets).detach()
        for inputs, targets in zip(*(t.split(case.batch_size) for t in case.train), strict=True)
    ]
    return torch.cat(found, dim=1).mT


PAIRS: dict[str, Way] = {"pyDVL, EK-FAC (linear layers)": pairs}
