"""Conjugate gradients against dense solves."""

import torch

from engram.linalg.cg import conjugate_gradients

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
    found = conjugate_gradients(times(systems), lambda v: v / diagonal, right, 1e-11, 300)
    exact = torch.linalg.solve(systems, right)
    assert (found.vectors - exact).norm() < 1e-8 * exact.norm()
    assert not found.indefinite.any()
    assert (found.residual <= 1e-11).all()


def test_a_perfect_preconditioner_needs_one_product():
    systems, right = matrices()
    same = systems[:1].expand(SYSTEMS, -1, -1)
    solve = torch.linalg.inv(systems[0])
    found = conjugate_gradients(times(same), lambda v: v @ solve, right, 1e-8, 50)
    assert (found.iterations == 1).all()


def test_an_indefinite_system_is_flagged_and_the_others_are_not_disturbed():
    systems, right = matrices()
    systems[2] -= 5 * torch.eye(SIZE)
    found = conjugate_gradients(times(systems), torch.clone, right, 1e-10, 500)
    others = torch.arange(SYSTEMS) != 2
    assert found.indefinite.tolist() == (~others).tolist()
    assert torch.isfinite(found.vectors).all()
    exact = torch.linalg.solve(systems[others], right[others])
    assert (found.vectors[others] - exact).norm() < 1e-7 * exact.norm()


def test_a_zero_right_hand_side_has_the_zero_solution():
    systems, right = matrices()
    found = conjugate_gradients(times(systems), torch.clone, 0 * right, 1e-8, 10)
    assert (found.vectors == 0).all()
    assert (found.iterations == 0).all()
    assert (found.residual == 0).all()


def test_what_is_not_finished_says_so():
    systems, right = matrices()
    found = conjugate_gradients(times(systems), torch.clone, right, 1e-12, 2)
    assert (found.residual > 1e-12).all()


def test_the_operator_is_told_what_the_preconditioners_matrix_makes_of_its_vectors():
    systems, right = matrices()
    diagonal = systems.diagonal(dim1=1, dim2=2).mean(0)
    product, differences = times(systems), []

    def watched(vectors, rows, weighted):
        differences.append(float((weighted - diagonal * vectors).norm() / weighted.norm()))
        return product(vectors, rows, weighted)

    conjugate_gradients(watched, lambda v: v / diagonal, right, 1e-6, 300)
    assert len(differences) > 5
    assert max(differences) < 1e-10
