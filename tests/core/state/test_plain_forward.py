"""Mixed precision and reentrant checkpoints inside of a forward: as if they were not there."""

import threading

import pytest
import torch
from torch import nn
from torch.utils import checkpoint

import engram
from engram.core.state.plain_forward import plain_forward

X = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(7) % 3


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def hidden(self, x):
        return torch.tanh(self.first(x))

    def forward(self, x):
        return self.head(self.hidden(x)).float()


class Lowered(Plain):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)


class Decorated(Plain):
    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x):
        return super().forward(x)


class Reentrant(Plain):
    def forward(self, x):
        return self.head(checkpoint.checkpoint(self.hidden, x, use_reentrant=True))


def estimates(kind, curvature="ggn"):
    torch.manual_seed(0)
    model = kind()
    fitted = engram.laplace(
        model, (X, Y), structure="full", curvature=curvature, prior_precision=30.0, progress=False
    )
    found = engram.sensitivities(model, (X, Y), fitted, progress=False)
    removal = engram.remove(model, (X, Y), fitted, [0, 1], progress=False)
    return found.loo_loss, found.leverage, removal.group.loss_without


@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
@pytest.mark.parametrize("kind", [Lowered, Decorated, Reentrant])
def test_it_is_as_if_it_were_not_there(kind, curvature):
    before = torch.autocast.__enter__, checkpoint.CheckpointFunction
    for found, expected in zip(
        estimates(kind, curvature), estimates(Plain, curvature), strict=True
    ):
        torch.testing.assert_close(found, expected)
    assert before == (torch.autocast.__enter__, checkpoint.CheckpointFunction)


def test_a_reentrant_checkpoint_has_the_gradients_of_the_other():
    model = Reentrant()
    leaf = X.clone().requires_grad_()
    own = list(model.parameters())
    with plain_forward():
        found = torch.autograd.grad(model(leaf).square().sum(), own)
    expected = torch.autograd.grad(Plain.forward(model, leaf).square().sum(), own)
    torch.testing.assert_close(found, expected)


def test_other_threads_keep_their_precision():
    kinds = []

    def other():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            kinds.append((X @ X.mT).dtype)

    with plain_forward():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert kinds == [torch.bfloat16]
