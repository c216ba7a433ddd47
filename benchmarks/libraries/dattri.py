"""dattri: EK-FAC for linear layers, TRAK, TracIn."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from dattri.algorithm.influence_function import IFAttributorEKFAC
from dattri.algorithm.tracin import TracInAttributor
from dattri.algorithm.trak import TRAKAttributor
from dattri.task import AttributionTask
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.libraries.case import Case, Way, summed_loss

DIMENSIONS = 512  # onto which TRAK projects, dattri's own default


Loss = Callable[[dict[str, Tensor], tuple[Tensor, Tensor]], Tensor]


def mean_loss(case: Case, model: nn.Module) -> Loss:
    """Of a batch, or of one example as it comes out of vmap."""
    one = case.train[1].dim() - 1

    def loss(parameters: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        if targets.dim() == one:
            inputs, targets = inputs[None], targets[None]
        return summed_loss(functional_call(model, parameters, inputs), targets) / len(targets)

    return loss


def task(case: Case) -> AttributionTask:
    """What every attributor is made of."""
    model = copy.deepcopy(case.model)
    return AttributionTask(
        loss_func=mean_loss(case, model), model=model, checkpoints=model.state_dict()
    )


def ekfac(case: Case) -> Tensor:
    """g' (F + delta / N)^-1 g over the linear layers."""
    attributor = IFAttributorEKFAC(task(case), device="cpu", damping=case.damping)
    return _cached(case, attributor)


def trak(case: Case) -> Tensor:
    """Projected gradients and their Gram matrix."""
    loss = mean_loss(case, copy.deepcopy(case.model))

    def correct(parameters: dict[str, Tensor], example: tuple[Tensor, Tensor]) -> Tensor:
        return torch.exp(-loss(parameters, example))

    attributor = TRAKAttributor(
        task(case),
        correct,
        projector_kwargs={"proj_dim": DIMENSIONS},
        device="cpu",
        regularization=case.damping,
    )
    return _cached(case, attributor)


def tracin(case: Case) -> Tensor:
    """Products of gradients at the end."""
    attributor = TracInAttributor(
        task(case), weight_list=torch.ones(1), normalized_grad=False, device="cpu"
    )
    attributor.projector_kwargs = None
    with torch.no_grad():
        return attributor.attribute(_loader(case, case.train), _loader(case, case.test)).detach()


def _loader(case: Case, data: tuple[Tensor, Tensor]) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(*data), batch_size=case.batch_size)


def _cached(case: Case, attributor: IFAttributorEKFAC | TRAKAttributor) -> Tensor:
    torch.manual_seed(0)
    train = _loader(case, case.train)
    attributor.cache(train)
    with torch.no_grad():
        if isinstance(attributor, TRAKAttributor):  # the whole data is what it has cached
            return attributor.attribute(_loader(case, case.test)).detach()
        return attributor.attribute(train, _loader(case, case.test)).detach()


PAIRS: dict[str, Way] = {
    "dattri, EK-FAC (linear layers)": ekfac,
    "dattri, TRAK": trak,
    "dattri, TracIn at the end": tracin,
}
