"""What two runs of a model tell: which dimension counts examples, whether rows stay in order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from engram.engine.interception import Paths, tensors
from engram.engine.probe import Alignment, Probe, ShapeLog, scaling


@pytest.mark.parametrize(
    ("two", "three", "expected"),
    [
        ((2, 5), (3, 5), (0, 1)),
        ((5, 2), (5, 3), (1, 1)),
        ((8, 5), (12, 5), (0, 4)),
        ((4, 5), (4, 5), None),
        ((2, 2), (3, 3), (-1, 0)),
        ((5, 4), (7, 4), (-1, 0)),
        ((2, 4), (2, 4, 1), (-1, 0)),
    ],
)
def test_the_dimension_that_counts_examples(
    two: tuple[int, ...], three: tuple[int, ...], expected: tuple[int, int] | None
) -> None:
    """Also several entries an example; -1 where no example owns what grows."""
    assert scaling(torch.Size(two), torch.Size(three)) == expected


X = torch.arange(6.0).reshape(2, 3)
LOST: dict[str, tuple[Callable[..., object], tuple[object, ...]]] = {
    "sort": (torch.sort, (X, 0)),
    "argsort of the last": (torch.argsort, (X, -2)),
    "mask": (torch.masked_select, (X, X > 1)),
    "row by number": (Tensor.__getitem__, (X, 1)),
    "rows by list": (Tensor.__getitem__, (X, [1, 0])),
    "split": (torch.split, (X, 1)),
    "topk": (torch.topk, (X, 1, 0)),
    "positions": (torch.where, (X,)),
}
KEPT: dict[str, tuple[Callable[..., object], tuple[object, ...]]] = {
    "sort of columns": (torch.sort, (X, 1)),
    "last by default": (torch.sort, (X,)),
    "columns": (Tensor.__getitem__, (X, (slice(None), 1))),
    "all but one dimension": (Tensor.__getitem__, (X, (Ellipsis, 0))),
    "slice": (Tensor.__getitem__, (X, slice(0, 2))),
    "split of columns": (torch.split, (X, 1, 1)),
    "sum": (torch.add, (X, X)),
}


def follows(function: Callable[..., object], args: tuple[object, ...]) -> tuple[bool, bool]:
    """Whether rows are reordered, and whether the result is lost by it."""
    alignment = Alignment([X], lambda tensor: 0)
    made = tensors(function(*args))
    reordered = alignment.note(function, args, {}, tensors(args), made)
    return reordered, alignment.lost(made)


@pytest.mark.parametrize("name", LOST)
def test_operations_that_pick_or_reorder_rows(name: str) -> None:
    assert follows(*LOST[name]) == (True, True)


@pytest.mark.parametrize("name", KEPT)
def test_operations_that_leave_rows_in_their_order(name: str) -> None:
    assert follows(*KEPT[name]) == (False, False)


def test_rows_picked_by_data_and_by_constants() -> None:
    alignment = Alignment([X], lambda tensor: 0)
    constant, drawn = torch.tensor([1, 0]), X[:, 0].long()
    alignment.note(Tensor.long, (X,), {}, [X], [drawn])
    for index, expected in ((constant, False), (drawn, True)):
        args = (X, 0, index)
        made = [torch.index_select(*args)] if not expected else [X.clone()]
        assert alignment.note(torch.index_select, args, {}, [X, index], made) == expected
    later = X + 1
    assert not alignment.note(torch.add, (made[0], 1), {}, made, [later])
    assert alignment.lost([later])
    alignment.found([later])
    assert not alignment.lost([later])


class Net(nn.Module):
    """One use of a parameter of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 3))
        self.scale = nn.Parameter(torch.ones(3))
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        token = self.token.expand(len(x), 1, 3)
        rows = torch.cat([token, x[:, None]], 1) * self.scale.exp()
        outputs: Tensor = self.layer(rows).sum(1)
        return outputs


def test_every_use_of_a_parameter_has_its_kind() -> None:
    model = Net()
    two, three = (torch.randn(2, 3),), (torch.randn(3, 3),)
    log = ShapeLog()
    with log:
        model(*three)
    with Paths(model) as paths:
        probe = Probe(model, log, paths, two, three)
        with probe:
            model(*two)
    assert [(use.kind, use.names) for use in probe.uses] == [
        ("expand", ("token",)),
        ("derived", ("scale",)),
        ("copies", ("scale",)),
        ("rule", ("layer.weight", "layer.bias")),
    ]
    assert probe.same_operations
    assert not probe.unhandled
