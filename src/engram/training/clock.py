r"""Training time: learning rates over roots, added up over the steps, for every parameter.

.. math::
    C = \sum_t \eta_t b_t P_t^{-1}

per entry, or one number where P is. Weight decay is added up in the same way: W is the sum of the
factors by which the steps have shrunk the weights. A *coupled* decay w goes through the optimizer
as a gradient does, and adds w times the step's time; a *decoupled* one adds the learning rate times
w. So W / C is the decay of the mean objective, and N W / C the prior precision that it stands for.

Roots are slow: Adam's v forgets a thousandth in a step. So learning rates are added up as numbers,
and divided by the root once in a few steps, in their middle: at every one in the beginning, then
after at most a quarter of the steps so far and a fiftieth of the average's memory.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from engram.errors import TrainingError
from engram.training.checkpoints import DECAY, RATIO, SHRUNK, TIME
from engram.training.metrics import Metric, steps_taken
from engram.training.step_rules import Step, no_root

# How long a root may be taken as constant. They trade cost for accuracy: read so, the time of a
# small net's entries under Adam is within 0.8 % (99 of 100) of that read at every step, and their
# mean within 0.5 %; under Adamax, whose root is a maximum, within 4.5 % and 0.6 %.
SHARE_OF_STEPS = 4  # of the steps so far, one in so many
EXACT_STEPS = 16  # first steps, at each of which it is read
SHARE_OF_MEMORY = 0.02  # of the steps that an average of squares remembers
MOST_STEPS = 64  # at most so many, however long an average's memory is
LONG = 1000  # steps after which a momentum is as good as stationary
ROUNDING = 1e-9  # of a logarithm: 0.02 / (1 - 0.99) is a little below 2
SAME = 1e-9  # relative difference of two ratios of decay to time that are one


# what a step does: weights in the momentum, learning rate times weight, what it shrinks by itself
Advance = tuple[float, float, tuple[float, ...], float]


@dataclass
class ParameterClock:
    """C, W and what they need, for one parameter.

    Args:
        shape: of the parameter.
        steps: that it has taken, those before recording began included.
        memory: total weight of gradients in the momentum.
        decay_memory: the same for weight decay, which is not clipped; of weights that are averaged,
            all that the stepped ones have shrunk by.
        pending: learning rates times weights that have not been divided by a root yet.
        pending_decay: the same for weight decay.
        latest: learning rate times weight of the last step, and the same for weight decay.
        time: C.
        ratio: W over C, where that is one number; W itself is not kept then.
        decay: W, where it is not: a weight decay that changed, or gradients that were clipped.
        shrunk: the part of W that is decoupled.
        largest_gradient: root mean square of its entries, the largest that was seen.
        divided: all that was pending and is in C.
        waiting: steps since the last division.
        carry: total of inverse roots in a momentum of divided gradients, as RMSprop's.
    """

    shape: tuple[int, ...]
    steps: int = 0
    memory: float = 0.0
    decay_memory: float = 0.0
    pending: float = 0.0
    pending_decay: float = 0.0
    latest: tuple[float, ...] = (0.0, 0.0)
    time: Tensor | float = 0.0
    ratio: float | None = None
    decay: Tensor | float | None = None
    shrunk: float = 0.0
    largest_gradient: float = 0.0
    divided: float = 0.0
    waiting: int = 0
    carry: Tensor | float = 0.0

    def advance(self, step: Step, metric: Metric, share: float, scale: float) -> Advance:
        """What a step does to this clock, and to others that stand as it does."""
        rate, coupled, shrunk = metric.rate(step), 0.0, 0.0
        memory, weight = metric.weight(step, self.memory, share * scale)
        decay_memory = self.decay_memory
        decay, decoupled = metric.decay(step)
        if decoupled and metric.averages:  # of the average, in which the newest weights are a part
            decay_memory += metric.shrink(step)
            shrunk = rate * (decay_memory - self.shrunk)
        elif decoupled and decay:
            shrunk = metric.shrink(step)
        elif decay:
            decay_memory, plain = metric.weight(step, decay_memory, 1.0)
            coupled = rate * decay * plain
        return memory, decay_memory, (rate * weight, coupled), shrunk

    def put(self, made: Advance) -> None:
        """Take a step: its learning rate waits for the root."""
        self.memory, self.decay_memory, self.latest, shrunk = made
        self.pending += self.latest[0]
        self.pending_decay += self.latest[1]
        self.shrunk += shrunk
        self.waiting += 1

    def skip(self) -> None:
        """A step that counts for nothing and spoils the root: divide by the mean one so far."""
        if self.divided:
            self.time = self.time * (1 + self.pending / self.divided)
        self.pending = self.pending_decay = 0.0
        self.waiting = 0

    @property
    def is_behind(self) -> bool:
        """Whether something waits to be divided."""
        return bool(self.waiting or self.pending or self.pending_decay)

    def divide(
        self, root: Tensor | float, momentum: float = 0.0, kept: float = 1.0
    ) -> Tensor | float:
        """Divide what is pending by the root and add it; the inverse root, for :meth:`foresee`.

        Args:
            root: as it is now.
            momentum: of divided gradients.
            kept: share of the weights so far in those that are used, where they are averaged.
        """
        inverse = root.reciprocal_() if isinstance(root, Tensor) else 1 / root
        if momentum:
            self.carry = inverse = momentum * self.carry + inverse
        if kept != 1:
            self.time = kept * self.time
            self.decay = None if self.decay is None else kept * self.decay
        self._add(inverse, self.pending, self.pending_decay)
        self.pending = self.pending_decay = 0.0
        self.waiting = 0
        return inverse

    def foresee(self, inverse: Tensor | float, steps: float) -> None:
        """Divide steps to come by the present root too: it then stands in their middle.

        They are taken to be like the last one; what they turn out to be is made up for at the next
        division.
        """
        if steps:
            early, early_decay = (steps * value for value in self.latest)
            self._add(inverse, early, early_decay)
            self.pending, self.pending_decay = -early, -early_decay

    def _add(self, inverse: Tensor | float, amount: float, amount_decay: float) -> None:
        if not amount and not amount_decay:
            return
        self._keep_decay(amount, amount_decay)
        self.divided += amount
        self.time = _added(self.time, inverse, amount)
        if self.decay is not None:
            self.decay = _added(self.decay, inverse, amount_decay)

    def _keep_decay(self, amount: float, amount_decay: float) -> None:
        """Keep W by itself from where it is no longer in one ratio to C."""
        if self.decay is not None:
            return
        if self.ratio is None and amount:
            self.ratio = amount_decay / amount
        ratio = self.ratio or 0.0
        rounding = SAME * (abs(self.latest[1]) + ratio * abs(self.latest[0]))
        if not math.isclose(amount_decay, ratio * amount, rel_tol=SAME, abs_tol=rounding):
            self.decay = ratio * self.time

    def copied(self) -> ParameterClock:
        """With copies of its tensors."""
        found = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(found, name, value.detach().clone())
        return found

    def to(self, device: torch.device) -> None:
        """Move its tensors."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))

    def totals(self) -> tuple[Tensor | float, Tensor | float]:
        """C and W so far; nothing may be pending."""
        coupled = self.decay if self.decay is not None else (self.ratio or 0.0) * self.time
        return self.time, coupled + self.shrunk

    def state(self) -> dict[str, Tensor]:
        """C and what W is made of, by kind, as a snapshot has them."""
        found = {TIME: self.time, RATIO: self.ratio or 0.0, SHRUNK: self.shrunk}
        if self.decay is not None:
            found[DECAY] = self.decay
        return {
            kind: v if isinstance(v, Tensor) else torch.tensor(v, dtype=torch.float64)
            for kind, v in found.items()
        }


def _added(total: Tensor | float, inverse: Tensor | float, factor: float) -> Tensor | float:
    if isinstance(total, Tensor):
        return total.add_(inverse, alpha=factor)
    if isinstance(inverse, Tensor) and inverse.dtype in (torch.float16, torch.bfloat16):
        inverse = inverse.float()  # a sum of thousands of terms needs more digits
    return inverse * factor + total


Keep = Callable[[int, ParameterClock], None]


class Clock:
    """The clocks of all parameters of an optimizer, in the order of its groups.

    Args:
        optimizer: whose steps are counted.
        metric: of the optimizer.
        scale: B where the loss is a sum over B examples: its gradient is B times that of the mean.
    """

    def __init__(self, optimizer: Optimizer, metric: Metric, scale: float = 1.0) -> None:
        self.optimizer, self.metric, self.scale = optimizer, metric, scale
        self.clocks: list[ParameterClock] = []
        self.parameters: list[Tensor] = []
        self._places: dict[int, int] = {}
        self.restart(0)
        self.look()

    def restart(self, number: int) -> None:
        """Go on as after so many recorded steps."""
        self.number, self._window = number, self._next_window() if number else 1

    def look(self) -> None:
        """Take in parameters that are not known yet: all at first, later those of new groups."""
        groups = self.optimizer.param_groups
        if sum(len(group["params"]) for group in groups) == len(self.clocks):
            return
        for group in groups:
            for parameter in group["params"]:
                if id(parameter) not in self._places:
                    self._places[id(parameter)] = len(self.clocks)
                    self.parameters.append(parameter)
                    self.clocks.append(self._started(parameter, group))
                    self._window = 1

    def _started(self, parameter: Tensor, group: Mapping[str, Any]) -> ParameterClock:
        """A clock at the steps that the parameter has taken already, with their momentum."""
        state = self.optimizer.state.get(parameter, {})
        momentum = state.get("momentum_buffer", state.get("exp_avg"))
        buffered = momentum is not None and "step" not in state
        taken = steps_taken(self.optimizer, parameter) or (LONG if buffered else 0)
        clock = ParameterClock(tuple(parameter.shape), taken)
        for number in range(max(1, taken - LONG + 1), taken + 1):
            step = Step(self.optimizer, parameter, group, state, number)
            clock.memory, _ = self.metric.weight(step, clock.memory, self.scale)
            clock.decay_memory, _ = self.metric.weight(step, clock.decay_memory, 1.0)
        return clock

    def advance(self, share: float = 1.0, keep: Keep | None = None) -> None:
        """Count a step that all parameters with a gradient have taken.

        Args:
            share: of the gradient that clipping has left; NaN for a step that counts for nothing.
            keep: is called with every clock right after this step, nothing pending.
        """
        self.look()
        bad = math.isnan(share)
        alike: dict[Any, Advance] = {}  # parameters of a group that stand alike step alike
        for parameter, group, clock in self._moved():
            clock.steps += 1
            if not bad:
                of_whom = parameter if self.metric.one_by_one else group
                where = (id(of_whom), clock.steps, clock.memory, clock.decay_memory)
                if where not in alike:
                    step = self._step(parameter, group, clock)
                    alike[where] = clock.advance(step, self.metric, share, self.scale)
                clock.put(alike[where])
            elif self.metric.root is not no_root:
                clock.skip()
        self.number += 1
        if keep is not None or (self.number % self._window == 0 and not bad):
            self._window = self._next_window()
            self._divide((self._window - 1) / 2, keep)

    def _moved(self) -> Iterator[tuple[Tensor, Mapping[str, Any], ParameterClock]]:
        """What the last step has moved."""
        by_gradient = self.metric.has_gradients
        for parameter, group, clock in self.each():
            if parameter.grad is not None if by_gradient else parameter.requires_grad:
                yield parameter, group, clock

    def _divide(self, ahead: float, keep: Keep | None) -> None:
        """Divide what is pending, and so many steps ahead, by the roots as they are now."""
        with torch.no_grad():
            for parameter, group, clock in self.each():
                inverse: Tensor | float = 0.0
                if clock.is_behind:
                    inverse = self._divided(self._step(parameter, group, clock), clock)
                if keep is not None:
                    keep(self._places[id(parameter)], clock)
                if isinstance(inverse, Tensor):
                    clock.foresee(inverse, ahead)

    def now(self) -> list[ParameterClock]:
        """The clocks with nothing pending, as copies: looking changes nothing of what is kept."""
        found = [clock.copied() if clock.is_behind else clock for clock in self.clocks]
        with torch.no_grad():
            for parameter, group, clock in self.each():
                if clock.is_behind:
                    place = self._places[id(parameter)]
                    self._divided(self._step(parameter, group, clock), found[place])
        return found

    def _divided(self, step: Step, clock: ParameterClock) -> Tensor | float:
        """Divide what is pending in a clock by the root as it is now; the inverse root."""
        kept = 1 - self.metric.rate(step) if self.metric.averages else 1.0
        return clock.divide(self.root(step), self.metric.carried(step.group), kept)

    def _next_window(self) -> int:
        """Steps for which the roots may be taken as constant: a power of two.

        So it says itself when the next division is due, whenever a training was interrupted.
        """
        if self.metric.root is no_root:
            return LONG
        steps = min((clock.steps for clock in self.clocks if clock.steps), default=0)
        forgetting = max(self.metric.forgotten(group) for group in self.optimizer.param_groups)
        memory = SHARE_OF_MEMORY / forgetting if forgetting > 0 else MOST_STEPS
        longest = steps / SHARE_OF_STEPS if steps >= EXACT_STEPS else 1
        return 2 ** int(math.log2(max(1, min(longest, memory, MOST_STEPS))) + ROUNDING)

    def root(self, step: Step) -> Tensor | float:
        """What the step divides by; TrainingError where the state does not have it."""
        try:
            return self.metric.root(step)
        except KeyError as missing:
            raise TrainingError(
                f"a {type(step.optimizer).__name__} with {missing} in its state or settings",
                f"one with {', '.join(map(str, step.state)) or 'nothing'} in its state",
                "say how this kind steps with engram.training.metrics.register",
            ) from missing

    def each(self) -> Iterator[tuple[Tensor, Mapping[str, Any], ParameterClock]]:
        """Every parameter with the settings of its group and its clock."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, group, self.clocks[self._places[id(parameter)]]

    def _step(self, parameter: Tensor, group: Mapping[str, Any], clock: ParameterClock) -> Step:
        state = self.optimizer.state.get(parameter, {})
        return Step(self.optimizer, parameter, group, state, clock.steps)
