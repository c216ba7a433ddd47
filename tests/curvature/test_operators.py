"""Products with the exact curvature against the dense matrices, for every case."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from cases import CASES
from engram.core.parameters import Layout, trainable
from engram.curvature.operators import CurvatureOperator
from engram.curvature.per_example import _one_by_one, per_example_hessian_products
from engram.engine.session import session
from fitted import assert_close
from single_examples import one_example, outputs_of

NAMES = (
    *("mlp", "one_output_vector", "positions", "used_twice", "unused_layer", "frozen_layer"),
    *("two_inputs", "named_inputs", "conv2d_groups", "conv_transpose2d", "batch_norm2d", "prelu"),
    *("attention_batch_first", "temperature", "lstm", "checkpointed"),
)


def opened(case):
    return session(case.model, case.data, case.public_likelihood, batch_size=3, progress=False)


def random_vectors(layout, count):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(count, layout.num_params, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["ggn", "hessian"])
@pytest.mark.parametrize("name", NAMES)
def test_products_equal_the_dense_matrix(name, kind):
    case = CASES[name]
    layout = Layout.of(trainable(case.model))
    vectors = random_vectors(layout, 3)
    matrix = case.dense.ggn() if kind == "ggn" else dense_hessian(case)
    with opened(case) as ready:
        exact = CurvatureOperator(ready, layout, kind)
        assert_close(exact.times(vectors), vectors @ matrix)
    assert exact.products == 3


def dense_hessian(case):
    """Row by row from per-example losses; parameters that no output depends on get zeros."""
    leaves = list(case.dense.parameters.values())
    with sdpa_kernel(SDPBackend.MATH):
        outputs = torch.stack(_outputs(case))
    total = case.likelihood.dense.losses(outputs, case.dense.targets).sum()
    grads = torch.autograd.grad(
        total, leaves, create_graph=True, allow_unused=True, materialize_grads=True
    )
    flat = torch.cat([g.reshape(-1) for g in grads])
    rows = []
    for entry in flat:
        if not entry.requires_grad:
            rows.append(torch.zeros_like(flat))
            continue
        second = torch.autograd.grad(
            entry, leaves, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        rows.append(torch.cat([g.reshape(-1) for g in second]))
    return torch.stack(rows).detach()


def _outputs(case):
    dense = case.dense
    return [outputs_of(dense.model, one_example(dense.inputs, n)) for n in range(dense.num_data)]


@pytest.mark.parametrize("name", NAMES)
def test_own_hessians_add_up_to_that_of_all_data(name):
    case = CASES[name]
    layout = Layout.of(trainable(case.model))
    vector = random_vectors(layout, 1)
    with opened(case) as ready:
        expected = CurvatureOperator(ready, layout, "hessian").times(vector)[0]
        total = torch.zeros_like(expected)
        for observed in ready.passes("own"):
            named = layout.unflatten(vector.expand(len(observed.batch), -1))
            arguments = (ready.model, ready.likelihood, observed.batch, observed.targets, named)
            own = per_example_hessian_products(*arguments)
            assert own.shape == (len(observed.batch), layout.num_params)
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                assert_close(own, layout.flatten(_one_by_one(*arguments)))
            total += own.sum(0)
    assert_close(total, expected)
