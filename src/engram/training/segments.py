"""A record by the names of a model's parameters, and its stretches of equal training time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from engram.core.arguments import MANY, whole
from engram.core.parameters import Named
from engram.engine.views import Augment
from engram.errors import ModelMismatchError
from engram.training.checkpoints import TIME, Checkpoint, Snapshot, key, relative_times, totals
from engram.training.visits import Visits

# A gradient this far below those of the others, in units of the type's rounding error, is nothing
# but rounding. Measured: the bias of a convolution before BatchNorm 4 to 60 units, in single and in
# double precision; the smallest of a plain net of ten layers 800,000 in single
ROUNDING = 1000.0


@dataclass(frozen=True)
class Segment:
    """Consecutive steps of a training.

    Args:
        start: the step before its first; 0 for the first segment.
        end: its last step.
        middle: the checkpoint nearest to its middle, by training time.
        last: the checkpoint at its end.
        before: what had gone by when it began; None at the start of the record.
        likes: type and device of the parameters, by name.
        named: what the steps said about their examples, where they named them.
        after: of a segment that is the whole training, what was recorded next after its middle.
    """

    start: int
    end: int
    middle: Checkpoint
    last: Checkpoint
    before: Snapshot | None = field(repr=False)
    likes: Mapping[str, Like] = field(repr=False)
    named: Visits | None = field(default=None, repr=False)
    after: Snapshot | None = field(default=None, repr=False)

    @property
    def visits(self) -> Callable[[Tensor], tuple[Tensor, Tensor]] | None:
        """A function that gives examples' mean predictions at their visits in the segment.

        ``segment.visits(indices)`` has the means [B, K] and the numbers of visits [B]; where an
        example was not visited, its mean is NaN. None where the steps have not named examples.
        """
        if self.named is None or not self.named.keeps_predictions:
            return None
        return partial(self.named.mean_predictions, start=self.start, end=self.end)

    @property
    def time(self) -> Named:
        """C within the segment, by name."""
        return reached(self._within(0))

    @property
    def time_of_middle(self) -> Named:
        """C as it goes with the gradients of the middle, where these stand for the segment's.

        An adaptive step divides gradients by their own size. Those of a net with a new head are
        small in its first steps, and learning rates over these small roots, with the larger
        gradients of the middle, would be steps that nobody took. So of a segment that is the whole
        training it is the time from the middle to what was recorded next, at as many steps as
        there were. An entry that a gradient reached late has no more than it had.
        """
        times, after = self._within(0), self.after
        if after is None:
            return reached(times)
        first, last = self.middle.snapshot.read(), after.read()
        share = (self.end - self.start) / (after.step - self.middle.step)
        found = dict(times)
        for name, number in self.middle.numbers.items():
            if times[name].dim() and key(TIME, number) in first:
                passed = totals(last, number)[0] - totals(first, number)[0]
                own = self.likes[name].of(passed * share)
                found[name] = torch.where(own > 0, own.minimum(times[name]), times[name])
        return reached(found)

    @property
    def decay(self) -> Named:
        """W within the segment, by name."""
        return self._within(1)

    def _within(self, which: int) -> Named:
        """At its end minus at its start: C or W, 0 where no gradient has arrived."""
        end = self.last.snapshot.read()
        start = {} if self.before is None else self.before.read()
        found = {}
        for name, number in self.last.numbers.items():
            value = totals(end, number)[which]
            if key(TIME, number) in start:
                value = value - totals(start, number)[which]
            found[name] = self.likes[name].of(value)
        return found


def reached(times: Mapping[str, Tensor]) -> Named:
    """Times in which entries that no gradient has reached have the mean time of the others.

    Theirs means nothing, whatever it is; as 0 it would hold all directions that they have part in.

    Example:
        >>> reached({"weight": torch.tensor([0.0, 1.0, 3.0])})
        {'weight': tensor([2., 1., 3.])}
    """
    found = {}
    for name, time in times.items():
        without = time == 0
        count = (~without).sum().clamp(min=1)
        found[name] = torch.where(without, time.sum() / count, time)
    return found


@dataclass(frozen=True)
class Like:
    """Where and in which type a parameter's numbers are given; halves in single precision."""

    device: torch.device
    dtype: torch.dtype

    @classmethod
    def to(cls, parameter: Tensor) -> Like:
        """As the parameter is."""
        half = parameter.dtype in (torch.float16, torch.bfloat16)
        return cls(parameter.device, torch.float32 if half else parameter.dtype)

    def of(self, value: Tensor | float) -> Tensor:
        """A new tensor of this kind."""
        kind = {"device": self.device, "dtype": self.dtype}
        given = isinstance(value, Tensor)
        return value.to(**kind, copy=True) if given else torch.tensor(value, **kind)  # type: ignore


@dataclass(frozen=True)
class NamedTraining:
    """What a training has done to the parameters of a model, by their names.

    Args:
        num_steps: that were recorded.
        time: C, of the parameter's shape, or without axes where it is one number for all entries.
        decay: W, likewise.
        moved: whether training can move it at all: a bias before BatchNorm, say, gets gradients
            that are rounding errors, and its time means nothing.
        snapshots: in the order of their steps; the last one is the end of training.
        numbers: of the parameters in the snapshots, by name.
        likes: type and device of the parameters.
        visits: what the steps said about their examples; None where they named none.
        seconds: that the steps took; None where that is not known.
        augment: what the loop did to its inputs, where it did something.
    """

    num_steps: int
    time: Named = field(repr=False)
    decay: Named = field(repr=False)
    moved: Mapping[str, bool] = field(repr=False)
    snapshots: Sequence[Snapshot] = field(repr=False)
    numbers: Mapping[str, int] = field(repr=False)
    likes: Mapping[str, Like] = field(repr=False)
    sizes: Mapping[str, int] = field(repr=False)
    visits: Visits | None = field(default=None, repr=False)
    seconds: float | None = None
    augment: Augment | None = field(default=None, repr=False)

    def prior_precision(self, num_data: int) -> Named:
        """delta = N W / C by name: the prior precision that the weight decay stands for.

        Args:
            num_data: N, the number of training examples.
        """
        size = whole("num_data", num_data, remedy="count the training examples")
        none = torch.finfo(torch.float32).tiny  # where there is no time there is no decay either
        return {
            name: size * self.decay[name] / time.clamp(min=none) for name, time in self.time.items()
        }

    def segments(self, count: int) -> list[Segment]:
        """Consecutive segments of about equal training time that cover the whole record.

        Args:
            count: that are wanted; there are fewer where there are not so many checkpoints.
        """
        count = whole("number of segments", count, 1, MANY, "use 3")
        points = [s for s in self.snapshots if s.step > 0]
        times = self._times(points)
        ends = _chosen(times, min(count, len(points)))
        found = []
        for first, last in zip([-1, *ends[:-1]], ends, strict=True):
            before = points[first] if first >= 0 else None
            began = times[first] if first >= 0 else 0.0
            middle = _nearest(times, (began + times[last]) / 2, first + 1, last)
            after = points[middle + 1] if len(ends) == 1 and middle < last else None
            found.append(
                Segment(
                    before.step if before is not None else 0,
                    points[last].step,
                    self._checkpoint(points[middle]),
                    self._checkpoint(points[last]),
                    before,
                    {name: self.likes[name] for name in self.numbers},
                    self.visits,
                    after,
                )
            )
        return found

    def _times(self, points: Sequence[Snapshot]) -> list[float]:
        sizes = [0] * (max(self.numbers.values()) + 1)
        for name, number in self.numbers.items():
            sizes[number] = self.sizes[name] if self.moved[name] else 0
        return relative_times([point.readings for point in points], sizes)

    def _checkpoint(self, snapshot: Snapshot) -> Checkpoint:
        return Checkpoint(snapshot.step, snapshot, self.numbers)


def _nearest(times: Sequence[float], wanted: float, first: int, last: int) -> int:
    return min(range(first, last + 1), key=lambda place: abs(times[place] - wanted))


def _chosen(times: Sequence[float], count: int) -> list[int]:
    """Places of the ends of ``count`` segments of about equal time, each one place or more long.

    Example:
        >>> _chosen([0.1, 0.3, 0.5, 0.6, 1.0], 2)
        [2, 4]
    """
    ends: list[int] = []
    for number in range(1, count):
        first = ends[-1] + 1 if ends else 0
        ends.append(_nearest(times, number / count, first, len(times) - 1 - (count - number)))
    return [*ends, len(times) - 1]


Shapes = Sequence[tuple[int, ...]]


def matched(
    parameters: Mapping[str, Tensor],
    recorded: Sequence[Tensor],
    names: Sequence[str] | None,
    shapes: Shapes,
) -> dict[str, int]:
    """Numbers of a model's parameters in a record, by name; ModelMismatchError for another model.

    Args:
        parameters: of the model that are trainable.
        recorded: the parameters themselves, where they were recorded in this process.
        names: that they had in their model, where it is known.
        shapes: of those in the record.
    """
    places = {id(p): number for number, p in enumerate(recorded)}
    found = {name: places[id(p)] for name, p in parameters.items() if id(p) in places}
    if found:
        return found
    if names is not None:
        order = {name: number for number, name in enumerate(names)}
        found = {name: order[name] for name in parameters if name in order}
    elif len(parameters) == len(shapes):
        found = {name: number for number, name in enumerate(parameters)}
    own = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    if not found or any(shapes[number] != own[name] for name, number in found.items()):
        raise ModelMismatchError(
            f"the model of this record, with {len(shapes)} trained parameters of shapes "
            f"{shapes_of(shapes)}",
            f"one with {len(parameters)}, {shapes_of(list(own.values()))}",
            "pass the model whose parameters the recorded optimizer trained; where a copy is "
            "meant, name its parameters with engram.record(optimizer, model)",
        )
    return found


def shapes_of(shapes: Shapes) -> str:
    """The first few in words."""
    words = [str(list(shape)) for shape in shapes]
    return ", ".join(words[:4]) + (", ..." if len(words) > 4 else "")


def moved(
    parameters: Mapping[str, Tensor], numbers: Mapping[str, int], largest: Sequence[float]
) -> dict[str, bool]:
    """Whether the gradients of each were more than rounding errors of those of the others.

    Args:
        parameters: of the model.
        numbers: in the record, of those that are in it.
        largest: root mean square of a gradient's entries, the largest in the training.
    """
    sizes = sorted(largest[number] for number in numbers.values())
    typical = sizes[len(sizes) // 2]
    found = dict.fromkeys(parameters, False)
    for name, number in numbers.items():
        unit = torch.finfo(parameters[name].dtype).eps
        found[name] = largest[number] > ROUNDING * unit * typical
    return found
