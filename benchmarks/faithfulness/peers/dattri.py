"""dattri: influence of an example on its own loss, the diagonal of all pairs."""

from __future__ import annotations

import copy

import torch
from dattri.algorithm.influence_function import IFAttributorCG, IFAttributorEKFAC
from dattri.task import AttributionTask
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.faithfulness.estimates import Estimate, Method
from benchmarks.faithfulness.truths import Problem

ITERATIONS = 100


def ekfac(problem: Problem) -> Estimate:
    """EK-FAC, which knows linear layers only."""
    return _self_influence(
        problem, IFAttributorEKFAC(_task(problem), device="cpu", damping=problem.decay)
    )


def conjugate_gradients(problem: Problem) -> Estimate:
    """The exact Hessian by conjugate gradients."""
    attributor = IFAttributorCG(
        _task(problem),
        device="cpu",
        max_iter=ITERATIONS,
        tol=1e-9,
        regularization=problem.decay,
    )
    return _self_influence(problem, attributor)


def _task(problem: Problem) -> AttributionTask:
    model = copy.deepcopy(problem.model)

    def loss(parameters: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        if targets.dim() == 0:  # one example at a time, as it comes out of vmap
            inputs, targets = inputs[None], targets[None]
        return functional.cross_entropy(functional_call(model, parameters, inputs), targets)

    return AttributionTask(loss_func=loss, model=model, checkpoints=model.state_dict())


def _self_influence(problem: Problem, attributor: IFAttributorEKFAC | IFAttributorCG) -> Estimate:
    """g' (H + delta / N)^-1 g / N."""
    torch.manual_seed(0)
    everything = TensorDataset(*problem.data)
    attributor.cache(DataLoader(everything, batch_size=len(everything)))
    chosen = TensorDataset(problem.inputs[problem.left_out], problem.targets[problem.left_out])
    loader = DataLoader(chosen, batch_size=len(chosen))
    with torch.no_grad():
        pairs = attributor.attribute(loader, loader)
    return Estimate.of_influence(pairs.detach().diagonal() / len(everything))


METHODS: dict[str, Method] = {
    "dattri, EK-FAC (Linear only)": ekfac,
    "dattri, CG": conjugate_gradients,
}
