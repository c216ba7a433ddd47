"""The record of a training: its time and decay per parameter, its steps, its checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from engram.core.parameters import check_module, trainable
from engram.errors import ModelMismatchError, NonFiniteError, TrainingError
from engram.training.checkpoints import Grid, Snapshot
from engram.training.clock import ParameterClock
from engram.training.segments import Like, NamedTraining

# A gradient this far below those of the others, in units of the type's rounding error, is nothing
# but rounding. Measured: the bias of a convolution before BatchNorm 4 to 60 units, in single and in
# double precision; the smallest of a plain net of ten layers 800,000 in single
ROUNDING = 1000.0


class Source(Protocol):
    """The optimizer that a record follows."""

    def catch_up(self) -> None:
        """Bring C and W up to the last step."""

    def snapshot(self) -> Snapshot:
        """Weights, C and W as they are now."""

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
    _source: Source | None = field(default=None, repr=False)
    _end: Snapshot | None = field(default=None, repr=False)

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
        numbers = self._numbers(parameters)
        snapshots = self._snapshots()
        self._check()
        likes = {name: Like.to(parameter) for name, parameter in parameters.items()}
        moved = self._moved(parameters, numbers)
        time: dict[str, Tensor] = {}
        decay: dict[str, Tensor] = {}
        for name, like in likes.items():
            clock = self.clocks[numbers[name]] if name in numbers else ParameterClock(())
            spent, shrunk = clock.totals()
            time[name], decay[name] = like.of(spent), like.of(shrunk)
        sizes = {name: parameter.numel() for name, parameter in parameters.items()}
        return NamedTraining(self.num_steps, time, decay, moved, snapshots, numbers, likes, sizes)

    @property
    def is_recording(self) -> bool:
        """Whether steps of the optimizer are being recorded."""
        return self._source is not None

    def stop(self) -> None:
        """End recording: remove the hooks from the optimizer."""
        if self._source is not None:
            self._snapshots()
            self._source.remove()
        self._source = None

    def _snapshots(self) -> list[Snapshot]:
        """The grid's, and the end."""
        if self._source is not None:
            self._source.catch_up()
            if self._end is None or self._end.step != self.num_steps:
                self._end = self._source.snapshot()
        found = [s for s in self.grid.snapshots if s.step < self.num_steps]
        return found if self._end is None else [*found, self._end]

    def _numbers(self, parameters: Mapping[str, Tensor]) -> dict[str, int]:
        """Places in the record, by name."""
        places = {id(p): number for number, p in enumerate(self.parameters)}
        found = {name: places[id(p)] for name, p in parameters.items() if id(p) in places}
        if found:
            return found
        if self.names is not None:
            order = {name: number for number, name in enumerate(self.names)}
            found = {name: order[name] for name in parameters if name in order}
        elif len(parameters) == len(self.clocks):
            found = {name: number for number, name in enumerate(parameters)}
        shapes = {name: tuple(parameters[name].shape) for name in found}
        if not found or any(self.clocks[n].shape != shapes[name] for name, n in found.items()):
            raise ModelMismatchError(
                f"the model of this record, with {len(self.clocks)} trained parameters of shapes "
                f"{_shapes(clock.shape for clock in self.clocks)}",
                f"one with {len(parameters)}, {_shapes(p.shape for p in parameters.values())}",
                "pass the model whose parameters the recorded optimizer trained; where a copy is "
                "meant, name its parameters with engram.record(optimizer, model)",
            )
        return found

    def _check(self) -> None:
        """Errors for a record that says nothing."""
        if not self.num_steps - self.num_bad_steps > 0:
            raise TrainingError(
                "a record of at least one step",
                f"{self.num_steps:,} steps, {self.num_bad_steps:,} of them bad",
                "call engram.record(optimizer) before the training loop",
            )
        totals = [clock.totals()[0] for clock in self.clocks]
        if not any(bool(torch.as_tensor(total > 0).any()) for total in totals):
            raise TrainingError(
                "a training time above 0",
                f"learning rates of 0 in all {self.num_steps:,} steps",
                "record a training that moves the weights",
            )
        if not all(bool(torch.as_tensor(total).isfinite().all()) for total in totals):
            raise NonFiniteError(
                "a finite training time",
                "an infinite one, or NaN",
                "give the optimizer a positive eps, and see that gradients are finite",
            )

    def _moved(
        self, parameters: Mapping[str, Tensor], numbers: Mapping[str, int]
    ) -> dict[str, bool]:
        """Whether gradients were more than rounding errors of those of the others."""
        largest = sorted(self.clocks[n].largest_gradient for n in numbers.values())
        typical = largest[len(largest) // 2]
        found = dict.fromkeys(parameters, False)
        for name, number in numbers.items():
            unit = torch.finfo(parameters[name].dtype).eps
            found[name] = self.clocks[number].largest_gradient > ROUNDING * unit * typical
        return found


def _shapes(shapes: Iterable[tuple[int, ...]]) -> str:
    words = [str(list(shape)) for shape in shapes]
    return ", ".join(words[:4]) + (", ..." if len(words) > 4 else "")
