"""Posteriors of trainings that were stopped, against dense references and real trainings."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import engram
from engram.errors import ArgumentError, ModelMismatchError, PosteriorError, TrainingError
from engram.sensitivity.estimators import default_estimator

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
    at_end = default_estimator(posterior)  # the walk along the record is not saved
    result = engram.sensitivities(model, data, posterior, estimator=at_end, progress=False)
    assert result.loo_loss.isfinite().all()
    read = engram.load(posterior.save(tmp_path))
    assert read.training is None
    assert read.stopped
    assert "its record is not loaded: the end alone" in repr(read)
    with pytest.warns(UserWarning, match="record"):
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
    stopped = engram.laplace(model, data, training=training, progress=False)
    with pytest.raises(PosteriorError, match="that of a training that was stopped"):
        engram.calibrate(model, data, stopped, progress=False)


def test_a_long_training_has_the_posterior_of_its_minimum() -> None:
    model, data = net(), examples()
    training = trained(model, data, sgd)
    named = training.of(model)
    prior = named.prior_precision(len(data[0]))["0.weight"].item()
    assert prior == pytest.approx(0.6)
    guess = engram.Training.guess(model, learning_rate=1e9, steps=100, weight_decay=0.01)
    for structure in ("full", "kronecker", "ekfac", "diagonal", "low_rank"):
        long = engram.laplace(model, data, structure=structure, training=guess, progress=False)
        minimum = engram.laplace(
            model, data, structure=structure, prior_precision=prior, progress=False
        )
        torch.testing.assert_close(dense(long), dense(minimum), rtol=1e-6, atol=1e-6)
        assert long.prior_precision == pytest.approx(prior)
        assert long.settings["training"] == "guessed 100 steps of SGD"


def test_a_given_prior_is_in_place_of_the_weight_decay() -> None:
    model, data = net(), examples()
    training = trained(model, data, sgd)
    usual, given = (
        engram.laplace(
            model, data, structure="full", training=training, prior_precision=delta, progress=False
        )
        for delta in ("auto", 5.0)
    )
    assert (usual.settings["prior_precision"], given.settings["prior_precision"]) == (
        "of the weight decay",
        "given",
    )
    assert given.prior_precision == pytest.approx(5.0)
    added = dense(given) - dense(usual)
    torch.testing.assert_close(added, (5.0 - 0.6) * torch.eye(len(added)).double())


def test_structures_agree_where_the_curvature_is_diagonal() -> None:
    model = nn.Linear(3, 1, bias=False).double()
    x = torch.diag(torch.tensor([1.0, 2.0, 3.0])).double().repeat(4, 1)
    data = (x, torch.ones(12, 1).double())
    training = trained(model, data, adamw, loss=nn.functional.mse_loss)
    found = [
        dense(
            engram.laplace(
                model,
                data,
                likelihood="gaussian",
                structure=structure,
                training=training,
                progress=False,
            )
        )
        for structure in ("full", "kronecker", "diagonal")
    ]
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


def normalised(affine: bool = True) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3, affine=affine), nn.Tanh()]
    return nn.Sequential(*layers, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(12, 3)).double()


def solved_deviation(model: nn.Module, data: Data, posterior: engram.Posterior) -> Tensor:
    """J S^-1 J' e, one example after the other by autograd."""
    found = []
    for x, y in zip(*data, strict=True):
        outputs = model(x[None])[0]
        residual = outputs.softmax(0) - nn.functional.one_hot(y, 3)
        names = {n: model.get_parameter(n) for n in posterior.names}

        def pulled(vector: Tensor) -> dict[str, Tensor]:
            parts = torch.autograd.grad(outputs, list(names.values()), vector, retain_graph=True)  # noqa: B023
            return dict(zip(names, parts, strict=True))  # noqa: B023

        step = posterior.solve(pulled(residual.detach()))
        rows = [pulled(torch.eye(3).double()[k]) for k in range(3)]
        found.append(torch.stack([sum((r[n] * step[n]).sum() for n in names) for r in rows]))  # type: ignore[misc]
    return torch.stack(found)


@pytest.mark.parametrize("structure", ["kronecker", "ekfac", "diagonal", "full"])
def test_a_bias_before_batch_normalisation_is_fixed(structure: str) -> None:
    model, (_, y) = normalised(), examples(24)
    data = (torch.randn(24, 1, 4, 4, dtype=torch.float64), y)
    training = trained(model.train(), data, sgd)
    model.eval()
    posterior = engram.laplace(model, data, structure=structure, training=training, progress=False)
    assert set(posterior.mean) - set(posterior.names) == {"0.bias"}
    result = engram.sensitivities(model, data, posterior, estimator="linear", progress=False)
    expected = solved_deviation(model, data, posterior)
    torch.testing.assert_close(result.deviation, expected, rtol=1e-6, atol=1e-9)


def test_the_curvature_is_that_of_training_with_dropout() -> None:
    """The moments of inputs after dropout are a a' + p / (1 - p) diag(a^2), in expectation."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.3), nn.Linear(3, 1, bias=False)).double()
    x = torch.tensor([[1.0, 2.0, -1.0]]).double().repeat(20000, 1)
    data = (x, torch.zeros(20000, 1).double())
    training = trained(model, data, sgd, 2, nn.functional.mse_loss)
    model.eval()
    state, moment = torch.get_rng_state(), x[0].outer(x[0])
    expected = 20000 * (moment + 0.3 / 0.7 * torch.diag(moment.diagonal()))
    named = training.of(model)
    prior = 20000 * (1 + named.decay["1.weight"]) / named.time["1.weight"] * torch.eye(3)
    for structure in ("full", "kronecker"):
        found = engram.laplace(
            model,
            data,
            likelihood="gaussian",
            structure=structure,
            training=training,
            progress=False,
        )
        error = (dense(found) - prior - expected) / expected.norm()
        assert error.abs().max() < 0.02
    assert torch.equal(torch.get_rng_state(), state)
    assert not model[0].training


def test_a_training_that_was_stopped_is_not_told_to_go_on() -> None:
    model, data = net(), examples()
    training = trained(model, data, adamw)
    posterior = engram.laplace(
        model, data, structure="kronecker", training=training, progress=False
    )
    verdict = engram.sensitivities(model, data, posterior, progress=False).verdict
    assert not {"stopped", "convergence"} & {reason.signal for reason in verdict.reasons}
    assert 0 < verdict.size.value < math.inf
    bare = engram.sensitivities(model, data, posterior, diagnostics=False, progress=False).verdict
    assert "stopped" in [reason.signal for reason in bare.reasons]
    assert "subsets=64" in repr(bare)
