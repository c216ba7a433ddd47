"""Posteriors of trainings that were stopped, against dense references and real trainings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import engram
from engram.errors import ArgumentError, ModelMismatchError, TrainingError

Data = tuple[Tensor, Tensor]
STRUCTURES = ["full", "kronecker", "ekfac", "diagonal", "isotropic", "last_layer", "low_rank"]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def examples(count: int = 60) -> Data:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 5, dtype=torch.float64, generator=generator)
    return x, torch.randint(3, (count,), generator=generator)


def trained(
    model: nn.Module,
    data: Data,
    make: Callable[[nn.Module], Optimizer],
    steps: int = 40,
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
) -> engram.Training:
    optimizer = make(model)
    training = engram.record(optimizer, model)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(data[0]), data[1]).backward()
        optimizer.step()
    training.stop()
    return training


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.5, weight_decay=0.01)


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def dense_reference(model: nn.Module, data: Data, training: engram.Training) -> Tensor:
    """The Gauss-Newton matrix by autograd, with prior N W / C and N / C."""
    parameters = dict(model.named_parameters())

    def outputs(flat: Tensor, x: Tensor) -> Tensor:
        parts = flat.split([p.numel() for p in parameters.values()])
        named = {n: v.view(p.shape) for (n, p), v in zip(parameters.items(), parts, strict=True)}
        return torch.func.functional_call(model, named, x)

    flat = torch.cat([p.detach().flatten() for p in parameters.values()])
    jacobian = torch.autograd.functional.jacobian(lambda w: outputs(w, data[0]), flat)
    p = outputs(flat, data[0]).softmax(1)
    hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    matrix = torch.einsum("nkp,nkl,nlq->pq", jacobian, hessian, jacobian)
    named = training.of(model)
    time = torch.cat([named.time[n].expand(q.shape).flatten() for n, q in parameters.items()])
    decay = torch.cat([named.decay[n].expand(q.shape).flatten() for n, q in parameters.items()])
    size = len(data[0])
    return matrix + torch.diag(size * (decay + 1) / time)


def dense(posterior: engram.Posterior) -> Tensor:
    layout = posterior.layout
    identity = torch.eye(layout.num_params, dtype=torch.float64)
    return posterior.multiply_rows(identity, layout)


@pytest.mark.parametrize("make", [sgd, adamw])
def test_the_full_matrix_holds_weight_decay_and_training_time(
    make: Callable[[nn.Module], Optimizer],
) -> None:
    model, data = net(), examples()
    training = trained(model, data, make)
    posterior = engram.laplace(model, data, structure="full", training=training, progress=False)
    expected = dense_reference(model, data, training)
    torch.testing.assert_close(dense(posterior), expected, rtol=1e-6, atol=1e-6)
    found = engram.laplace(model, data, training=training, progress=False)
    assert (found.structure, found.curvature, found.exact) == ("full", "ggn", False)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_structure_holds_a_training_that_was_stopped(structure: str, tmp_path: Path) -> None:
    model, data = net(), examples()
    training = trained(model, data, adamw)
    posterior = engram.laplace(model, data, structure=structure, training=training, progress=False)
    assert posterior.stopped
    assert posterior.training is not None
    assert posterior.settings["training"] == "recorded 40 steps of AdamW"
    assert "training=recorded 40 steps of AdamW" in repr(posterior)
    wider = engram.laplace(model, data, structure=structure, prior_precision=1e-3, progress=False)
    assert posterior.log_det() > wider.log_det()
    result = engram.sensitivities(model, data, posterior, progress=False)
    assert result.loo_loss.isfinite().all()
    read = engram.load(posterior.save(tmp_path))
    assert read.training is None
    assert read.stopped
    assert repr(read) == repr(posterior)
    again = engram.sensitivities(model, data, read, progress=False)
    torch.testing.assert_close(again.loo_loss, result.loo_loss)


def test_what_is_no_record_is_refused() -> None:
    model, data = net(), examples()
    training = trained(model, data, sgd)
    with pytest.raises(ArgumentError, match=r"training= as engram\.record"):
        engram.laplace(model, data, training=0.1)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="Hessian is not positive definite"):
        engram.laplace(model, data, training=training, curvature="hessian")
    other = nn.Linear(5, 3).double()
    with pytest.raises(ModelMismatchError, match="the model of this record"):
        engram.laplace(other, data, training=training)
    nothing = engram.record(SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(TrainingError, match="at least one step"):
        engram.laplace(model, data, training=nothing)
