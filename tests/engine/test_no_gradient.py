"""A model whose outputs do not depend on its trainable parameters."""

import pytest
import torch
from torch import nn

import engram
from engram.errors import EngineError


class Packed(nn.Linear):
    """Its output requires gradients and has none, as kernels for inference leave it."""

    def forward(self, x):
        return super().forward(x).detach().requires_grad_()


def test_it_is_refused_in_words():
    model = nn.Sequential(nn.Linear(4, 5), Packed(5, 3))
    with pytest.raises(EngineError, match=r"no gradient at any.*bitsandbytes"):
        engram.laplace(model, (torch.randn(7, 4), torch.arange(7) % 3), prior_precision=1.0)
