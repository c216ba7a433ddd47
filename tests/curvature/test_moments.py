"""Squared gradients of embeddings by their rows against the gradients themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from engram.curvature.kfac import KroneckerFactors
from engram.curvature.moments import SquareMoments
from engram.engine.session import session
from engram.linalg.block import MatrixBlock

WORDS, COUNT = 12, 9


def text() -> tuple[nn.Module, Tensor]:
    """A table of words with padding, and sentences in which words come more than once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, 4, padding_idx=0), nn.Tanh(), nn.Flatten())
    return nn.Sequential(*model, nn.Linear(28, 3)).double(), torch.randint(6, (COUNT, 7)) * 2


@pytest.mark.parametrize("in_basis", [False, True])
def test_embeddings_go_by_the_rows_of_their_tokens(in_basis: bool) -> None:
    model, tokens = text()
    data = (tokens, torch.randint(3, (COUNT,)))
    wanted = torch.zeros(WORDS, 4).double()
    with session(model, data, "categorical", batch_size=4, progress=False) as opened:
        blocks: list[MatrixBlock] = []
        factors, observed = (
            KroneckerFactors(set()),
            opened.observe(opened.batches.take(tokens[:, 0] * 0)),
        )
        factors.update_columns(observed.trace)
        factors.update_rows(observed.trace, observed.trace.arranged(observed.residual))
        if in_basis:
            blocks = [f.block(1.0, torch.float64) for f in factors.layers.values()]
        moments = SquareMoments(blocks)
        for observed in opened.passes("squares"):
            names = set(opened.engine.parameters)
            moments.update(observed.trace, observed.trace.arranged(observed.residual), names)
            for x, residual in zip(tokens[observed.batch.indices], observed.residual, strict=True):
                (own,) = torch.autograd.grad((model(x[None])[0] * residual).sum(), model[0].weight)
                basis = blocks[0].columns[0] if in_basis else torch.eye(4).double()
                wanted += (own @ basis).square()
    found = moments.by_block[("0.weight",)][0] if in_basis else moments.by_name["0.weight"]
    torch.testing.assert_close(found, wanted)
