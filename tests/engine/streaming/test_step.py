"""One call of a model and its backward pass, recorded without a tape."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engram.engine.streaming.step import StepRecorder, hooked
from engram.errors import EngineError

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def test_what_the_call_was_given_and_what_arrived() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))
    step = StepRecorder(model, 4)
    with step.recording():
        outputs = model(X)
        (outputs.sum() + outputs.square().sum()).backward()
    step.check()
    assert step.args[0] is X
    torch.testing.assert_close(step.outputs, outputs.detach())
    torch.testing.assert_close(step.output_gradient, 1 + 2 * outputs.detach())
    assert step.random is not None
    with step.random.again():
        torch.testing.assert_close(model(X), outputs)
    assert step.way == "again"
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_keyword_arguments_are_recorded() -> None:
    model = nn.Linear(3, 2)
    step = StepRecorder(model, 4)
    with step.recording():
        model(input=X).sum().backward()
    assert step.args == ()
    assert step.kwargs["input"] is X


def test_steps_that_cannot_be_recorded() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(EngineError, match="a call of the model inside the step"):
        StepRecorder(model, 4).check()
    step = StepRecorder(model, 4)
    with step.recording():
        outputs = model(X)
        with pytest.raises(EngineError, match="a second one"):
            model(X)
    with pytest.raises(EngineError, match="a backward pass inside the step"):
        step.check()
    outputs.sum().backward()
    step = StepRecorder(model, 4)
    with step.recording():
        model(X).sum().backward()
        with torch.no_grad():
            model.weight.mul_(2)
    with pytest.raises(EngineError, match="weights that were changed"):
        step.check()


def test_hooks_of_the_user_stay() -> None:
    model, seen = nn.Linear(3, 2), []

    def note(*_: object) -> None:
        seen.append("ours")

    with hooked(model, note, note):
        handle = model.register_forward_hook(lambda *_: seen.append("theirs"))
        model(X)
    model(X)
    handle.remove()
    assert seen == ["ours", "ours", "theirs", "theirs"]
    assert not model._forward_hooks


def test_an_exception_leaves_neither_hooks_nor_modes() -> None:
    model = nn.Linear(3, 2)
    depth = torch._C._len_torch_function_stack()
    with pytest.raises(ZeroDivisionError), StepRecorder(model, 4).recording():
        raise ZeroDivisionError
    assert not model._forward_hooks
    assert torch._C._len_torch_function_stack() == depth
