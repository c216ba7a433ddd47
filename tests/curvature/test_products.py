"""Products with the exact Hessian, many at once, against plain autograd one at a time."""

import pytest
import torch

from cases import CASES
from engram.core.data.batches import call
from engram.core.parameters import trainable
from engram.curvature.products import hessian_times
from engram.engine.session import session


def plain(opened, parameters, vector):
    """H v by differentiating <gradient, v>, batch after batch."""
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for batch in opened.batches:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            outputs = call(opened.model, batch.inputs)
        targets = opened.likelihood.prepare(outputs.detach(), batch.targets)
        loss = opened.likelihood.loss(outputs, targets).sum()
        wanted = list(parameters.values())
        kinds = {"allow_unused": True, "materialize_grads": True}
        gradient = torch.autograd.grad(loss, wanted, create_graph=True, **kinds)
        along = sum((g * vector[n]).sum() for n, g in zip(parameters, gradient, strict=True))
        found = torch.autograd.grad(along, wanted, **kinds)
        for name, value in zip(parameters, found, strict=True):
            total[name] += value
    return total


WITHOUT_HESSIAN = {"weight_norm"}  # PyTorch's derivative of it lacks a part; it is refused


@pytest.mark.parametrize("name", sorted(CASES.keys() - WITHOUT_HESSIAN))
def test_against_plain_autograd(name):
    case = CASES[name]
    generator = torch.Generator().manual_seed(0)
    with session(case.model, case.data, case.public_likelihood, 3, progress=False) as opened:
        parameters = trainable(case.model)
        vectors = {
            n: torch.randn(2, *p.shape, generator=generator, dtype=p.dtype)
            for n, p in parameters.items()
        }
        found = hessian_times(opened, parameters, vectors)
        for row in range(2):
            expected = plain(opened, parameters, {n: v[row] for n, v in vectors.items()})
            for n in parameters:
                torch.testing.assert_close(found[n][row], expected[n])
