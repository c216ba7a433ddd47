"""Gradients that are kept short: of few entries exactly, of many in the mean over signs."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from engram.engine.session import Session, session
from engram.likelihoods import resolve
from engram.sensitivity.trajectory import gradient_sketch, held_out
from engram.sensitivity.trajectory.gradient_products import Products, gradient_products
from engram.sensitivity.trajectory.gradient_sketch import Sketch, entries_kept, groups_of
from engram.sensitivity.trajectory.held_out import held_out_leverage, rows_added, rows_held
from engram.sensitivity.trajectory.samples import Sample

OUT, SEEN, WORDS = 6, 18, 30


class Text(nn.Module):
    """Tokens, a layer at each of them, and a head that has the table of the tokens too."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 5, padding_idx=0)
        self.mixed = nn.Linear(5, 5)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, WORDS if tied else 3, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.mixed(self.table(tokens)))
        return self.head(self.norm(hidden).mean(1))[:, :3]


def text(tied: bool) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The model and sentences in which words come more than once, and padding."""
    torch.manual_seed(0)
    tokens = torch.randint(8, (OUT + SEEN, 7)) * 3
    return Text(tied).double(), (tokens, torch.randint(3, (OUT + SEEN,)))


def times_of(model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        name: torch.rand(p.shape, generator=generator).double() + 0.1
        for name, p in model.named_parameters()
    }


def products(opened: Session, times: Mapping[str, Tensor], size: int) -> Products:
    groups = (torch.arange(OUT), torch.arange(OUT, OUT + SEEN))
    sample = Sample(opened, groups, num_outputs=3, seed=0, roots=3, room=0)
    return gradient_products(sample.batches(), OUT, OUT + SEEN, times, size)


def dense(model: nn.Module, data: tuple[Tensor, Tensor], times: Mapping[str, Tensor]) -> Tensor:
    """All gradients times roots of their times, [M, P], by a backward pass for each."""
    likelihood, found = resolve("categorical").for_outputs((3,)), []
    parameters = dict(model.named_parameters())
    for x, y in zip(data[0].split(1), data[1].split(1), strict=True):
        outputs = model(x)
        root = likelihood.hessian_factor(outputs.detach(), likelihood.prepare(outputs, y))
        for r in range(root.shape[2]):
            total = (outputs * root[:, :, r]).sum()
            own = torch.autograd.grad(total, parameters.values(), retain_graph=True)
            parts = [(g * times[n].sqrt()).flatten() for n, g in zip(parameters, own, strict=True)]
            found.append(torch.cat(parts))
    return torch.stack(found)


@pytest.mark.parametrize("tied", [False, True])
def test_products_of_texts_are_those_of_the_gradients(tied: bool) -> None:
    """Embeddings go by their rows; a table that is a head too is both."""
    model, data = text(tied)
    times = times_of(model)
    with session(model, data, "categorical", batch_size=5, progress=False) as opened:
        found = products(opened, times, 1)
    gradients = dense(model, data, times)
    roots = len(gradients) // (OUT + SEEN)
    held, seen = gradients[: OUT * roots], gradients[OUT * roots :]
    assert found.seen.shape == (SEEN, roots, SEEN, roots)
    torch.testing.assert_close(found.seen.flatten(0, 1).flatten(1), seen @ seen.mT)
    torch.testing.assert_close(found.cross.flatten(0, 1).flatten(1), held @ seen.mT)
    assert found.energy == pytest.approx(float(held.square().sum()) / OUT)


@pytest.mark.parametrize("tied", [False, True])
def test_a_sketch_has_the_same_products_in_the_mean(
    tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over many draws of signs; rows do not go into the groups evenly."""
    monkeypatch.setattr(gradient_sketch, "FEWEST_KEPT", 1)
    model, data = text(tied)
    times, drawn = times_of(model), []
    with session(model, data, "categorical", progress=False) as opened:
        wanted = products(opened, times, 1).seen
        for seed in range(300):
            monkeypatch.setattr(gradient_sketch, "SKETCH_SEED", seed)
            drawn.append(products(opened, times, 4).seen)
    mean, spread = torch.stack(drawn).mean(0), torch.stack(drawn).std(0) / len(drawn) ** 0.5
    assert float(torch.stack(drawn).std(0).max()) > 1e-3 * float(wanted.abs().max())
    assert ((mean - wanted).abs() < 5.5 * spread + 1e-9).all()


def test_rows_of_tokens_are_the_rows_of_the_whole_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    sketch = Sketch(torch.randn(11, 4, generator=generator).double(), groups=3)
    picked = torch.randint(11, (6, 9), generator=generator)
    gradients = torch.randn(6, 9, 4, generator=generator).double()
    whole = gradients.new_zeros(6, 11, 4)
    whole.scatter_add_(1, picked[:, :, None].expand_as(gradients), gradients)
    torch.testing.assert_close(sketch.of_rows(picked, gradients), sketch.of(whole))


def test_what_is_kept_does_not_grow_with_the_net() -> None:
    """Large nets have as many examples as middling ones; small ones are whole."""
    small = [(500, 784), (500,), (10, 500)]
    assert rows_added(small) == 1
    assert entries_kept(small, 1) == sum(torch.Size(shape).numel() for shape in small)
    for width in (2_000, 8_000, 32_000):
        shapes = [(width, width), (width,)] * 6
        kept = entries_kept(shapes, rows_added(shapes))
        assert kept < 3 * gradient_sketch.ENTRIES_KEPT
        assert rows_held(kept) > 1.5 * held_out.FEWEST_HELD * held_out.ROOTS
    assert groups_of((), 5) == 1


def test_a_leverage_is_that_of_whole_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer at every position with 60 times as many entries as examples, a tenth of them left."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 120),
        nn.Tanh(),
        nn.Linear(120, 120),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(480, 3),
    ).double()
    data = (torch.randn(240, 4, 16).double(), torch.randint(3, (240,)))
    groups = (torch.arange(60), torch.arange(60, 240))
    times = {name: torch.full_like(p, 30.0) for name, p in model.named_parameters()}
    with session(model, data, "categorical", progress=False) as opened:
        sample = Sample(opened, groups, num_outputs=3, seed=0, roots=3, room=0)
        found = [
            held_out_leverage(gradient_products(sample.batches(), 60, 240, times, size), 400)
            for size in (1, 10)
        ]
    assert found[1] == pytest.approx(found[0], rel=0.05)
