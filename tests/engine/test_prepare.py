"""From a model to a checked plan: units as small as can be and as wide as must be."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engram.core.data.batches import Batches
from engram.core.state.model import state_preserved
from engram.engine.prepare import Engine, around, lies_in, outermost, prepare, rounds

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3


def prepared(model: nn.Module) -> Engine:
    with state_preserved(model):
        return prepare(model, Batches((X, Y), 1))


def test_names_of_modules() -> None:
    assert outermost({"a", "a.b", "c.d", "c.dd"}) == {"a", "c.d", "c.dd"}
    assert outermost({"", "a"}) == {""}
    assert around({"a.b", "c"}) == {"a", ""}
    assert lies_in("a.b", "a")
    assert lies_in("a", "")
    assert not lies_in("ab", "a")
    assert rounds(nn.Sequential(nn.Sequential(nn.Linear(1, 1)))) == 6


class Sorting(nn.Module):
    """Sorts the rows of a batch, works on them and puts them back."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        outputs: Tensor = self.inner(x[order])[order.argsort()]
        return outputs


def test_what_moves_its_rows_is_a_unit_and_the_rest_keeps_its_rules() -> None:
    engine = prepared(nn.Sequential(Sorting(), nn.Tanh(), nn.Linear(4, 3)))
    assert set(engine.plan.units) == {"0"}
    assert engine.coverage.ways == {
        "0.inner.weight": "unit",
        "0.inner.bias": "unit",
        "2.weight": "rule",
        "2.bias": "rule",
    }
    assert engine.coverage.exact == 15
    assert engine.coverage.fallback == 20


def test_a_frozen_and_an_unused_parameter_are_counted() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    model.register_parameter("spare", nn.Parameter(torch.ones(7)))
    coverage = prepared(model).coverage
    assert (coverage.exact, coverage.fallback, coverage.frozen, coverage.unused) == (15, 0, 20, 7)
    assert coverage.total == 42


class TwiceDetached(torch.autograd.Function):
    """A square whose backward takes its input for a constant."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        ctx.kept = x.detach()  # type: ignore[attr-defined]
        return x.square()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        kept: Tensor = ctx.kept  # type: ignore[attr-defined]
        return 2 * kept * gradients[0]


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = TwiceDetached.apply(self.layer(x))  # type: ignore[no-untyped-call]
        return result


def test_a_hessian_that_lacks_a_part_is_noticed() -> None:
    engine = prepared(Squared())
    assert engine.doubtful == ("TwiceDetached",)
    assert not engine.true_hessian
    assert prepared(nn.Linear(4, 3)).true_hessian


def test_layers_that_mix_examples_are_listed() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval()
    assert prepared(model).mixing == (model[1],)
