"""The posterior during training: moving averages of the curvature, samples from it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import engram
from engram.errors import ArgumentError
from engram.likelihoods import Categorical
from engram.problem import Opener
from engram.sensitivity.sampling import weights
from engram.tracking.moving_average import MovingAverageCurvature
from streamed import NUM_DATA, backward, build, data

DELTA = 0.7


def trained(model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        backward(model, torch.arange(NUM_DATA))
        optimizer.step()


def curvatures(structure: str, model: nn.Module) -> list[Tensor]:
    posterior = engram.laplace(
        model, data(), structure=structure, prior_precision=DELTA, progress=False
    )
    return [block.precision - DELTA for block in posterior.blocks]


def test_a_diagonal_is_averaged_with_its_bias_corrected() -> None:
    model, _ = build()
    averaged = MovingAverageCurvature("diagonal", 0.9, DELTA)
    expected: list[Tensor] = []
    for number in range(1, 4):
        posterior = averaged.update(model, Opener(data(), Categorical()))
        fresh = [0.1 * c for c in curvatures("diagonal", model)]
        before = expected or [torch.zeros_like(f) for f in fresh]
        expected = [0.9 * e + f for e, f in zip(before, fresh, strict=True)]
        for block, value in zip(posterior.blocks, expected, strict=True):
            assert torch.allclose(block.precision, value / (1 - 0.9**number) + DELTA)
        trained(model, 5)


def dense_factors(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """sum c c' and sum r r' of each layer of the two-layer net, by hand."""
    x, _ = data()
    ones = torch.ones(NUM_DATA, 1, dtype=x.dtype)
    hidden = model[0](x)
    outputs = model(x).detach()
    root = engram.likelihoods.Categorical().hessian_factor(outputs, torch.zeros_like(outputs))
    slope = 1 - hidden.tanh().detach() ** 2
    rows = torch.einsum("nkr,kh,nh->nhr", root, model[2].weight.detach(), slope)
    first = torch.cat([x, ones], 1), rows
    second = torch.cat([hidden.tanh().detach(), ones], 1), root
    return [(c.mT @ c, torch.einsum("nar,nbr->ab", r, r)) for c, r in (first, second)]


def test_kronecker_factors_are_averaged_each_by_itself() -> None:
    model, _ = build()
    averaged = MovingAverageCurvature("kronecker", 0.5, DELTA)
    first = dense_factors(model)
    averaged.update(model, Opener(data(), Categorical()))
    trained(model, 5)
    second = dense_factors(model)
    posterior = averaged.update(model, Opener(data(), Categorical()))
    for block, before, after in zip(posterior.blocks, first, second, strict=True):
        columns, rows = ((0.25 * b + 0.5 * a) / 0.75 for b, a in zip(before, after, strict=True))
        expected = torch.kron(rows, columns) / NUM_DATA
        expected += DELTA * torch.eye(len(expected), dtype=expected.dtype)
        vector = {n: torch.randn(s, dtype=rows.dtype) for n, s in _shapes(block).items()}
        flat = torch.cat([vector[block.names[0]], vector[block.names[1]][:, None]], 1).flatten()
        found = block.multiply(vector)
        got = torch.cat([found[block.names[0]], found[block.names[1]][:, None]], 1).flatten()
        assert torch.allclose(got, expected @ flat)


def _shapes(block: object) -> dict[str, torch.Size]:
    return dict(zip(block.layout.names, block.layout.shapes, strict=True))  # type: ignore[attr-defined]


def test_the_average_survives_a_checkpoint() -> None:
    model, _ = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    settings = {"posterior": "kronecker", "prior_precision": DELTA, "average": 0.9}
    tracker = engram.Tracker(model, optimizer, data(), **settings)
    tracker.update()
    trained(model, 5)
    again = engram.Tracker(model, optimizer, data(), **settings)
    again.load_state_dict(copy.deepcopy(tracker.state_dict()))
    one, other = tracker.update(), again.update()
    assert one is not None
    assert other is not None
    assert one.loo_loss.equal(other.loo_loss)


def test_settings_that_mean_nothing_are_refused() -> None:
    model, optimizer = build()
    with pytest.raises(ArgumentError, match="averages by itself"):
        engram.Tracker(model, optimizer, data(), average=0.9)
    with pytest.raises(ArgumentError, match="diagonal or kronecker"):
        engram.Tracker(model, optimizer, data(), posterior="full", prior_precision=1.0, average=0.9)
    with pytest.raises(ArgumentError, match="below 1"):
        MovingAverageCurvature("diagonal", 1.0, 1.0)


def test_weights_are_restored_after_an_exception() -> None:
    model, _ = build()
    first = model[0].weight
    before, pointer = first.detach().clone(), first.data_ptr()
    with pytest.raises(KeyError), weights(model, {"0.weight": torch.zeros_like(before)}):
        raise KeyError
    assert first.data_ptr() == pointer
    assert torch.equal(first, before)


def test_reduction_and_batch_size_reach_the_optimizers_posterior() -> None:
    model, optimizer = build()
    backward(model, torch.arange(NUM_DATA))
    optimizer.step()
    tracker = engram.Tracker(model, optimizer, data(), reduction="sum", training_batch_size=8)
    expected = engram.posterior_of(
        optimizer, model, num_data=NUM_DATA, reduction="sum", training_batch_size=8
    )
    assert tracker.posterior().prior_precision == expected.prior_precision
    assert tracker.posterior().blocks[0].precision.equal(expected.blocks[0].precision)
