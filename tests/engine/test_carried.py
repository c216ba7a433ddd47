"""Displacements made of rows and columns against the same made of every example's gradient."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from engram.curvature.kfac import KroneckerFactors
from engram.curvature.kinds import ggn_roots
from engram.curvature.moments import SquareMoments
from engram.engine.carried import Carried, Explicit, Positions, Products, carried_for
from engram.engine.drift import Drift
from engram.engine.session import Session, session
from engram.engine.sites import group_sites, per_example_gradients
from engram.linalg.block import MatrixBlock
from engram.sensitivity.trajectory.fitting import Bases

COUNT = 12

LAYERS = {
    "many positions": nn.Conv2d(2, 3, 3, padding=1),
    "few positions": nn.Conv2d(2, 14, 4, stride=3, bias=False),
    "some positions": nn.Conv2d(2, 5, 3, stride=2),
}


def opened_net(layer: nn.Module) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The layer and one at a single position behind it."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(COUNT, 2, 7, 7, generator=generator).double()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = layer.double()
        width = layer(inputs).flatten(1).shape[1]
        model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(width, 3).double())
    return model, (inputs, torch.randint(3, (COUNT,), generator=generator))


def fitted(opened: Session, fixed: Collection[str] = ()) -> Bases:
    """The eigenbases of the net's Kronecker factors."""
    factors = KroneckerFactors(fixed)
    for observed in opened.passes("fit"):
        roots = ggn_roots(observed, opened.likelihood, "fisher", 0)
        factors.update_columns(observed.trace)
        factors.update_rows(observed.trace, observed.trace.arranged(roots[:, :, 0].contiguous()))
    return Bases(tuple(f.block(1.0, torch.float64) for f in factors.layers.values()))


@pytest.mark.parametrize("fixed", [set(), {"0.bias"}])
@pytest.mark.parametrize("name", list(LAYERS))
def test_a_displacement_is_the_same_by_positions(name: str, fixed: set[str]) -> None:
    """Two checkpoints, and the end, where nothing is absorbed; a bias may stay put."""
    model, data = opened_net(LAYERS[name])
    with session(model, data, "categorical", progress=False) as opened:
        precision = fitted(opened, fixed)
        observed = opened.observe(next(iter(opened.batches)))
        sites = observed.trace.sites
        gradients = observed.trace.arranged(observed.residual)
        group = next(g for g in group_sites(sites, precision) if g.positions == (0,))
        (block,) = group.matrices
        short, long = carried_for(group, sites), Explicit([block])
        assert isinstance(short, Positions)
        drift = {block.names: drift_of(block)}
        members = [(sites[0], gradients[0])]
        both: list[Carried] = [short, long]
        for _ in range(2):
            for carried in both:
                carried.absorb(members)
            compare(*(c.moved(members, drift)[0] for c in both))
            for carried in both:
                carried.advance(drift)
        compare(*(c.outputs(members)[0] for c in both))


def test_inputs_that_are_the_same_are_turned_once() -> None:
    model, data = opened_net(LAYERS["many positions"])
    with session(model, data, "categorical", progress=False) as opened:
        precision = fitted(opened)
        observed = opened.observe(next(iter(opened.batches)))
        sites = observed.trace.sites
        gradients = observed.trace.arranged(observed.residual)
        group = next(g for g in group_sites(sites, precision) if g.positions == (1,))
        carried = carried_for(group, sites)
        assert isinstance(carried, Products)
        inputs = sites[1].call.input
        for own in (inputs, inputs.clone(), 2 * inputs):
            site = replace(sites[1], call=replace(sites[1].call, input=own))
            carried.absorb([(site, gradients[1])])
        first, second, third = carried.columns
        assert first is second
        (block,) = group.matrices
        torch.testing.assert_close(third, block.rotate_columns(2 * inputs))


@pytest.mark.parametrize("fixed", [set(), {"0.bias"}])
@pytest.mark.parametrize("name", list(LAYERS))
def test_squares_are_those_of_the_gradients_in_the_basis(name: str, fixed: set[str]) -> None:
    model, data = opened_net(LAYERS[name])
    with session(model, data, "categorical", progress=False) as opened:
        precision = fitted(opened, fixed)
        block = precision.blocks[0]
        assert isinstance(block, MatrixBlock)
        observed = opened.observe(next(iter(opened.batches)))
        gradients = observed.trace.arranged(observed.residual)
        moments = SquareMoments([block])
        moments.update(observed.trace, gradients, set(block.names))
        wanted = sum(
            block.coordinates(found).square().sum(0)
            for found in per_example_gradients(observed.trace.sites, gradients, set(block.names))
        )
        torch.testing.assert_close(moments.of_block(block), wanted)


def drift_of(block: MatrixBlock) -> Drift:
    """Some rates for every direction."""
    generator = torch.Generator().manual_seed(3)
    shape = block.coordinates(zeros(block)).shape
    return Drift.over(
        torch.rand(shape, generator=generator).double(),
        torch.rand(shape, generator=generator).double(),
        COUNT,
    )


def zeros(block: MatrixBlock) -> dict[str, Tensor]:
    """Of the block's parameters."""
    shapes = zip(block.layout.names, block.layout.shapes, strict=True)
    return {name: torch.zeros(shape).double() for name, shape in shapes}


def compare(short: Tensor | None, long: Tensor | None) -> None:
    """The same, and something."""
    assert short is not None
    assert float(short.abs().max()) > 0
    torch.testing.assert_close(short, long)
