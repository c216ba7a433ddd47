"""The time that training has taken, in learning rates, counted by the optimizer's own steps."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from engram.posteriors.pace import rate_of


class Clock:
    r"""Sum of the learning rates of all steps since it was last set to zero, by group.

    .. math:: \tau = \sum_t \eta_t

    Schedules need no care: each step counts with its own rate. The optimizer's state is not
    touched, and the clock stops with its owner.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight], lr=0.25)
        >>> clock = Clock(optimizer)
        >>> weight.sum().backward()
        >>> for _ in range(3):
        ...     _ = optimizer.step()
        >>> clock.elapsed({"weight": weight})
        {'weight': 0.75}
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.times: list[float] = []
        times = self.times  # the hook must not keep the clock alive

        def count(stepped: Optimizer, args: Any, kwargs: Any) -> None:
            times.extend([0.0] * (len(stepped.param_groups) - len(times)))
            for place, group in enumerate(stepped.param_groups):
                times[place] += rate_of(group)

        weakref.finalize(self, optimizer.register_step_post_hook(count).remove)

    def elapsed(self, parameters: Mapping[str, Tensor]) -> dict[str, float]:
        """Time since zero of each parameter that the optimizer trains."""
        names = {id(p): name for name, p in parameters.items()}
        times = self.times + [0.0] * (len(self.optimizer.param_groups) - len(self.times))
        return {
            names[id(p)]: time
            for group, time in zip(self.optimizer.param_groups, times, strict=True)
            for p in group["params"]
            if id(p) in names
        }

    def restart(self, times: list[float] | None = None) -> None:
        """Set to zero, or to what was counted before a restart."""
        self.times[:] = [] if times is None else times
