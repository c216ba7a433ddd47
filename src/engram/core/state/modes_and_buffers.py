"""What the modules of a model hold, and the mode that they are in: buffers, train and eval mode.

A forward pass changes buffers; one more, of ours, must not (:class:`Buffers`). And switching the
mode (:class:`Modes`) may do more than set a flag: a layer may override ``train()`` to keep a part
frozen, or to merge an update into its weight in eval mode (as LoRA does). Merged, the update's own
parameters reach no output, so such a layer is run in its unmerged form; the values are the same.
Going back is by ``train()`` too, and then by the values themselves, since merging and taking apart
again rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


@dataclass(frozen=True)
class Buffers:
    """The buffers of a model at one moment: where they stand, which tensors, with which values.

    Example:
        >>> model = nn.BatchNorm1d(2)
        >>> before = Buffers.now(model)
        >>> _ = model(torch.randn(4, 2))
        >>> with before.again():
        ...     print(model.num_batches_tracked.item())
        0
        >>> model.num_batches_tracked.item()
        1
    """

    places: list[tuple[nn.Module, str, Tensor, Tensor]]
    tables: list[tuple[dict[str, Tensor | None], set[str]]]

    @classmethod
    def now(cls, model: nn.Module) -> Buffers:
        """As they are, copied."""
        modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
        return cls(
            [
                (module, name, buffer, buffer.detach().clone())
                for module in modules
                for name, buffer in module._buffers.items()
                if buffer is not None and not is_lazy(buffer) and not buffer.is_meta
            ],
            [(module._buffers, set(module._buffers)) for module in modules],
        )

    def changed(self, model: nn.Module) -> list[str]:
        """Names of those that have other values now."""
        noted = {id(buffer): value for _, _, buffer, value in self.places}
        found = model.named_buffers()
        return [name for name, b in found if id(b) not in noted or not same_values(b, noted[id(b)])]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Those values inside; afterwards the present ones, whatever ran inside."""
        present = Buffers([self._present(place) for place in self.places], [])
        try:
            self.restore()
            yield
        finally:
            present.restore()

    @staticmethod
    def _present(
        place: tuple[nn.Module, str, Tensor, Tensor],
    ) -> tuple[nn.Module, str, Tensor, Tensor]:
        module, name, noted, _ = place
        buffer = module._buffers[name]
        here = noted if buffer is None else buffer
        return module, name, here, here.detach().clone()

    def restore(self) -> None:
        """As they were; those that a call has made since are gone."""
        for module, name, buffer, value in self.places:
            module._buffers[name] = buffer
            if not same_values(buffer, value):
                buffer.data.copy_(value)
        for table, names in self.tables:
            for name in table.keys() - names:
                del table[name]


def same_values(left: Tensor, right: Tensor) -> bool:
    """Of one shape and equal; a NaN is another one."""
    return left.shape == right.shape and torch.equal(left, right)


@dataclass(frozen=True)
class Modes:
    """The modes of a model's modules at one moment, and what switching them may change."""

    model: nn.Module
    training: list[tuple[nn.Module, bool]]
    switching: list[Switching]

    @classmethod
    def now(cls, model: nn.Module) -> Modes:
        """As they are."""
        return cls(
            model,
            [(module, module.training) for module in model.modules()],
            [Switching.now(module) for module in model.modules() if _overrides(module)],
        )

    def evaluate(self) -> None:
        """Eval mode; modules that would merge weights in it stay in train mode, by themselves."""
        self.model.eval()
        for module in self.model.modules():
            if _packs(module):
                module.training = True
        merging = self._merging()
        for part in self.switching:
            if part.module not in merging:
                continue
            part.module.train(True)
            if part.training:
                part.put_values()  # as it was, not as it is after taking apart what was merged
            for child in part.module.children():
                child.eval()

    def _merging(self) -> set[nn.Module]:
        """Modules whose own tensors are others in train mode; those inside of them come first."""
        found: set[nn.Module] = set()
        explained: set[int] = set()
        for part in reversed(self.switching):
            merged = part.values()
            part.module.train(True)
            changed = _changed(merged, part.values())
            part.module.train(False)
            if changed - explained:
                found.add(part.module)
                explained |= changed
        return found

    def restore(self) -> None:
        """As they were: parents first, since a parent's mode becomes its children's."""
        own = {part.module for part in self.switching}
        for module, training in self.training:
            if module in own:
                module.train(training)
        for part in self.switching:
            part.put_back()
        for module, training in self.training:
            if module.training != training:
                module.training = training


@dataclass(frozen=True)
class Switching:
    """A module whose ``train()`` is its own: all that it could change."""

    module: nn.Module
    training: bool
    attributes: dict[str, Any]
    registered: list[tuple[dict[str, Any], dict[str, Any]]]
    tensors: list[tuple[Tensor, Tensor]]

    @classmethod
    def now(cls, module: nn.Module) -> Switching:
        """As it is, with copies of its tensors."""
        tables = [
            table for m in module.modules() for table in (m._parameters, m._buffers, m._modules)
        ]
        return cls(
            module,
            module.training,
            dict(vars(module)),
            [(table, dict(table)) for table in tables],
            [(t, t.detach().clone()) for t in _tensors(module)],
        )

    def values(self) -> dict[int, Tensor]:
        """Its tensors now, copied, by identity."""
        return {id(t): t.detach().clone() for t in _tensors(self.module)}

    def put_values(self) -> None:
        """Its tensors as they were, bit by bit; ``data``, so that autograd sees no change."""
        for tensor, value in self.tensors:
            if not same_values(tensor, value):
                tensor.data.copy_(value)

    def put_back(self) -> None:
        """Everything as it was."""
        for table, before in self.registered:
            if not _same_entries(table, before):
                table.clear()
                table.update(before)
        attributes = vars(self.module)
        for name in attributes.keys() - self.attributes.keys():
            del attributes[name]
        attributes.update(self.attributes)
        self.put_values()


def _same_entries(table: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether a table has the very same objects: tensors have no one answer to ``==``.

    Ctrl-C may come while ``functional_call`` has other tensors in their place.
    """
    return list(table) == list(before) and all(table[name] is v for name, v in before.items())


def _overrides(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return False
    kind = type(module)
    switches = {kind.train, kind.eval} - {nn.Module.train, nn.Module.eval}
    if "train" in vars(module) or "eval" in vars(module):
        return True
    return any(not _is_transformers(switch, module) for switch in switches)


def _packs(module: nn.Module) -> bool:
    """A layer of bitsandbytes, which computes the same in both modes.

    In eval mode, on a processor, its 4-bit layers lay out their weights for inference, for good,
    and have no gradients any more.
    """
    return type(module).__module__.startswith("bitsandbytes.")


def _is_transformers(switch: Callable[..., Any], module: nn.Module) -> bool:
    """The ``train()`` that all models of transformers have: it changes nothing but with kernels.

    Copies of what it could change would be two of the whole model, its frozen weights included.
    """
    own = switch.__module__ == "transformers.modeling_utils"
    return own and not getattr(module, "use_kernels", True)


def _tensors(module: nn.Module) -> Iterable[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _changed(left: dict[int, Tensor], right: dict[int, Tensor]) -> set[int]:
    both = left.keys() & right.keys()
    return (left.keys() ^ right.keys()) | {
        key for key in both if not same_values(left[key], right[key])
    }
