"""What is needed to train on from a checkpoint bit for bit: order, settings, random numbers.

Which examples a step takes is known to whoever feeds it, and is told by :meth:`Order.note` right
before the model runs on them. The state of torch's random numbers is kept where something else than
the training steps has drawn from it since the last one, as a shuffle at the start of an epoch does.
The optimizer's state is in the snapshots.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engram.core.storage.kinds import check_that
from engram.errors import TrainingError
from engram.optimizers import ivon
from engram.training.checkpoints import Snapshot

CLIPPED = 1e-4  # a share of the gradient that is less than 1 by more is clipped, not rounded
KEPT_SETTINGS = (bool, int, float, str, list, tuple, type(None))  # of groups, apart from tensors


@dataclass(frozen=True)
class Part:
    """Examples that the model ran on for a step; several of them where gradients are accumulated.

    Args:
        step: that they were for.
        indices: in the training data.
        random_state: of torch, right before; None where it is that after the step before.
    """

    step: int
    indices: Tensor
    random_state: Tensor | None


@dataclass(frozen=True)
class Change:
    """Settings of a group of parameters that a step was the first to have."""

    step: int
    group: int
    values: Mapping[str, Any]


@dataclass
class Order:
    """The steps of a training, as far as they were told.

    Args:
        parts: of all steps, in their order.
        changes: of the groups' settings.
        optimizer: class of the optimizer, with its module.
        reduction: of the training loss over a batch, ``mean`` or ``sum``.
        modes: of all modules at the first step, "1" for train mode and "0" for eval mode.
        clipped: steps that saw only a share of their gradient.
    """

    parts: list[Part] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    optimizer: str = ""
    reduction: str = "mean"
    modes: str = ""
    clipped: int = 0
    _known: list[dict[str, Any]] = field(default_factory=list)
    _after: Tensor | None = None

    def note(self, step: int, indices: Tensor) -> None:
        """The model is about to run on these examples, for this step."""
        now = torch.get_rng_state()
        first = not self.parts or self.parts[-1].step < step
        same = first and self._after is not None and torch.equal(self._after, now)
        given = torch.as_tensor(indices).detach().cpu().long().reshape(-1).clone()
        self.parts.append(Part(step, given, None if same else now))

    def saw(self, share: float, model: nn.Module) -> None:
        """A step saw this share of its gradient, of a model in its present modes."""
        self.clipped += share < 1 - CLIPPED
        self.modes = self.modes or "".join("01"[module.training] for module in model.modules())

    def stepped(self, step: int, optimizer: Optimizer, is_kept: bool) -> None:
        """A step was taken.

        Args:
            step: its number.
            optimizer: with the settings that it had.
            is_kept: whether there is a checkpoint after it: random numbers are then kept anew.
        """
        for number, group in enumerate(optimizer.param_groups):
            if number == len(self._known):
                self._known.append({})
            now = {name: _plain(v) for name, v in group.items() if _is_setting(name, v)}
            changed = {n: v for n, v in now.items() if self._known[number].get(n, group) != v}
            if changed:
                self.changes.append(Change(step, number, changed))
                self._known[number] |= changed
        self._after = None if is_kept else torch.get_rng_state()

    def of_step(self, step: int) -> list[Part]:
        """What the model ran on in a step; TrainingError where nobody has told."""
        first = bisect_left(self.parts, step, key=lambda part: part.step)
        found = list(takewhile(lambda part: part.step == step, islice(self.parts, first, None)))
        if not found:
            raise TrainingError(
                f"the examples of step {step:,}",
                "none that were told",
                "call training.note(indices) before the model runs on a batch",
            )
        return found

    def apply(self, step: int, optimizer: Optimizer) -> None:
        """Give the groups the settings that a step was the first to have."""
        first = bisect_left(self.changes, step, key=lambda change: change.step)
        for change in islice(self.changes, first, None):
            if change.step > step:
                return
            if change.group >= len(optimizer.param_groups):
                raise TrainingError(
                    f"{len(optimizer.param_groups)} parameter groups, as at the start",
                    f"more from step {step:,} on",
                    "start at a later checkpoint",
                )
            optimizer.param_groups[change.group].update(change.values)


def _is_setting(name: str, value: Any) -> bool:
    single = isinstance(value, Tensor) and value.numel() == 1
    return name != "params" and (single or isinstance(value, KEPT_SETTINGS))


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """Everything that :func:`restore` needs, of any optimizer."""
    counts = hasattr(optimizer, ivon.STEPS)
    return ivon.state_dict(optimizer) if counts else optimizer.state_dict()


def restore(optimizer: Optimizer, snapshot: Snapshot) -> None:
    """Put the optimizer's state of a snapshot into another one of its kind."""
    state = snapshot.optimizer_state()
    if state is None:
        raise TrainingError(
            f"the optimizer's state after step {snapshot.step:,}",
            "a record without it",
            "record with replay=True",
        )
    if ivon.STEPS in state:
        ivon.load_state_dict(optimizer, state)
    else:
        optimizer.load_state_dict(state)


@dataclass(frozen=True)
class StoredOrder:
    """An order as few tensors: steps and lengths [M] of the parts, indices of all in a row, random
    states [R, ...] and the numbers [R] of the parts that they are of.
    """

    steps: Tensor
    lengths: Tensor
    indices: Tensor
    random_parts: Tensor
    random_states: Tensor
    changes: tuple[Change, ...]
    optimizer: str
    reduction: str
    modes: str
    clipped: int

    @classmethod
    def of(cls, order: Order) -> StoredOrder:
        """As it is."""
        drawn = [(n, p.random_state) for n, p in enumerate(order.parts)]
        states = [(n, state) for n, state in drawn if state is not None]
        nothing = torch.zeros(0, dtype=torch.long)
        return cls(
            torch.tensor([part.step for part in order.parts], dtype=torch.long),
            torch.tensor([len(part.indices) for part in order.parts], dtype=torch.long),
            torch.cat([nothing, *(part.indices for part in order.parts)]),
            torch.tensor([n for n, _ in states], dtype=torch.long),
            torch.stack([s for _, s in states]) if states else torch.zeros(0, 0).byte(),
            tuple(order.changes),
            order.optimizer,
            order.reduction,
            order.modes,
            order.clipped,
        )

    def opened(self) -> Order:
        """The order; StorageError where the parts do not fit together."""
        whole = int(self.lengths.sum()) == len(self.indices) and bool((self.lengths >= 0).all())
        fits = len(self.steps) == len(self.lengths) and len(self.random_parts) == len(
            self.random_states
        )
        check_that(whole and fits, "steps, lengths and indices of one order", "others")
        # copies: torch's generators want a state at the start of its memory
        rows_of_states = [state.clone() for state in self.random_states]
        states = dict(zip(self.random_parts.tolist(), rows_of_states, strict=True))
        rows: Sequence[Tensor] = self.indices.split(self.lengths.tolist())
        both = enumerate(zip(self.steps.tolist(), rows, strict=True))
        parts = [Part(step, row, states.get(n)) for n, (step, row) in both]
        known: list[dict[str, Any]] = []
        for change in self.changes:
            while len(known) <= change.group:
                known.append({})
            known[change.group] |= change.values
        facts = (self.optimizer, self.reduction, self.modes, self.clipped)
        return Order(parts, list(self.changes), *facts, known)
