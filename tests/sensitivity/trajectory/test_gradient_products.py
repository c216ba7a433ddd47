"""Products of gradients at a checkpoint against the gradients themselves, built by autograd."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from engram.engine.session import session
from engram.likelihoods import resolve
from engram.sensitivity.trajectory import gradient_products as module
from engram.sensitivity.trajectory import samples
from engram.sensitivity.trajectory.gradient_products import Products, gradient_products
from engram.sensitivity.trajectory.samples import Sample

OUT, SEEN = 8, 20


def net() -> nn.Module:
    """A convolution at many positions, a norm, and linear layers at one."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.GroupNorm(1, 3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(48, 9),
        nn.Tanh(),
        nn.Linear(9, 2, bias=False),
    ).double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(40, 1, 6, 6, generator=generator).double()
    return inputs, torch.randint(2, (40,), generator=generator)


def table(model: nn.Module, scalar: bool) -> dict[str, Tensor]:
    """A time for every entry, or one for each parameter."""
    generator = torch.Generator().manual_seed(2)
    return {
        name: torch.rand(() if scalar else p.shape, generator=generator).double() + 0.1
        for name, p in model.named_parameters()
    }


def dense(model: nn.Module, sample: Sample, times: Mapping[str, Tensor]) -> Tensor:
    """All gradients times roots, [M, P], by a backward pass for every example."""
    likelihood = resolve("categorical").for_outputs((2,))
    found = []
    for position in torch.cat(sample.groups):
        x, y = (d[position : position + 1] for d in data())
        outputs = model(x)
        root = likelihood.hessian_factor(outputs.detach(), likelihood.prepare(outputs, y))
        for r in range(root.shape[2]):
            parameters = dict(model.named_parameters())
            own = torch.autograd.grad(
                (outputs * root[:, :, r]).sum(), parameters.values(), retain_graph=True
            )
            parts = [(g * times[n].sqrt()).flatten() for n, g in zip(parameters, own, strict=True)]
            found.append(torch.cat(parts))
    return torch.stack(found)


def found(scalar: bool) -> tuple[Products, Tensor, int]:
    """Products by the layers, and the gradients with the number of roots."""
    model = net()
    times = table(model, scalar)
    with session(model, data(), "categorical", batch_size=6, progress=False) as opened:
        groups = (torch.arange(OUT), torch.arange(10, 10 + SEEN))
        sample = Sample(opened, groups, num_outputs=2, seed=0, roots=3, room=0)
        products = gradient_products(sample.batches(), OUT, OUT + SEEN, times)
    gradients = dense(model, sample, times)
    return products, gradients, len(gradients) // (OUT + SEEN)


@pytest.mark.parametrize("scalar", [False, True])
def test_products_are_those_of_the_gradients(scalar: bool) -> None:
    products, gradients, roots = found(scalar)
    held, seen = gradients[: OUT * roots], gradients[OUT * roots :]
    wanted = (seen @ seen.mT).reshape(SEEN, roots, SEEN, roots)
    torch.testing.assert_close(products.seen, wanted)
    torch.testing.assert_close(products.cross, (held @ seen.mT).reshape(OUT, roots, SEEN, roots))
    assert products.energy == pytest.approx(float(held.square().sum()) / OUT)


def test_a_sketch_has_the_same_products_in_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over many draws of signs and groups; 9 rows do not go into groups of 4 evenly."""
    monkeypatch.setattr(module, "SKETCH_ENTRIES", 9 * 48 // 4)
    generator = torch.Generator().manual_seed(0)
    rows, columns = (torch.randn(5, n, generator=generator).double() for n in (9, 48))
    root = torch.rand(9, 48, generator=generator).double()
    whole = (rows[:, :, None] * columns[:, None] * root).flatten(1)
    wanted, drawn = whole @ whole.mT, []
    for seed in range(400):
        monkeypatch.setattr(module, "SKETCH_SEED", seed)
        parts = torch.cat(list(module._sketched(rows, columns, root)), 1)
        assert parts.shape[1] == 3 * 48
        drawn.append(parts @ parts.mT)
    mean, spread = torch.stack(drawn).mean(0), torch.stack(drawn).std(0) / 400**0.5
    assert ((mean - wanted).abs() < 5 * spread + 1e-9).all()


def test_gradients_are_the_same_kept_or_made_again() -> None:
    model = net()
    with session(model, data(), "categorical", batch_size=6, progress=False) as opened:
        groups = (torch.arange(OUT), torch.arange(10, 10 + SEEN), torch.arange(0))
        kept, again = (Sample(opened, groups, 2, 0, 3, room) for room in (2**20, 0))
        for sample in (kept, again):
            for _ in sample.batches():
                pass
        assert kept._kept
        assert not again._kept
        pairs = list(zip(kept.batches(1), again.batches(1), strict=True))
    assert sum(len(trace.outputs) for (trace, _), _ in pairs) == SEEN
    for (_, first), (_, second) in pairs:
        for one, other in zip(first, second, strict=True):
            torch.testing.assert_close(one, other)


def test_no_more_is_kept_than_there_is_room_for() -> None:
    with session(net(), data(), "categorical", progress=False) as opened:
        sample = Sample(opened, (torch.arange(OUT), torch.arange(OUT, 40)), 2, 0, 3, room=2000)
        assert len(list(sample.batches())) == 2
        assert not sample._kept


def test_few_examples_have_all_roots_and_others_as_many_as_were_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sampled label for those that only measure curvature; K - 1 are all of a categorical one."""
    groups = (torch.arange(OUT), torch.arange(10, 20), torch.arange(20, 40))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 5)).double()

    def counts(limit: int) -> list[int]:
        monkeypatch.setattr(samples, "EXACT_GRADIENTS", limit)
        with session(model, data(), "categorical", progress=False) as opened:
            sample = Sample(opened, groups, num_outputs=5, seed=0, roots=3, room=0)
            return [len(gradients) for _, gradients in sample.batches()]

    assert counts(38 * 5) == [4, 4, 4]
    assert counts(38 * 5 - 1) == [3, 3, 1]
