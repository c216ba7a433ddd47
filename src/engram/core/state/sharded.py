"""Whole weights of a model that FSDP2 (``fully_shard``) keeps in pieces on several processes.

The passes need weights only to multiply with: gradients are those of activations, and tangents are
of activations too. So it is enough to put plain copies of the whole weights in the places of the
pieces, and to take FSDP's hooks away, which would gather, free and reduce behind every operation.
Afterwards the pieces and the hooks are where they were.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from engram.core.parameters import uncompiled

HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def is_sharded(tensor: Tensor) -> bool:
    """Whether processes have a piece of it each."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "full_tensor")


def gathered(tensor: Any) -> Any:
    """All of a tensor that processes have a piece each of; anything else as it is.

    All of the processes must ask for it.
    """
    if not (isinstance(tensor, Tensor) and is_sharded(tensor)):
        return tensor
    found: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return found


@contextmanager
def whole_weights(model: nn.Module) -> Iterator[None]:
    """The model with its whole weights on every process; all of the processes must call this.

    A model that is not sharded stays as it is.
    """
    parts = [m for m in uncompiled(model).modules() if _has_own_class(m)]
    if not parts:
        yield
        return
    for part in parts:
        reshard: Any = part.reshard  # what the last forward pass has left whole
        reshard()
    kept = _Kept(list(uncompiled(model).modules()))
    try:
        kept.replace()
        yield
    finally:
        kept.restore()


def _has_own_class(module: nn.Module) -> bool:
    """Whether ``fully_shard`` has made it an FSDPModule."""
    fsdp = getattr(dist, "fsdp", None)
    return fsdp is not None and isinstance(module, getattr(fsdp, "FSDPModule", ()))


class _Kept:
    """What is exchanged: weights, hooks and classes of modules."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.weights = [(m, dict(m._parameters)) for m in modules]
        self.hooks = [
            (hooks, name, hook)
            for m in modules
            for hooks in (getattr(m, kind) for kind in HOOKS)
            for name, hook in hooks.items()
            if type(getattr(hook, "__self__", None)).__name__ == "FSDPState"
        ]
        self.orders = [(hooks, list(hooks)) for hooks, _, _ in self.hooks]
        self.classes = [(m, type(m)) for m in modules if _has_own_class(m)]

    def replace(self) -> None:
        """Plain copies of the weights, no hooks of FSDP, and the classes of before."""
        known: dict[int, nn.Parameter] = {}
        for module, parameters in self.weights:
            for name, parameter in parameters.items():
                if parameter is None or not is_sharded(parameter):
                    continue
                if id(parameter) not in known:  # tied weights stay tied
                    copy = gathered(parameter.detach())
                    known[id(parameter)] = nn.Parameter(copy, parameter.requires_grad)
                module._parameters[name] = known[id(parameter)]
        for hooks, name, _ in self.hooks:
            del hooks[name]
        for module, own in self.classes:
            module.__class__ = own.__bases__[1]  # FSDPModule and the class of before

    def restore(self) -> None:
        """As it was, in the order of before."""
        for module, own in self.classes:
            module.__class__ = own
        for hooks, name, hook in self.hooks:
            hooks[name] = hook
        for hooks, order in self.orders:
            for name in order:
                hooks.move_to_end(name)
        for module, parameters in self.weights:
            module._parameters.update(parameters)
