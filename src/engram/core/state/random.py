"""Random numbers drawn again as they were drawn before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """The state of torch's generators at one moment.

    Example:
        >>> state = RandomState.now([])
        >>> first = torch.rand(2)
        >>> with state.again():
        ...     second = torch.rand(2)
        >>> torch.equal(first, second)
        True
    """

    cpu: Tensor
    cuda: dict[int, Tensor]

    @classmethod
    def now(cls, devices: Iterable[torch.device]) -> RandomState:
        """The state on the CPU and on those of the devices that have one of their own."""
        numbers = {device.index or 0 for device in devices if device.type == "cuda"}
        return cls(torch.get_rng_state(), {n: torch.cuda.get_rng_state(n) for n in numbers})

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw as then; afterwards as if nothing had been drawn."""
        with torch.random.fork_rng(devices=list(self.cuda)):
            torch.set_rng_state(self.cpu)
            for number, state in self.cuda.items():
                torch.cuda.set_rng_state(state, number)
            yield
