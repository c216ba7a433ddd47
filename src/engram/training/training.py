"""The record of a training: its time and decay per parameter, its steps, its checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engram.core.arguments import path_of
from engram.core.parameters import check_module, trainable, uncompiled
from engram.core.storage.files import remove_stale
from engram.core.storage.kinds import AGAIN, Kind, stored
from engram.core.storage.values import as_read, init_fields
from engram.engine.views import Augment
from engram.errors import DataError, ModelMismatchError, NonFiniteError, StorageError, TrainingError
from engram.likelihoods import Categorical
from engram.training.checkpoints import NAMES, Grid, Snapshot, taken, totals
from engram.training.clock import ParameterClock
from engram.training.guess import Known, guessed
from engram.training.order import Order, StoredOrder
from engram.training.saving import StoredSnapshot, StoredTraining, read
from engram.training.segments import Like, NamedTraining, matched, moved, reached, shapes_of
from engram.training.stopwatch import Stopwatch
from engram.training.visits import Indices, Visits, positions

# Of the highest named example: draws with replacement, or a short training, miss only the last few
UNSEEN = 1.25


class Source(Protocol):
    """The optimizer that a record follows."""

    def snapshot(self) -> Snapshot:
        """Weights, C and W as they are now."""

    def steps_taken(self) -> int:
        """That the optimizer's state knows of."""

    @property
    def has_loader(self) -> bool:
        """Whether a loader names the examples of the steps."""

    def before_forward(self) -> None:
        """The model is about to run: before the first time, the first weights are kept."""

    def restart(self, number: int) -> None:
        """Go on as after so many recorded steps."""

    def remove(self) -> None:
        """Take the hooks off the optimizer."""


@dataclass(eq=False)
class Training:
    """What :func:`engram.record` has kept of a training.

    Args:
        optimizer_name: class of the optimizer.
        clocks: training time and weight decay of every parameter, in the optimizer's order.
        grid: of checkpoints.
        names: of the parameters in the model, where it was given.
        num_steps: that were recorded.
        num_missing_steps: that had been taken before recording began, as far as the optimizer's
            state says.
        num_bad_steps: with gradients that were not finite, or a negative learning rate; nothing of
            them is in the training time.
        sees_clipping: whether the training time counts clipped gradients as the share that was left
            of them: not under a GradScaler that was not given, nor in several processes.
        guessed: whether this was made from what is known afterwards, and nothing was recorded.
        parameters: that the optimizer trains, while it is followed.
        order: of the examples, with ``replay=True``.
        seen: what the steps said about the examples that they named.
        end: weights and times after the last step, once they were asked for.
        stopwatch: seconds from step to step.
        augment: what the loop does to a batch of inputs; a function, which is not saved.
    """

    optimizer_name: str
    clocks: list[ParameterClock] = field(repr=False)
    grid: Grid = field(repr=False)
    names: list[str] | None = field(default=None, repr=False)
    num_steps: int = 0
    num_missing_steps: int = 0
    num_bad_steps: int = 0
    sees_clipping: bool = True
    guessed: bool = False
    parameters: list[Tensor] = field(default_factory=list, repr=False)
    order: Order | None = field(default=None, repr=False)
    seen: Visits = field(default_factory=lambda: Visits(Categorical()), repr=False)
    end: Snapshot | None = field(default=None, repr=False)
    stopwatch: Stopwatch = field(default_factory=Stopwatch, repr=False)
    augment: Augment | None = field(default=None, repr=False)
    _source: Source | None = field(default=None, init=False, repr=False)

    @classmethod
    def guess(
        cls,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        learning_rate: float | None = None,
        steps: int | None = None,
        weight_decay: float | None = None,
        momentum: float = 0.0,
    ) -> Training:
        r"""A training that nobody recorded, from what is known afterwards.

        .. math:: C \approx T \bar\eta\, P_T^{-1}

        Args:
            model: as it was trained.
            optimizer: as it was at the end; its state has the roots P, and mostly the number of
                steps. Without it, SGD is meant.
            learning_rate: its mean over the training; without it, the mean of the optimizer's first
                and last one, as far as a scheduler has left the first there.
            steps: T, where the optimizer's state does not say.
            weight_decay: where it is not the optimizer's.
            momentum: of an SGD without ``optimizer``.

        Returns:
            A record with ``guessed=True`` and no checkpoint but the end.

        Example:
            >>> model = nn.Linear(2, 1)
            >>> training = Training.guess(model, learning_rate=0.1, steps=30)
            >>> training.of(model).time["bias"]
            tensor(3.)
        """
        clock = guessed(model, optimizer, Known(learning_rate, steps, weight_decay, momentum))
        name, most = type(clock.optimizer).__name__, max(hand.steps for hand in clock.clocks)
        end = taken(most, clock.parameters, clock.clocks, uncompiled(model))
        return cls(
            name,
            clock.clocks,
            Grid(0),
            num_steps=most,
            guessed=True,
            parameters=clock.parameters,
            end=end,
        )

    def of(self, model: nn.Module) -> NamedTraining:
        """The record by the names of a model's parameters.

        They are found by identity; in another process, or in a copy of the model, by name where
        the record knows names, else by their order and shapes. Trainable parameters of the model
        that the optimizer did not train have a training time of 0.

        Args:
            model: that was trained.

        Raises:
            ModelMismatchError: where it is another one.
            TrainingError: where there is no training time at all.
        """
        check_module(model)
        parameters = trainable(model)
        shapes = [clock.shape for clock in self.clocks]
        numbers = matched(parameters, self.parameters, self.names, shapes)
        snapshots = self.snapshots()
        found = self._totals(snapshots)
        nothing = (torch.zeros(()), torch.zeros(()))
        likes = {name: Like.to(parameter) for name, parameter in parameters.items()}
        spent = {n: found[numbers[n]] if n in numbers else nothing for n in parameters}
        return NamedTraining(
            self.num_steps,
            reached({name: likes[name].of(time) for name, (time, _) in spent.items()}),
            {name: likes[name].of(decay) for name, (_, decay) in spent.items()},
            moved(parameters, numbers, [clock.largest_gradient for clock in self.clocks]),
            snapshots,
            numbers,
            likes,
            {name: parameter.numel() for name, parameter in parameters.items()},
            None if self.visits is None or self.visits.with_targets is None else self.visits,
            self.seconds,
            self.augment,
        )

    @property
    def seconds(self) -> float | None:
        """That the recorded steps took, pauses left out; None where fewer than two were seen."""
        each = self.stopwatch.seconds_per_step
        return None if math.isnan(each) else each * self.num_steps

    @property
    def visits(self) -> Visits | None:
        """What the steps said about the examples that they named; None where they named none."""
        return None if self.seen.is_empty else self.seen

    @property
    def num_named(self) -> int:
        """Examples that there are, as far as loader, visits or notes have named them; 0 if not."""
        noted = () if self.order is None else self.order.parts
        largest = max(
            (int(part.indices.max()) + 1 for part in noted if len(part.indices)), default=0
        )
        return max(largest, self.seen.num_data)

    def check_data(self, num_data: int) -> None:
        """DataError for data that cannot be what was trained on.

        A record that named no examples knows nothing of them, and all data will do.

        Args:
            num_data: examples of the data.
        """
        named = self.num_named
        if named and not named <= num_data <= UNSEEN * named:
            raise DataError(
                f"the data of the recorded training, {named:,} examples",
                f"{num_data:,}",
                "pass the data that the model was trained on, all of it: an example is judged "
                "beside the others, and engram.remove takes indices=",
            )

    def visit(self, indices: Indices, outputs: Any, targets: Tensor | None = None) -> None:
        """Name the examples of a forward pass of the training, before its step is taken.

        A loader that is recorded, or ``tracker.step(indices)``, does so by itself.

        Args:
            indices: positions of the batch's examples in the training data.
            outputs: of the model for them, as the training has computed them.
            targets: of the batch; with them losses are kept, for any likelihood. To be given at
                every visit or at none.

        Example:
            >>> import engram
            >>> model, x, y = nn.Linear(2, 3), torch.randn(6, 2), torch.tensor([0, 1, 2, 0, 1, 2])
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> training = engram.record(optimizer)
            >>> for batch in (torch.tensor([0, 2, 4]), torch.tensor([1, 3, 5])):
            ...     outputs = model(x[batch])
            ...     training.visit(batch, outputs)
            ...     nn.functional.cross_entropy(outputs, y[batch]).backward()
            ...     _ = optimizer.step()
            >>> training.visits
            Visits(6 of 6 examples, 6 visits, 0 passes unmatched)
        """
        if self._source is None:
            raise TrainingError(
                "a visit while the training is recorded",
                "one of a record that was stopped, loaded or guessed",
                "call engram.record(optimizer) before the loop, and stop() after it",
            )
        self.seen.add(positions(indices), outputs, targets)

    @property
    def has_loader(self) -> bool:
        """Whether a recorded loader names the examples of the steps by itself."""
        return self._source is not None and self._source.has_loader

    @property
    def is_recording(self) -> bool:
        """Whether steps of the optimizer are being recorded."""
        return self._source is not None

    def stop(self) -> None:
        """End recording: remove the hooks from the optimizer."""
        if self._source is not None:
            self.snapshots()
            self._source.remove()
        self._source = None

    def note(self, indices: Any) -> None:
        """Say which examples the model is about to run on; needed with ``replay=True`` only.

        Args:
            indices: of a batch, in the training data. Where gradients of several batches are
                accumulated, each is told.
        """
        if self.order is not None and self._source is not None:
            self._source.before_forward()
            self.order.note(self.num_steps + 1, indices)

    def follow(self, source: Source) -> None:
        """Record the steps of this optimizer from now on."""
        self._source = source

    def state_dict(self) -> dict[str, Any]:
        """What :meth:`load_state_dict` needs to go on in another process; plain values and tensors.

        Checkpoints are in it; with ``folder=`` only the names of their files are.
        """
        snapshots = self.snapshots()
        if self.grid.folder is not None:
            for snapshot in snapshots:
                if snapshot.tensors is not None:
                    snapshot.write(self.grid.folder)
        return self._plain(snapshots)

    def times_state_dict(self) -> dict[str, Any]:
        """The same without checkpoints, which are many times the size of the rest."""
        return self._plain([])

    def _plain(self, snapshots: Sequence[Snapshot]) -> dict[str, Any]:
        state: dict[str, Any] = as_read(init_fields(self._stored(snapshots)))
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the record of an earlier process, after ``engram.record`` in this one.

        Steps that the optimizer has taken since are counted as missing.

        Args:
            state: of :meth:`state_dict`, from the same place as that of the optimizer.

        Raises:
            ModelMismatchError: for the record of another optimizer or model.
            TrainingError: for a record that is ahead of the optimizer.
            StorageError: for what is no such state, or where its checkpoints are gone.
        """
        found = Training._opened(read(state, "the state of a record"), self.grid.folder)
        found._drop_missing()
        self._check_same(found)
        taken = 0 if self._source is None else self._source.steps_taken()
        counted = max((clock.steps for clock in found.clocks), default=0)
        if taken and taken < counted:
            raise TrainingError(
                f"a record of the {taken:,} steps that the optimizer has taken",
                f"one of {counted:,}",
                "load optimizer and record as they were saved together",
            )
        missed = max(0, taken - counted)
        for clock, parameter in zip(found.clocks, self.parameters, strict=False):
            clock.to(parameter.device)
            clock.steps += missed
        self.clocks[:] = found.clocks
        self.grid.snapshots, self.grid.stride = found.grid.snapshots, found.grid.stride
        self.num_steps, self.num_bad_steps = found.num_steps, found.num_bad_steps
        self.num_missing_steps = found.num_missing_steps + missed
        self.names, self.end = self.names or found.names, found.end
        self.guessed, self.order = found.guessed, found.order if self.order else None
        self.seen.load(found.seen)
        self.stopwatch = replace(found.stopwatch)
        if self._source is not None:
            self._source.restart(self.num_steps)

    def _check_same(self, found: Training) -> None:
        """ModelMismatchError unless a record is one of the same kind of training."""
        own, other = ([clock.shape for clock in t.clocks] for t in (self, found))
        if self.optimizer_name != found.optimizer_name or own[: len(other)] != other:
            raise ModelMismatchError(
                f"the record of a {self.optimizer_name} over {len(own)} parameters of shapes "
                f"{shapes_of(own)}",
                f"that of a {found.optimizer_name} over {len(other)}, {shapes_of(other)}",
                "load the record of the same training",
            )

    def save(self, folder: str | Path) -> Path:
        """Write it with its checkpoints, in files beside; :func:`engram.load` reads it."""
        path = path_of("folder", folder)
        copies = [
            Snapshot(s.step, list(s.readings), s.has_buffers, s.read(), optimizer=s.optimizer)
            for s in self.snapshots()
        ]
        for copy in copies:
            copy.write(path)
        KIND.write(Training._opened(self._stored(copies), path), path)
        keep = {copy.file.name for copy in copies if copy.file is not None}
        remove_stale(path / f"{KIND.name}.json", NAMES, keep)
        return path

    def _stored(self, snapshots: Sequence[Snapshot]) -> StoredTraining:
        """With these snapshots, of which the last is the end."""
        parts = [StoredSnapshot.of(s) for s in snapshots]
        return StoredTraining(
            self.optimizer_name,
            tuple(clock.copied() for clock in self.clocks),
            None if self.names is None else tuple(self.names),
            self.num_steps,
            self.num_missing_steps,
            self.num_bad_steps,
            self.sees_clipping,
            self.guessed,
            self.grid.wanted,
            self.grid.stride,
            tuple(parts[:-1]),
            parts[-1] if parts else None,
            None if self.order is None else StoredOrder.of(self.order),
            None if self.seen.is_empty else self.seen.copied(),
            replace(self.stopwatch),
        )

    @classmethod
    def _opened(cls, saved: StoredTraining, folder: Path | None) -> Training:
        """A record of which the files are in this folder."""
        grid = Grid(saved.checkpoints, folder, stride=saved.stride)
        grid.snapshots = [s.opened(folder) for s in saved.snapshots]
        return cls(
            saved.optimizer_name,
            list(saved.clocks),
            grid,
            None if saved.names is None else list(saved.names),
            saved.num_steps,
            saved.num_missing_steps,
            saved.num_bad_steps,
            saved.sees_clipping,
            saved.guessed,
            order=None if saved.order is None else saved.order.opened(),
            seen=saved.visits or Visits(Categorical()),
            end=None if saved.end is None else saved.end.opened(folder),
            stopwatch=saved.stopwatch,
        )

    def _drop_missing(self) -> None:
        """Drop what a training that went on has dropped since; StorageError where all are gone."""
        before = self.grid.snapshots
        self.grid.snapshots = [s for s in before if s.file is None or s.file.is_file()]
        if before and not self.grid.snapshots:
            raise StorageError(
                f"the folder of the record with its {len(before)} checkpoints",
                f"none of them in {self.grid.folder or 'no folder'}",
                "record with the folder= that the first training had",
            )

    def snapshots(self) -> list[Snapshot]:
        """Those of the grid, and the end of training as the last."""
        if self._source is not None and (self.end is None or self.end.step != self.num_steps):
            self.end = self._source.snapshot()
        found = [s for s in self.grid.snapshots if s.step < self.num_steps]
        return found if self.end is None else [*found, self.end]

    def _totals(self, snapshots: Sequence[Snapshot]) -> list[tuple[Tensor, Tensor]]:
        """C and W at the end; errors for a record that says nothing."""
        if not (snapshots and self.num_steps - self.num_bad_steps > 0):
            raise TrainingError(
                "a record of at least one step",
                f"{self.num_steps:,} steps, {self.num_bad_steps:,} of them bad",
                "call engram.record(optimizer) before the training loop",
            )
        tensors = snapshots[-1].read()
        found = [totals(tensors, number) for number in range(len(self.clocks))]
        gone_by = any(bool((time > 0).any()) for time, _ in found)
        if not gone_by and not any(clock.divided > 0 for clock in self.clocks):
            raise TrainingError(
                "a training time above 0",
                f"learning rates of 0 in all {self.num_steps:,} steps",
                "record a training that moves the weights",
            )
        if not all(bool(time.isfinite().all()) for time, _ in found):
            raise NonFiniteError(
                "a finite training time",
                "an infinite one, or NaN",
                "give the optimizer a positive eps, and see that gradients are finite",
            )
        return found


def _placed(found: Training, folder: Path) -> Training:
    """Told where its files are."""
    found.grid.folder = folder
    for snapshot in (*found.grid.snapshots, found.end):
        if snapshot is not None and snapshot.file is not None:
            snapshot.file = folder / snapshot.file.name
            if not snapshot.file.is_file():
                raise StorageError(f"the file {snapshot.file.name} in {folder}", "none", AGAIN)
    return found


KIND = stored(
    Kind(
        "training",
        1,
        lambda content, where: Training._opened(read(content, where), None),
        lambda training: init_fields(training._stored(training.snapshots())),
        read,
        placed=_placed,
    )
)
