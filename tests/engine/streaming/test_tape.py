"""What a tape takes down of one call, and the deviation carried forward along it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from benchmarks import torch_func
from torch import Tensor, nn
from torch.nn import functional

import engram
from engram.core.data.batches import Batches
from engram.core.state.model import state_preserved
from engram.engine.prepare import prepare
from engram.engine.streaming.step import StepRecorder
from engram.engine.streaming.tape import Tape
from engram.errors import EngineError

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(5, 8, generator=GENERATOR, dtype=torch.float64)
Y = torch.tensor([0, 2, 1, 0, 1])


class Between(nn.Module):
    """Two layers, and one operation between them."""

    def __init__(self, function: Callable[[Tensor], Tensor], width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.first, self.second = nn.Linear(8, 8).double(), nn.Linear(width, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.second(self.function(self.first(x)))
        return outputs


class Convolved(nn.Module):
    """A padded convolution, a pooling, and one whose kernel is the whole image."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(2, 3, 3, padding=1).double()
        self.second = nn.Conv2d(3, 3, 1, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.avg_pool2d(self.first(x.reshape(-1, 2, 2, 2)).relu(), 2)
        return self.second(hidden).flatten(1)


def recorded(model: nn.Module, inputs: Tensor = X) -> StepRecorder:
    """One step with its tape."""
    with state_preserved(model):
        engine = prepare(model, Batches((X, Y), 1))
    step = StepRecorder(model, len(X), Tape(engine, len(X)))
    with step.recording():
        functional.cross_entropy(model(inputs), Y, reduction="sum").backward()
    step.check()
    return step


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "kernel of the result, tanh": torch.tanh,
    "kernel of the result, sigmoid": Tensor.sigmoid,
    "kernel of the result, relu in place": torch.relu_,
    "linear": lambda x: x.reshape(-1, 2, 4).permute(0, 2, 1).flatten(1),
    "dual numbers": lambda x: functional.gelu(x) * functional.softplus(x),
    "dual numbers of several": lambda x: torch.cat([part.cos() for part in x.chunk(2, 1)], 1),
    "branches that meet": lambda x: x.sin() + x * x.mean(1, keepdim=True),
    "a constant": lambda x: x.detach(),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_perturbations_go_through_every_kind_of_operation(name: str) -> None:
    model = Between(OPERATIONS[name])
    check_against_torch_func(model)


def test_perturbations_go_through_convolutions_and_pooling() -> None:
    check_against_torch_func(Convolved())


def check_against_torch_func(model: nn.Module) -> None:
    posterior = engram.laplace(
        model, (X, Y), structure="diagonal", prior_precision=2.0, progress=False
    )
    step = recorded(model)
    assert step.way == "tape"
    residual = (step.outputs.softmax(1) - functional.one_hot(Y, 3)).detach()
    torch.testing.assert_close(step.output_gradient, residual)
    found = step.deviation(residual, posterior, 1.0)
    assert step.way == "tape"
    expected = torch_func.deviation(model, (X,), residual, posterior)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_dropout_is_drawn_as_it_was() -> None:
    model = Between(nn.Dropout(0.5))
    posterior = engram.laplace(
        model, (X, Y), structure="isotropic", progress=False, prior_precision=1.0
    )
    model.train()
    step = recorded(model)
    tape = step.tape
    assert tape is not None
    residual = step.output_gradient
    by_tape = step.deviation(residual, posterior, 1.0)
    tape.obstacle = "for the test"
    assert step.way == "again"
    torch.testing.assert_close(step.deviation(residual, posterior, 1.0), by_tape)


def test_only_what_depends_on_parameters_is_taken_down() -> None:
    model = Between(torch.tanh)
    tape = recorded(model, X.sin().cos()).tape
    assert tape is not None
    assert [entry.function for entry in tape.entries] == [
        functional.linear,
        torch.tanh,
        functional.linear,
    ]
    assert [entry.site for entry in tape.entries] == [0, None, 1]
    assert all(gradient is not None for gradient in tape.gradients)


def scaled_in_place(x: Tensor) -> Tensor:
    return x.sin().mul_(2)


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return gradients[0]


@pytest.mark.parametrize(
    ("function", "words"),
    [(scaled_in_place, "in place"), (lambda x: x.expand(1, *x.shape)[0] + 0, None)],
)
def test_obstacles_are_named(function: Callable[[Tensor], Tensor], words: str | None) -> None:
    tape = recorded(Between(function)).tape
    assert tape is not None
    assert tape.obstacle is None if words is None else words in str(tape.obstacle)


def test_what_was_not_seen_is_noticed_by_the_products() -> None:
    """A function with a backward of its own hides its operation from the tape."""
    model = Between(Custom.apply)  # type: ignore[arg-type]
    posterior = engram.laplace(
        model, (X, Y), structure="isotropic", progress=False, prior_precision=1.0
    )
    step = recorded(model)
    found = step.deviation(step.output_gradient, posterior, 1.0)
    expected = torch_func.deviation(
        Between(lambda x: x.clone()), (X,), step.output_gradient, posterior
    )
    torch.testing.assert_close(found, expected)


def test_parameters_without_a_rule_are_no_matter_for_a_tape() -> None:
    model = Between(torch.tanh)
    model.second = nn.PReLU(dtype=torch.float64)  # type: ignore[assignment]
    tape = recorded_tape(model)
    assert tape.obstacle == "parameters without a rule"


def recorded_tape(model: nn.Module) -> Tape:
    with state_preserved(model):
        return Tape(prepare(model, Batches((X, Y), 1)), len(X))


def test_releasing_lets_go_of_the_graph() -> None:
    step = recorded(Between(torch.tanh))
    tape = step.tape
    assert tape is not None
    step.release()
    assert not tape.entries
    assert not tape.sites
    assert not tape.followed
    assert tape.buffers is None
    assert step.args == ()


def test_other_operations_than_planned_are_an_obstacle() -> None:
    model = Between(torch.tanh)
    with state_preserved(model):
        engine = prepare(model, Batches((X, Y), 1))
    model.second = nn.Sequential(model.second, nn.Linear(3, 3).double())  # type: ignore[assignment]
    step = StepRecorder(model, len(X), Tape(engine, len(X)))
    with step.recording():
        model(X[:3]).sum().backward()
    assert step.tape is not None
    assert "number of examples" in str(step.tape.obstacle)
    with pytest.raises(EngineError, match="outputs for 3"):
        step.check()
