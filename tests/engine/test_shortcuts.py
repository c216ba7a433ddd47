"""The short ways through a layer, each against plain gradients, a plain solve and a plain layer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from engram.core.parameters import Layout, Named, trainable
from engram.engine.gradient_accumulator import DiscardGradients, GradientAccumulator, GradientSink
from engram.engine.perturbations import by_positions, in_eigenbasis, products_by_positions
from engram.engine.session import session
from engram.engine.sites import Site, group_sites, is_rank_one, matrix_blocks
from engram.linalg.block import Block, MatrixBlock
from engram.linalg.dense import DenseBlock
from engram.linalg.diagonal import DiagonalBlock
from engram.linalg.kronecker import KroneckerBlock
from engram.linalg.precision import Precision

EXAMPLES = 5
LAYERS = {
    "linear": (nn.Linear(4, 3), (6, 4)),
    "linear without bias": (nn.Linear(4, 3, bias=False), (6, 4)),
    "wide linear": (nn.Linear(20, 15), (3, 20)),
    "convolution": (nn.Conv2d(2, 3, 3), (2, 6, 5)),
    "padded convolution": (nn.Conv2d(2, 3, (3, 2), padding=1, bias=False), (2, 4, 5)),
    "strided convolution": (nn.Conv2d(2, 3, 3, stride=2), (2, 7, 7)),
    "convolution of a row": (nn.Conv1d(2, 4, 3), (2, 8)),
}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


class InBlocks(Precision):
    """A precision of the blocks given."""

    def __init__(self, *blocks: Block) -> None:
        self.blocks = blocks


def kronecker_of(layer: nn.Module) -> KroneckerBlock:
    layout = Layout.of(trainable(layer))
    rows = layout.shapes[0][0]
    columns = layout.num_params // rows
    turns = (torch.linalg.qr(drawn(1, size, size)).Q for size in (rows, columns))
    return KroneckerBlock(layout, drawn(1, rows, columns).square() + 0.5, *turns)


def diagonals_of(layer: nn.Module) -> list[Block]:
    return [
        DiagonalBlock.of(n, drawn(*p.shape).square() + 0.5) for n, p in trainable(layer).items()
    ]


@pytest.fixture(params=LAYERS)
def seen(request: pytest.FixtureRequest) -> Iterator[tuple[nn.Module, Site, Tensor]]:
    """A layer, its only site, and its inputs."""
    layer, shape = LAYERS[request.param]
    layer, inputs = layer.double(), drawn(EXAMPLES, *shape)
    data = (inputs, torch.zeros(EXAMPLES).long())
    model = nn.Sequential(layer, nn.Flatten())
    with session(model, data, "categorical", progress=False) as opened:
        (site,) = opened.observe(next(iter(opened.batches))).trace.sites
        yield layer, site, inputs


def own_gradients(layer: nn.Module, inputs: Tensor, seed: Tensor) -> Named:
    """J' seed of every example, by vmap, under the names that they have in the model."""
    parameters = {n: p.detach() for n, p in layer.named_parameters()}

    def value(values: Named, x: Tensor, own: Tensor) -> Tensor:
        return (functional_call(layer, values, (x[None],))[0] * own).sum()

    found = vmap(grad(value), in_dims=(None, 0, 0))(parameters, inputs, seed)
    return {f"0.{name}": gradient for name, gradient in found.items()}


def plain_move(layer: nn.Module, inputs: Tensor, step: Named) -> Tensor:
    """The layer is linear in its parameters: their step, through the layer."""
    found = [
        functional_call(
            layer, {name.removeprefix("0."): v[i] for name, v in step.items()}, (inputs[i, None],)
        )[0]
        for i in range(len(inputs))
    ]
    return torch.stack(found)


def in_model(block: Block) -> Block:
    """The block with the names that a layer's parameters have in the model."""
    names = tuple(f"0.{name}" for name in block.names)
    object.__setattr__(block, "layout", Layout(names, block.layout.shapes))
    return block


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def halves() -> list[slice]:
    return [slice(0, 2), slice(2, EXAMPLES)]


def test_positions_in_the_eigenbasis(seen: tuple[nn.Module, Site, Tensor]) -> None:
    layer, site, inputs = seen
    (block,) = matrix_blocks([in_model(kronecker_of(layer))])
    rule = in_eigenbasis(site, [block])
    assert rule is site.rule
    seeds = [drawn(*layer(inputs).shape, seed=s) for s in (1, 2)]
    gradients = [own_gradients(layer, inputs, seed) for seed in seeds]
    total = GradientAccumulator()
    moved = by_positions(site, rule, site.arrange(seeds[0]), block, halves(), total)
    with torch.no_grad():
        close(moved, plain_move(layer, inputs, block.solve(gradients[0])))
    for name, value in total.exact.items():
        close(value, gradients[0][name].sum(0))
    stacked = {name: torch.stack([g[name] for g in gradients], 1) for name in block.names}
    products = products_by_positions(site, rule, seeds, block, halves())
    close(products, block.inner_products(stacked))


def test_shifted_rows_of_a_convolution(seen: tuple[nn.Module, Site, Tensor]) -> None:
    layer, site, inputs = seen
    blocks = matrix_blocks([in_model(block) for block in diagonals_of(layer)])
    plain = isinstance(layer, nn.Conv2d) and layer.stride == (1, 1)
    seed = drawn(*layer(inputs).shape, seed=1)
    gradient, total = own_gradients(layer, inputs, seed), GradientAccumulator()

    def perturbation(blocks: list[MatrixBlock], total: GradientSink) -> Tensor | None:
        return site.rule.perturbation(site.call, seed, site.roles, blocks, total)

    assert perturbation(matrix_blocks([in_model(kronecker_of(layer))]), total) is None
    moved = perturbation(blocks, total)
    assert (moved is not None) == plain
    if moved is None:
        return
    with torch.no_grad():
        close(moved, plain_move(layer, inputs, InBlocks(*blocks).solve(gradient)))
    for name, value in gradient.items():
        close(total.exact[name], value.sum(0))
    torch.testing.assert_close(perturbation(blocks, DiscardGradients()), moved, rtol=0, atol=0)


def test_several_positions_are_not_of_rank_one(seen: tuple[nn.Module, Site, Tensor]) -> None:
    layer, site, _ = seen
    assert not is_rank_one(site, matrix_blocks([in_model(kronecker_of(layer))]))


class Tied(nn.Module):
    """Two layers with one weight, one with its own, and one that is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.own, self.fixed = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        y: Tensor = self.fixed(torch.tanh(self.own(x)))
        return y


def groups_of(model: nn.Module, *blocks: Block) -> list[tuple[int, ...]]:
    data = (drawn(EXAMPLES, 3), torch.zeros(EXAMPLES).long())
    with session(model.double(), data, "categorical", progress=False) as opened:
        sites = opened.observe(next(iter(opened.batches))).trace.sites
        found = group_sites(sites, InBlocks(*blocks))
        for group in found:
            names = {n for p in group.positions for n in sites[p].names}
            for block in blocks:
                met = bool(names & set(block.names))
                assert met == any(block is mine for mine in group.blocks)
            assert len(group.matrices) in (0, len(group.blocks))
    return sorted(group.positions for group in found)


def test_sites_that_share_a_weight_or_a_block_are_solved_together() -> None:
    model = Tied()
    each = {n: DiagonalBlock.of(n, torch.ones_like(p)) for n, p in trainable(model).items()}
    covered = [block for name, block in each.items() if not name.startswith("fixed")]
    assert groups_of(model, *covered) == [(0, 1), (2,)]
    assert groups_of(model, each["own.weight"]) == [(2,)]
    layout = Layout.of(
        {n: p for n, p in trainable(model).items() if n in ("own.bias", "fixed.bias")}
    )
    joined = DenseBlock.factorise(layout, torch.eye(layout.num_params))
    assert groups_of(model, joined, each["first.weight"]) == [(0, 1), (2, 3)]
