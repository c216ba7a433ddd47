"""Conjugate gradients against dense solves."""

import torch

from engram.linalg.cg import Limits, conjugate_gradients, for_some

SIZE, SYSTEMS = 20, 7


def matrices():
    generator = torch.Generator().manual_seed(0)
    roots = torch.randn(SYSTEMS, SIZE, SIZE, generator=generator, dtype=torch.float64)
    right = torch.randn(SYSTEMS, SIZE, generator=generator, dtype=torch.float64)
    return roots @ roots.mT + 0.1 * torch.eye(SIZE), right


def times(systems):
    return lambda vectors, rows, _: (systems[rows] @ vectors[:, :, None])[:, :, 0]


def test_each_system_is_solved_by_its_own_matrix():
    systems, right = matrices()
    diagonal = systems.diagonal(dim1=1, dim2=2).mean(0)
    found = conjugate_gradients(times(systems), right, Limits(1e-11, 300), lambda v: v / diagonal)
    exact = torch.linalg.solve(systems, right)
    assert (found.vectors - exact).norm() < 1e-8 * exact.norm()
    assert not found.indefinite.any()
    assert (found.residual <= 1e-11).all()


def test_a_perfect_preconditioner_needs_one_product():
    systems, right = matrices()
    same = systems[:1].expand(SYSTEMS, -1, -1)
    solve = torch.linalg.inv(systems[0])
    found = conjugate_gradients(times(same), right, Limits(1e-8, 50), lambda v: v @ solve)
    assert (found.iterations == 1).all()


def test_an_indefinite_system_is_flagged_and_the_others_are_not_disturbed():
    systems, right = matrices()
    systems[2] -= 5 * torch.eye(SIZE)
    found = conjugate_gradients(times(systems), right, Limits(1e-10, 500), torch.clone)
    others = torch.arange(SYSTEMS) != 2
    assert found.indefinite.tolist() == (~others).tolist()
    assert torch.isfinite(found.vectors).all()
    exact = torch.linalg.solve(systems[others], right[others])
    assert (found.vectors[others] - exact).norm() < 1e-7 * exact.norm()


def test_a_zero_right_hand_side_has_the_zero_solution():
    systems, right = matrices()
    found = conjugate_gradients(times(systems), 0 * right, Limits(1e-8, 10), torch.clone)
    assert (found.vectors == 0).all()
    assert (found.iterations == 0).all()
    assert (found.residual == 0).all()


def test_what_is_not_finished_says_so():
    systems, right = matrices()
    found = conjugate_gradients(times(systems), right, Limits(1e-12, 2), torch.clone)
    assert (found.residual > 1e-12).all()


def test_the_operator_is_told_what_the_preconditioners_matrix_makes_of_its_vectors():
    systems, right = matrices()
    diagonal = systems.diagonal(dim1=1, dim2=2).mean(0)
    product, differences = times(systems), []

    def watched(vectors, rows, weighted):
        differences.append(float((weighted - diagonal * vectors).norm() / weighted.norm()))
        return product(vectors, rows, weighted)

    conjugate_gradients(watched, right, Limits(1e-6, 300), lambda v: v / diagonal)
    assert len(differences) > 5
    assert max(differences) < 1e-10


def test_in_an_inner_product_of_its_own():
    """(I - V L) is self-adjoint in <u, L v>; L is told for free."""
    systems, right = matrices()
    weights, variance = systems / systems.norm(), torch.linalg.inv(systems + torch.eye(SIZE))
    weigh = for_some(lambda v: (weights @ v[:, :, None])[:, :, 0], right)

    def product(vectors, rows, weighted):
        torch.testing.assert_close(weighted, weigh(vectors, rows), rtol=1e-6, atol=1e-9)
        return vectors - (variance[rows] @ weighted[:, :, None])[:, :, 0]

    found = conjugate_gradients(product, right, Limits(1e-12, 100), weigh=weigh)
    exact = torch.linalg.solve(torch.eye(SIZE) - variance @ weights, right)
    assert (found.vectors - exact).norm() < 1e-9 * exact.norm()


def test_a_system_with_too_little_curvature_is_flagged():
    systems, right = matrices()
    smallest = torch.linalg.eigvalsh(systems)[:, 0]
    bound = float(smallest.sort().values[3:5].mean())
    found = conjugate_gradients(
        times(systems), right, Limits(1e-10, 500, smallest_curvature=bound), torch.clone
    )
    assert not found.indefinite[smallest > bound].any()
    counted = []
    limits = Limits(1e-10, 3, smallest_curvature=1e6, after_each=lambda: counted.append(1))
    refused = conjugate_gradients(times(systems), right, limits)
    assert refused.indefinite.all()
    assert (refused.vectors == 0).all()
    assert len(counted) == 1
