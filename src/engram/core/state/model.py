"""The one place that leaves a model and its surroundings as they were.

Everything is noted before, and put back by its value, so that it does not matter where an
exception or Ctrl-C came; putting back twice is the same as once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call

from engram.core.data.batches import Batch, flat_outputs
from engram.core.data.inputs import handed
from engram.core.parameters import Named, uncompiled
from engram.core.state.modes_and_buffers import Buffers, Modes
from engram.core.state.plain_forward import plain_forward
from engram.core.state.process import of_the_thread, random_states, restored, stacks

_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_making_locks = threading.Lock()
ABSENT = object()


def device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters are."""
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


@contextmanager
def state_preserved(model: nn.Module) -> Iterator[None]:
    """Eval mode in full precision while this lasts; afterwards everything is as before.

    One thread at a time: another one that comes with the same model waits.
    """
    with locked(model):
        state, modes = State.now(model), Modes.now(model)
        # modes of torch first: one that Ctrl-C left open would see what the others do
        restores = (*stacks(), modes.restore, state.restore, *of_the_thread(), *random_states())
        with (
            restored(restores),
            torch.inference_mode(False),
            torch.autocast(device_of(model).type, enabled=False),
            plain_forward(),
        ):
            state.forwards.use_own()
            modes.evaluate()
            yield


@contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Run something in the model's present mode; afterwards everything is as before."""
    with restored((*of_the_thread(), State.now(model).restore, *random_states())):
        yield


def locked(model: nn.Module) -> threading.RLock:
    """A lock, so that one thread at a time uses the model; taken before any of the process."""
    with _making_locks:
        return _locks.setdefault(uncompiled(model), threading.RLock())


@dataclass(frozen=True)
class State:
    """A model's tensors by identity, its buffers by value, and the forward of every module."""

    parameters: list[tuple[nn.Module, str, nn.Parameter | None]]
    marks: list[tuple[nn.Parameter, bool, Tensor | None]]
    weights: list[tuple[nn.RNNBase, list[Any]]]  # recurrent layers list theirs once more
    forwards: Forwards
    buffers: Buffers

    @classmethod
    def now(cls, model: nn.Module) -> State:
        """As it is."""
        modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
        return cls(
            [(m, name, p) for m in modules for name, p in m._parameters.items()],
            [(p, p.requires_grad, p.grad) for p in model.parameters()],
            [(m, list(m._flat_weights)) for m in modules if isinstance(m, nn.RNNBase)],
            Forwards.now(model),
            Buffers.now(model),
        )

    def restore(self) -> None:
        """As it was."""
        for module, name, parameter in self.parameters:
            module._parameters[name] = parameter
        for marked, required, gradient in self.marks:
            if marked.requires_grad != required:
                marked.requires_grad_(required)
            if marked.grad is not gradient:
                marked.grad = gradient
        for layer, weights in self.weights:
            layer._flat_weights[:] = weights
        self.forwards.restore()
        self.buffers.restore()


@dataclass(frozen=True)
class Forwards:
    """The forward of every module, where it is not that of its class."""

    attributes: list[tuple[dict[str, Any], str, Any]]

    @classmethod
    def now(cls, model: nn.Module) -> Forwards:
        """As they are."""
        return cls(
            [
                (vars(m), name, vars(m).get(name, ABSENT))
                for m in model.modules()
                for name in ("forward", "_compiled_call_impl")
                if not isinstance(m, torch.jit.ScriptModule)
            ]
        )

    def use_own(self) -> None:
        """The modules' own, where ``module.compile()`` or accelerate's autocast replaced it."""
        for attributes, name, value in self.attributes:
            if name == "_compiled_call_impl" and value is not ABSENT:
                attributes[name] = None
            elif name == "forward" and value is not ABSENT and "_original_forward" in attributes:
                attributes[name] = attributes["_original_forward"]

    def restore(self) -> None:
        """As they were."""
        for attributes, name, value in self.attributes:
            if value is not ABSENT:
                attributes[name] = value
            else:
                attributes.pop(name, None)


@contextmanager
def own_forward(model: nn.Module) -> Iterator[None]:
    """The modules' own forward while this lasts."""
    forwards = Forwards.now(model)
    try:
        forwards.use_own()
        yield
    finally:
        forwards.restore()


def outputs_at(model: nn.Module, parameters: Named, batch: Batch) -> Tensor:
    """Outputs with some parameters replaced, [B, K]."""
    args, kwargs = handed(batch.inputs)
    try:
        with torch.no_grad():
            return flat_outputs(functional_call(model, parameters, args, kwargs))
    finally:
        for module in model.modules():
            if isinstance(module, nn.RNNBase):  # they keep a list of the weights they last saw
                module._init_flat_weights()
