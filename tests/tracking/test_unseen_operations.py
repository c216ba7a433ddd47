"""Steps with operations that the tape of a streamed step cannot follow, or does not see."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import engram
from streamed import NUM_DATA, backward, batches, data, dense_deviation


class Straight(torch.autograd.Function):
    """Rounds, and lets the gradient through as if it did not."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Marked(Tensor):
    """A kind of tensor of the user's own."""


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x + torch.tanh(x)


NOT_ON_THE_TAPE = {
    "function of one's own": (lambda h: Straight.apply(3 * h) + h, lambda f: f, "again"),
    "complex numbers": (lambda h: torch.fft.fft(h).abs(), lambda f: f, "tape"),
    "scripted": (lambda h: h + scripted(h), lambda f: f, "again"),
    "kind of tensor": (torch.tanh, lambda f: f.as_subclass(Marked), "again"),
    "no forward derivative": (lambda h: torch.cdist(h, 0 * h[:1] + 1), lambda f: f, None),
}


class Between(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.between, self.behind, _ = NOT_ON_THE_TAPE[name]
        width = 1 if name == "no forward derivative" else 5
        self.first, self.head = nn.Linear(4, 5), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.behind(self.head(self.between(self.first(x))))
        return output


@pytest.mark.parametrize("name", NOT_ON_THE_TAPE)
def test_what_the_tape_does_not_see_is_noticed(name: str) -> None:
    """The dense answer, whichever way: a branch that was missed would be left out of it."""
    torch.manual_seed(0)
    model = Between(name).double()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, weight_decay=0.1)
    tracker = engram.Tracker(model, optimizer, data())
    for number, batch in enumerate(batches(1)[:2]):
        optimizer.zero_grad()
        before = copy.deepcopy(model)
        with tracker.step(batch):
            backward(model, batch)
        if number == 1:
            posterior = engram.posterior_of(optimizer, model, num_data=NUM_DATA)
            precision = torch.cat([b.precision.flatten() for b in posterior.blocks])
            expected = dense_deviation(before, batch, number, precision)
            outputs = before(data()[0][batch]).detach()
        optimizer.step()
    loo = functional.cross_entropy(outputs + expected, data()[1][batch], reduction="none")
    found = tracker.stream.epoch.loo_loss[batch]
    assert torch.allclose(found, loo.float().as_subclass(Tensor), rtol=1e-5, atol=1e-7)
    assert tracker.stream.way == (NOT_ON_THE_TAPE[name][2] or tracker.stream.way)
