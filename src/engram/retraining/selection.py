"""Which examples, groups or classes a run leaves out, one copy of the model for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engram.core.arguments import shown, whole
from engram.core.data.batches import Batches, Data
from engram.core.selection import check_indices
from engram.errors import ArgumentError
from engram.likelihoods import Likelihood
from engram.sensitivity.groups import class_numbers

Indices = Sequence[int] | Tensor
EXAMPLES_AT_ONCE = 256  # read together where only outputs, targets or digests are kept
NOTHING = torch.empty(0, dtype=torch.long)  # what a refit with everything leaves out


@dataclass(frozen=True)
class Selection:
    """The left-out examples of each copy.

    Args:
        kind: ``examples``, ``groups`` or ``classes``.
        labels: the name of each copy: its example, its group's name or its class.
        members: positions of its left-out examples.
    """

    kind: str
    labels: tuple[str, ...]
    members: tuple[Tensor, ...]

    def __len__(self) -> int:
        return len(self.members)


def select(
    batches: Batches,
    indices: Indices | None,
    groups: Mapping[str, Indices] | Sequence[Indices] | None,
    classes: bool | Sequence[int] | None,
) -> Selection:
    """Turn exactly one of the three choices into a selection; all examples if none is given."""
    given = [
        name
        for name, choice in (("indices", indices), ("groups", groups), ("classes", classes))
        if choice is not None and choice is not False
    ]
    if len(given) > 1:
        raise ArgumentError(
            "one of indices, groups and classes", " and ".join(given), "call once for each"
        )
    if groups is not None:
        return _groups(groups, batches.num_data)
    if classes is not None and classes is not False:
        return _classes(classes, batches)
    chosen = check_indices(indices, batches.num_data)
    labels = tuple(str(int(i)) for i in chosen)
    return Selection("examples", labels, tuple(i[None] for i in chosen))


def select_nothing_else(indices: object, groups: object, classes: object) -> None:
    """ArgumentError where examples are chosen beside ``subsets``, which leave out all in turn."""
    for name, choice in (("indices", indices), ("groups", groups), ("classes", classes)):
        if choice is not None and choice is not False:
            raise ArgumentError("either subsets or a choice of examples", f"{name} too", "drop it")


def check_no_workers(workers: object) -> None:
    """ArgumentError for workers of a run without subsets."""
    if workers != 1:
        raise ArgumentError(
            "workers= beside subsets=",
            shown(workers),
            "leave it out; processes that torchrun starts share copies through a folder",
        )


def _groups(groups: Mapping[str, Indices] | Sequence[Indices], num_data: int) -> Selection:
    named = groups if isinstance(groups, Mapping) else dict(enumerate(_as_list(groups, "groups")))
    labels = tuple(str(name) for name in named)
    if not labels:
        raise ArgumentError("at least one group", "none", "give a list of lists of indices")
    if len(set(labels)) != len(labels):
        twice = next(label for label in labels if labels.count(label) > 1)
        raise ArgumentError("groups with different names", f"{twice!r} twice", "rename one of them")
    members = tuple(check_indices(chosen, num_data) for chosen in named.values())
    _check_some_remain(labels, members, num_data)
    return Selection("groups", labels, members)


def _classes(classes: bool | Sequence[int], batches: Batches) -> Selection:
    numbers = class_numbers(batches)
    present = numbers.unique().tolist()
    asked = present if classes is True else _as_list(classes, "classes")
    chosen = [whole("number of a class", label, low=min(present)) for label in asked]
    missing = [label for label in chosen if label not in present]
    if missing or not chosen or len(set(chosen)) != len(chosen):
        raise ArgumentError(
            f"classes among {', '.join(map(str, present))}",
            str(missing[0]) if missing else f"{chosen}" if chosen else "none",
            "classes=True leaves out each class in turn",
        )
    members = tuple((numbers == label).nonzero()[:, 0] for label in chosen)
    labels = tuple(str(label) for label in chosen)
    _check_some_remain(labels, members, batches.num_data)
    return Selection("classes", labels, members)


def _as_list(values: Any, name: str) -> list[Any]:
    if isinstance(values, Tensor) and values.dim():
        return list(values.tolist())
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ArgumentError(f"a list of {name}", shown(values), f"give {name} in a list")
    return list(values)


def _check_some_remain(
    labels: Mapping[str, Indices] | Sequence[str], members: Sequence[Tensor], num_data: int
) -> None:
    for label, chosen in zip(labels, members, strict=True):
        if len(chosen) == num_data:
            raise ArgumentError(
                "groups that leave some examples to train on",
                f"{label!r} with all {num_data} of them",
                "leave some examples out of the group, or drop the group",
            )


@dataclass(frozen=True)
class Task:
    """A retraining run, for whichever worker trains it.

    Args:
        selection: which examples each copy leaves out.
        likelihood: of the data.
        evaluate_on: other data whose losses are wanted for every copy.
        refits: trainings with nothing left out; the first is the baseline.
        keep_models: whether the parameters of every copy are kept.
        seed: of all trainings.
    """

    selection: Selection
    likelihood: Likelihood
    evaluate_on: Data | None
    refits: int
    keep_models: bool
    seed: int
