"""A model's buffers put back as they were before: what a second forward pass must not change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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
