"""Products with the exact curvature against the dense matrices, for every case."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from cases import CASES
from engram.core.parameters import Layout, trainable
from engram.curvature.operators import (
    GaussNewton,
    Hessian,
    TangentGaussNewton,
    Weighted,
    exact_curvature,
)
from engram.curvature.per_example import PerExampleGaussNewton, PerExampleHessian, _one_by_one
from engram.engine.session import session
from fitted import assert_close
from single_examples import one_example, outputs_of

NAMES = (
    *("mlp", "one_output_vector", "positions", "used_twice", "unused_layer", "frozen_layer"),
    *("two_inputs", "named_inputs", "conv2d_groups", "conv_transpose2d", "batch_norm2d", "prelu"),
    *("attention_batch_first", "temperature", "lstm", "checkpointed"),
)
WITHOUT_HESSIAN = {"weight_norm"}  # PyTorch's derivative of it lacks a part; it is refused
OPERATORS = {"ggn": GaussNewton, "ggn by tangents": TangentGaussNewton, "hessian": Hessian}


def opened(case):
    return session(case.model, case.data, case.public_likelihood, batch_size=3, progress=False)


def random_vectors(layout, count):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(count, layout.num_params, generator=generator, dtype=torch.float64)


def weights_of(case, some):
    """Of every example; 0 for those that are not summed over."""
    if not some:
        return torch.ones(case.dense.num_data, dtype=torch.float64)
    weights = torch.linspace(-0.5, 1.5, case.dense.num_data, dtype=torch.float64)
    weights[1] = 0
    return weights


def dense_ggn(case, weights):
    jacobian, roots = case.dense.jacobian, case.dense.columns("ggn")
    rows = torch.einsum("nkp,nkr->nrp", jacobian, roots)
    return torch.einsum("n,nrp,nrq->pq", weights, rows, rows)


def dense_hessian(case, weights):
    """Row by row from per-example losses; parameters that no output depends on get zeros."""
    leaves = list(case.dense.parameters.values())
    dense = case.dense
    with sdpa_kernel(SDPBackend.MATH):
        outputs = torch.stack(
            [outputs_of(dense.model, one_example(dense.inputs, n)) for n in range(dense.num_data)]
        )
    losses = case.likelihood.dense.losses(outputs, dense.targets)
    grads = torch.autograd.grad(
        (weights * losses).sum(),
        leaves,
        create_graph=True,
        allow_unused=True,
        materialize_grads=True,
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


@pytest.mark.parametrize("some", [False, True], ids=["all", "weighted"])
@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.parametrize("name", NAMES)
def test_products_equal_the_dense_matrix(name, kind, some):
    case, weights = CASES[name], weights_of(CASES[name], some)
    layout = Layout.of(trainable(case.model))
    vectors, prior = random_vectors(layout, 3), torch.rand(layout.num_params).double()
    matrix = (dense_hessian if kind == "hessian" else dense_ggn)(case, weights)
    chosen = weights.nonzero()[:, 0]
    examples = Weighted(chosen, weights[chosen]) if some else None
    with opened(case) as ready:
        operator = OPERATORS[kind](ready, layout, prior, examples, scale=2.0)
        assert_close(operator @ vectors, 2 * (vectors @ matrix + prior * vectors))
    assert operator.products == 3


@pytest.mark.parametrize("name", sorted(CASES.keys() - WITHOUT_HESSIAN))
def test_many_products_are_those_of_the_whole_matrix(name):
    case = CASES[name]
    layout = Layout.of(trainable(case.model))
    vectors = random_vectors(layout, 2)
    with opened(case) as ready:
        hessian = exact_curvature("hessian", ready, layout)
        assert isinstance(hessian, Hessian)
        assert_close(hessian @ vectors, vectors @ hessian.matrix())


@pytest.mark.parametrize("name", NAMES)
def test_own_curvatures_add_up_to_that_of_all_data(name):
    case = CASES[name]
    layout = Layout.of(trainable(case.model))
    vector = random_vectors(layout, 1)
    with opened(case) as ready:
        totals = {"ggn": torch.zeros_like(vector[0]), "hessian": torch.zeros_like(vector[0])}
        for observed in ready.passes("own"):
            batch, targets = observed.batch, observed.targets
            rows = vector.expand(len(batch), -1)
            hessian = PerExampleHessian(ready, batch, targets, layout)
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                arguments = (ready.model, ready.likelihood, batch, targets)
                single = _one_by_one(*arguments, layout.unflatten(rows))
            assert_close(hessian @ rows, layout.flatten(single))
            gauss_newton = PerExampleGaussNewton(ready, observed, layout)
            last = torch.tensor([len(batch) - 1])
            for kind, own in {"ggn": gauss_newton, "hessian": hessian}.items():
                found = own @ rows
                assert_close(own.of(rows[last], last), found[last])
                totals[kind] += found.sum(0)
        for kind, total in totals.items():
            assert_close(total, (exact_curvature(kind, ready, layout) @ vector)[0])
