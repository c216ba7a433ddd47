"""The equation itself: sums that are never built, and the mean of a Gaussian."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engram.core import equation

quick = settings(max_examples=20, deadline=None, derandomize=True)


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@quick
@given(num=st.integers(0, 8), length=st.integers(1, 5), seed=st.integers(0, 99))
def test_every_kind_of_sum_equals_that_of_its_rows(num, length, seed):
    left, right, weights = draw(seed, num, 3), draw(seed + 1, num, 2), draw(seed + 2, num)
    places = torch.randint(length, (num,), generator=torch.Generator().manual_seed(seed))
    outer = left[:, :, None] * right[:, None, :]
    scattered = torch.nn.functional.one_hot(places, length).double()[:, :, None] * left[:, None, :]
    expected = [
        sum(w * row for w, row in zip(weights, rows, strict=True))
        for rows in (left, outer, scattered)
    ]
    sums = [
        equation.rows(left),
        equation.products(left, right),
        equation.placed(left, places, length),
    ]
    for total, value in zip(sums, expected, strict=True):
        assert torch.allclose(total(weights), torch.as_tensor(value, dtype=torch.float64))


@quick
@given(seed=st.integers(0, 99), step_size=st.floats(0.1, 1.0))
def test_one_equation_in_three_forms(seed, step_size):
    natural, gradients, weights = draw(seed, 4), draw(seed + 1, 6, 4), draw(seed + 2, 6)
    expected = natural + step_size * sum(w * g for w, g in zip(weights, gradients, strict=True))
    perturbed = equation.perturbed(
        {"a": natural, "b": natural}, {"a": equation.rows(gradients)}, weights, step_size
    )
    deviation = equation.natural_deviation(gradients, weights, step_size)
    divided = equation.divided(
        {"a": natural}, {"a": equation.rows(-step_size * gradients)}, weights
    )
    assert torch.allclose(perturbed["a"], expected)
    assert torch.equal(perturbed["b"], natural)
    assert torch.allclose(natural + deviation, expected)
    assert torch.allclose(divided["a"], expected)


@quick
@given(seed=st.integers(0, 99), step_size=st.floats(0.1, 1.0))
def test_the_mean_of_a_gaussian_moves_by_the_solved_gradients(seed, step_size):
    """m and S from the natural parameter after the equation, against S_without^-1 sum g."""
    mean, gradients, weights = draw(seed, 3), draw(seed + 1, 5, 3), draw(seed + 2, 5)
    root = draw(seed + 3, 5, 3)
    hessians = root[:, :, None] * root[:, None, :]
    precision = 60 * torch.eye(3, dtype=torch.float64) + root.T @ root
    perturbed = equation.perturbed(
        equation.gaussian_natural(mean, precision),
        equation.gaussian_natural_gradients(gradients, hessians, mean),
        weights,
        step_size,
    )
    remaining = precision - step_size * torch.einsum("j,jab->ab", weights, hessians)
    assert torch.allclose(-2 * perturbed["quadratic"], remaining)
    moved = equation.mean_deviation(
        lambda v: {"theta": torch.linalg.solve(remaining, v["theta"])},
        {"theta": weights @ gradients},
        step_size,
    )
    expected = torch.linalg.solve(remaining, perturbed["linear"])
    assert torch.allclose(mean + moved["theta"], expected, atol=1e-12)
