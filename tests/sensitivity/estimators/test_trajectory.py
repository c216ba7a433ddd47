"""The walk along recorded checkpoints, against dense matrices and against real trainings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional

import engram
from engram.core.arguments import AUTO
from engram.engine.gradient_accumulator import DiscardGradients
from engram.engine.session import session
from engram.errors import ArgumentError, PosteriorError
from engram.likelihoods import Categorical
from engram.sensitivity.estimators import chosen_estimator
from engram.sensitivity.estimators.base import Setting
from engram.sensitivity.estimators.trajectory import ESTIMATOR, STAGES, affordable_stages, level
from engram.training.training import Training
from engram.training.visits import Visits

NUM_DATA, STEPS = 24, 40


class Words(nn.Module):
    """An embedding, a layer at every position, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(7, 4), nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.mix(self.embed(tokens))).mean(1))
        return out


def mlp() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(NUM_DATA, 5)


def convolution() -> tuple[nn.Module, Tensor]:
    layers = (nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))
    return nn.Sequential(*layers), torch.randn(NUM_DATA, 2, 3, 3)


def words() -> tuple[nn.Module, Tensor]:
    return Words(), torch.randint(0, 7, (NUM_DATA, 3))


Make = Callable[[], tuple[nn.Module, Tensor]]


def trained(
    make: Make, optimizer: type[torch.optim.Optimizer], **given: float
) -> tuple[nn.Module, tuple[Tensor, Tensor], Training]:
    """A small net after some steps, in double precision, with its record."""
    torch.manual_seed(0)
    model, inputs = make()
    model = model.double()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    targets = torch.randint(0, 3, (NUM_DATA,))
    stepper = optimizer(model.parameters(), **given)
    training = engram.record(stepper, model)
    for _ in range(STEPS):
        batch = torch.randperm(NUM_DATA)[:8]
        stepper.zero_grad()
        functional.cross_entropy(model(inputs[batch]), targets[batch]).backward()
        stepper.step()
    return model.eval(), (inputs, targets), training


def dense_walk(setting: Setting, data: tuple[Tensor, Tensor]) -> Tensor:
    """The same recursion with Jacobians and whole vectors, one example after another."""
    inputs, targets = data
    assert setting.opened is not None
    end = setting.opened.model
    found = []
    for i in range(len(inputs)):
        carried: dict[tuple[str, ...], Tensor] = {}
        for stage in setting.walk:
            outputs, jacobian = _jacobian(stage.session.model, inputs[i])
            residual = outputs.softmax(0) - functional.one_hot(targets[i], len(outputs))
            for block in stage.bases.blocks:
                gradient = {n: torch.tensordot(residual, jacobian[n], 1) for n in block.names}
                drift = stage.whole[block.names]
                source = drift.gain * block.coordinates(gradient)
                old = carried.get(block.names, torch.zeros_like(source))
                carried[block.names] = drift.decay * old + source
        outputs, jacobian = _jacobian(end, inputs[i])
        moved = torch.zeros_like(outputs)
        for block in setting.walk[0].bases.blocks:
            for name, step in block.from_coordinates(carried[block.names]).items():
                moved += (jacobian[name] * step).flatten(1).sum(1)
        found.append(moved)
    return torch.stack(found)


def _jacobian(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    parameters = {n: p.detach() for n, p in model.named_parameters()}

    def outputs(given: dict[str, Tensor]) -> Tensor:
        result: Tensor = functional_call(model, given, (x[None],))[0]
        return result

    return outputs(parameters), jacrev(outputs)(parameters)


@pytest.mark.parametrize("make", [mlp, convolution, words])
@pytest.mark.parametrize(
    ("optimizer", "given"),
    [(torch.optim.SGD, {"lr": 0.3, "momentum": 0.5}), (torch.optim.AdamW, {"lr": 0.02})],
)
def test_the_walk_is_the_recursion_with_whole_vectors(
    make: Make, optimizer: type[torch.optim.Optimizer], given: dict[str, float]
) -> None:
    model, data, training = trained(make, optimizer, **given)
    posterior = engram.laplace(model, data, structure="kronecker", training=training)
    with session(model, data, "categorical", progress=False) as opened:
        setting = Setting(opened.likelihood, posterior, 0, DiscardGradients(), opened=opened)
        setting = ESTIMATOR.prepared(setting)
        assert len(setting.walk) > 1
        assert setting.opened is not None
        passes = setting.opened.passes("walk")
        found = torch.cat([ESTIMATOR(observed, setting).deviation for observed in passes])
        wanted = dense_walk(setting, data)
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)


def test_a_linear_model_trained_without_the_example() -> None:
    """Gradient descent on a linear regression: the estimate against really leaving it out."""
    torch.manual_seed(1)
    inputs = torch.randn(200, 4, dtype=torch.float64) * torch.tensor([3.0, 1.0, 0.3, 0.1])
    targets = inputs @ torch.ones(4, 1, dtype=torch.float64) + torch.randn(200, 1)

    def fitted(weights: Tensor) -> tuple[nn.Module, Training]:
        model = nn.Linear(4, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        stepper = torch.optim.SGD(model.parameters(), lr=0.01)
        training = engram.record(stepper, model)
        for _ in range(100):
            stepper.zero_grad()
            (weights * (model(inputs) - targets)[:, 0].square() / 2).mean().backward()
            stepper.step()
        return model, training

    everyone = torch.ones(200, dtype=torch.float64)
    model, training = fitted(everyone)
    posterior = engram.laplace(
        model, (inputs, targets), likelihood="gaussian", structure="kronecker", training=training
    )
    result = engram.sensitivities(model, (inputs, targets), posterior, progress=False)
    assert result.basis.estimator == "trajectory"
    chosen = list(range(0, 200, 20))
    true = []
    for i in chosen:
        weights = everyone.clone()
        weights[i] = 0
        without, _ = fitted(weights)
        true.append(float((without(inputs[i]) - model(inputs[i])).detach()))
    estimated = result.deviation[chosen, 0]
    torch.testing.assert_close(
        estimated, torch.tensor(true, dtype=torch.float64), rtol=0.06, atol=2e-4
    )


@pytest.mark.parametrize("structure", ["full", "kronecker"])
def test_trained_again_without_the_example(structure: str) -> None:
    """A small net, stopped early: the same first weights and batches, with one weight 0."""
    torch.manual_seed(2)
    inputs = torch.randn(60, 4, dtype=torch.float64)
    targets = (inputs[:, :2].sum(1) + 0.5 * torch.randn(60) > 0).long()

    def fitted(weights: Tensor) -> tuple[nn.Module, Training]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
        stepper = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        training = engram.record(stepper, model)
        for _ in range(15):
            for batch in torch.randperm(60).split(20):
                losses = functional.cross_entropy(
                    model(inputs[batch]), targets[batch], reduction="none"
                )
                stepper.zero_grad()
                (weights[batch] * losses).mean().backward()
                stepper.step()
        return model, training

    everyone = torch.ones(60, dtype=torch.float64)
    model, training = fitted(everyone)
    data = (inputs, targets)
    posterior = engram.laplace(model, data, structure=structure, training=training)
    result = engram.sensitivities(model, data, posterior, progress=False)
    assert result.basis.estimator == "trajectory"
    true = []
    for i in range(60):
        weights = everyone.clone()
        weights[i] = 0
        without, _ = fitted(weights)
        outputs = without(inputs[i : i + 1]).detach()
        true.append(float(functional.cross_entropy(outputs, targets[i : i + 1])))
    increase = torch.tensor(true) - result.loss
    moved = result.outputs + result.deviation  # at the end; loo_loss has the readouts before too
    estimated = functional.cross_entropy(moved, targets, reduction="none") - result.loss
    correlation = torch.corrcoef(torch.stack([estimated, increase]))[0, 1]
    assert correlation > {"full": 0.98, "kronecker": 0.9}[structure]
    bounds = {"full": (0.85, 1.15), "kronecker": (0.6, 1.6)}[structure]
    assert bounds[0] < estimated.mean() / increase.mean() < bounds[1]


def test_it_is_the_default_where_checkpoints_are_there() -> None:
    model, data, training = trained(mlp, torch.optim.SGD, lr=0.1)
    with_record = engram.laplace(model, data, structure="kronecker", training=training)
    assert chosen_estimator(AUTO, with_record) == "trajectory"
    plain = engram.laplace(model, data, structure="kronecker", prior_precision=1.0)
    assert chosen_estimator(AUTO, plain) == "downdated"
    with pytest.raises(ArgumentError, match="a recorded training and checkpoints"):
        engram.sensitivities(model, data, plain, estimator="trajectory")


def test_the_model_is_as_before() -> None:
    model, data, training = trained(convolution, torch.optim.AdamW, lr=0.02)
    posterior = engram.laplace(model, data, structure="kronecker", training=training)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    state = torch.get_rng_state()
    engram.sensitivities(model, data, posterior, progress=False)
    assert model.training
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[n], value) for n, value in model.state_dict().items())


def test_readouts_are_brought_to_the_level_of_the_last() -> None:
    readouts = torch.rand(10, 4) + 0.5
    assert level(readouts).mean().item() == pytest.approx(readouts[:, -1].mean().item())


def test_a_saved_posterior_goes_along_its_training_again(tmp_path: Path) -> None:
    """With its record the estimate is the one from before; without it, it says so."""
    model, data, training = trained(mlp, torch.optim.SGD, lr=0.3, momentum=0.5)
    posterior = engram.laplace(model, data, structure="kronecker", training=training)
    before = engram.sensitivities(model, data, posterior, progress=False)
    posterior.save(tmp_path / "posterior")
    training.save(tmp_path / "training")
    read = engram.load(tmp_path / "posterior")
    assert "its record is not loaded: the end alone" in repr(read)
    with pytest.warns(UserWarning, match="the estimate is that of the end alone"):
        end = engram.sensitivities(model, data, read, progress=False)
    assert end.basis.estimator != "trajectory"
    whole = read.with_training(engram.load(tmp_path / "training"), model)
    after = engram.sensitivities(model, data, whole, progress=False)
    assert after.basis.estimator == "trajectory"
    torch.testing.assert_close(after.loo_loss, before.loo_loss)


def test_a_posterior_of_a_minimum_has_no_record() -> None:
    model, data, training = trained(mlp, torch.optim.SGD, lr=0.3)
    posterior = engram.laplace(model, data, prior_precision=1.0)
    with pytest.raises(PosteriorError, match="fitted with training="):
        posterior.with_training(training, model)


def test_a_short_training_has_fewer_checkpoints() -> None:
    model, _, training = trained(mlp, torch.optim.SGD, lr=0.3)
    named = training.of(model)
    assert affordable_stages(named, NUM_DATA) == STAGES  # nothing is known of its epochs
    outputs = torch.zeros(NUM_DATA, 3, dtype=torch.float64)
    training.stop()
    visits = Visits(Categorical())
    for epochs, count in ((1, 1), (5, 2), (40, STAGES)):
        while int(visits.count.sum()) < epochs * NUM_DATA:
            visits.add(torch.arange(NUM_DATA), outputs)
        assert affordable_stages(replace(named, visits=visits), NUM_DATA) == count
