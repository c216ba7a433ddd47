"""The worker of a replay: a recorded training walked again, once for every copy."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from engram.core.data.batches import Data
from engram.core.progress import Bar
from engram.retraining.one_by_one import copy_part, evaluated, refits_part
from engram.retraining.own_trainings import Replay
from engram.retraining.pace import say_cost
from engram.retraining.run_folder import Part
from engram.retraining.selection import Task
from engram.training.checkpoints import Checkpoint
from engram.training.replay import Path, Replayed, loss_of


@dataclass(frozen=True, eq=False)
class ReplayWorker:
    """Copies by the recorded training without their examples.

    Args:
        task: which copies.
        path: that is walked.
        model: a private copy of the trained model.
        data: training data.
        first: step after which steps are walked again; 0 for all of them.
    """

    task: Task
    path: Path
    model: nn.Module
    data: Data
    first: int = 0

    @classmethod
    def of(cls, task: Task, replay: Replay, model: nn.Module, data: Data) -> ReplayWorker:
        """The worker on a private copy of the trained model."""
        loss = loss_of(task.likelihood if replay.loss is None else replay.loss)
        path = Path(model, data, replay.training, loss, replay.optimizer, replay.before_step)
        first = path.checkpoint(int(replay.start * replay.training.num_steps)).step
        return cls(task, path, model, data, first)

    @property
    def num_refits(self) -> int:
        """Trainings with nothing left out; the other one is the recorded training itself."""
        return 1

    def say_cost(self, trainings: int, shown: bool) -> None:
        """What they will take, measured on some steps; of each copy those from where it differs."""
        members = self.task.selection.members
        whole = self.path.training.num_steps - self.first
        walked = sum(self.path.training.num_steps - self._start(one).step for one in members)
        copies = trainings - self.num_refits
        steps = (self.num_refits * whole + copies * walked / max(1, len(members))) / trainings
        how = f"{steps:,.0f} of {whole:,} recorded steps, measured on the first"
        say_cost(trainings, steps * self.path.seconds_per_step(), how, shown)

    def refit(self, bar: Bar) -> Part:
        """The recorded training walked again, beside the trained model: the same, bit for bit."""
        began = time.perf_counter()
        again = self._walked(None, bar).model
        both = [evaluated(self.task, self.data, model) for model in (again, self.model)]
        return refits_part(both, began)

    def copies(self, numbers: Sequence[int], baseline: Tensor, bar: Bar) -> Iterator[Part]:
        """Left-out copies, one at a time."""
        for number in numbers:
            began = time.perf_counter()
            trained = self._walked(self.task.selection.members[number], bar).model
            yield copy_part(self.task, self.data, number, trained, self.model, began)

    def _walked(self, members: Tensor | None, bar: Bar) -> Replayed:
        """One training, counted on the bar as 1; up to an example's first visit it is known."""
        path, first = self.path, self.first
        start = self._start(members)
        steps = path.training.num_steps - first
        step = partial(bar.update, 1 / steps)
        bar.update((start.step - first) / steps)
        return path.walked(start, members, progress=False, on_step=step)

    def _start(self, members: Tensor | None) -> Checkpoint:
        """Where a walk begins: no later than the first visit of what it leaves out."""
        begins = self.path.checkpoint(self.first)
        if members is None:
            return begins
        before = self.path.before(members)
        return before if before.step > begins.step else begins
