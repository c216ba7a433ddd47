"""A model's buffers put back as they were before: what a second forward pass must not change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn


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

    @classmethod
    def now(cls, model: nn.Module) -> Buffers:
        """As they are, copied."""
        return cls(
            [
                (module, name, buffer, buffer.detach().clone())
                for module in model.modules()
                for name, buffer in module._buffers.items()
                if buffer is not None
            ]
        )

    @contextmanager
    def again(self) -> Iterator[None]:
        """Those values inside; afterwards the present ones, whatever ran inside."""
        present = Buffers([self._present(place) for place in self.places])
        try:
            self._put()
            yield
        finally:
            present._put()

    @staticmethod
    def _present(
        place: tuple[nn.Module, str, Tensor, Tensor],
    ) -> tuple[nn.Module, str, Tensor, Tensor]:
        module, name, noted, _ = place
        buffer = module._buffers[name]
        here = noted if buffer is None else buffer
        return module, name, here, here.detach().clone()

    @torch.no_grad()
    def _put(self) -> None:
        for module, name, buffer, value in self.places:
            module._buffers[name] = buffer
            if not torch.equal(buffer, value):
                buffer.copy_(value)
