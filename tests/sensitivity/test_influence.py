"""Influence of every training example on every test example."""

import pytest
import torch

import engram
from cases import CASES, MLP
from dense_deviation import influence
from fitted import assert_close, posterior, precision

PROBLEMS = [
    *[(name, "diagonal") for name in CASES],
    *[(name, "kronecker") for name in ("mlp", "conv2d_groups", "encoder_layer", "embedding")],
    *[(name, "last_layer") for name in ("mlp", "positions", "mlp_poisson", "conv2d_groups")],
    *[("mlp", structure) for structure in ("isotropic", "ekfac", "full")],
]
"""Gradients of every net once; solving with every structure is posteriors/test_structures."""


def scores(case, fitted, **settings):
    return engram.influence(
        case.model,
        case.data,
        case.test_data,
        fitted,
        progress=False,
        **settings,
    )


@pytest.mark.parametrize(("name", "structure"), PROBLEMS)
def test_against_the_dense_reference(name, structure):
    case = CASES[name]
    expected = influence(case.dense, case.dense_test, precision(name, structure))
    assert_close(scores(case, posterior(name, structure)), expected)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_batches_do_not_matter(batch_size):
    fitted = posterior("mlp", "kronecker")
    expected = influence(MLP.dense, MLP.dense_test, precision("mlp", "kronecker"))
    assert_close(scores(MLP, fitted, batch_size=batch_size), expected)


def test_on_the_training_data_it_is_symmetric_and_positive():
    fitted = posterior("mlp", "kronecker")
    square = engram.influence(MLP.model, MLP.data, MLP.data, fitted, progress=False)
    assert torch.allclose(square, square.T, atol=1e-12)
    assert torch.linalg.eigvalsh(square).min() > -1e-10
