"""The reference against identities that hold whatever the library does."""

import pytest
import torch
from torch import nn

from cases import CASES, MLP
from dense_deviation import deviations, remove_group, variance
from likelihood_cases import GAUSSIAN_ONE, LIKELIHOODS
from problems import real
from reference import Dense


def single_example(build: nn.Module, *shape: int) -> Dense:
    generator = torch.Generator().manual_seed(0)
    inputs = real(*shape)(1, generator)
    targets = GAUSSIAN_ONE.targets(1, 1, generator)
    return Dense(build.double(), inputs, targets, GAUSSIAN_ONE.dense)


def test_kronecker_of_one_position_and_one_example_is_the_exact_block():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    dense = single_example(model, 3)
    exact = dense.ggn()
    for block in dense.blocks():
        place = block.layout.reshape(-1)
        expected = exact[place[:, None], place[None, :]]
        assert torch.allclose(block.kronecker(1), expected, atol=1e-12)
        assert torch.allclose(block.ekfac(), expected, atol=1e-12)


@pytest.mark.parametrize("name", ["mlp", "conv2d_groups", "conv_transpose2d", "embedding"])
def test_the_trace_of_ekfac_is_exact(name):
    """Rotations keep the sum of squares, so the trace is that of the exact GGN."""
    dense = CASES[name].dense
    assert torch.isclose(dense.curvature_matrix("ekfac").trace(), dense.ggn().trace())


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("mlp", 2),
        ("conv2d_groups", 3),
        ("conv_transpose2d_groups", 3),
        ("in_place_residual", 3),
        ("tied_embedding", 1),
        ("used_twice", 1),
        ("foreign_weight", 1),
        ("subclass", 2),
        ("functional_only", 2),
        ("lstm", 1),
        ("weight_norm", 1),
        ("attention_batch_first", 3),
    ],
)
def test_only_weights_applied_once_have_blocks(name, count):
    assert len(CASES[name].dense.blocks()) == count


def test_leverages_of_the_full_ggn_sum_to_the_effective_number_of_parameters():
    """sum_i tr(V_i Lambda_i) = tr(S^-1 (S - delta I)) = P - delta tr(S^-1)."""
    dense = MLP.dense
    precision = dense.precision("full", MLP.prior_precision)
    leverage = torch.einsum("nkl,nlk->", variance(dense, precision), dense.output_hessian)
    expected = dense.num_params - MLP.prior_precision * precision.covariance.trace()
    assert torch.isclose(leverage, expected)


def test_corrected_is_the_group_of_one():
    """J_i (S - J_i' Lambda_i J_i)^-1 J_i' e_i = (I - V_i Lambda_i)^-1 V_i e_i."""
    dense = MLP.dense
    precision = dense.precision("full", MLP.prior_precision)
    estimated = deviations(dense, precision, "corrected")
    assert not estimated.flagged.any()
    for i in range(dense.num_data):
        weights = torch.zeros(dense.num_data).double()
        weights[i] = 1.0
        moved = remove_group(dense, precision, weights, "corrected").outputs_without(
            dense, "linearised"
        )
        assert torch.allclose(moved[i] - dense.outputs[i], estimated.deviation[i], atol=1e-11)


def test_the_hessian_of_a_linear_model_is_its_ggn():
    dense = Dense(nn.Linear(4, 3), *MLP.draw(6, seed=4), MLP.likelihood.dense)
    assert torch.allclose(dense.hessian, dense.ggn(), atol=1e-12)


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda case: case.name)
def test_output_hessians_are_positive_semidefinite(likelihood):
    generator = torch.Generator().manual_seed(0)
    targets = likelihood.targets(5, likelihood.num_outputs, generator)
    outputs = torch.randn(5, likelihood.num_outputs, generator=generator, dtype=torch.float64)
    assert torch.linalg.eigvalsh(likelihood.dense.hessians(outputs, targets)).min() > -1e-12
