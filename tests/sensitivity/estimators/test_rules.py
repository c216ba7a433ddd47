"""The rules as functions of V, e and Lambda: against dense closed forms, and invariants."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dense_deviation import corrected as dense_corrected
from engram.engine.gradient_accumulator import DiscardGradients
from engram.likelihoods import Bernoulli, Categorical, Gaussian
from engram.sensitivity.estimators import ESTIMATORS, FROM_VARIANCE, corrected
from engram.sensitivity.estimators.base import GUARD, KnownBatch, Setting
from engram.sensitivity.variance import DENSE_OUTPUTS, KnownVariance
from fitted import assert_close
from likelihood_cases import LIKELIHOODS

LIKELIHOOD_OF = {case.name: case for case in LIKELIHOODS}
COUNT = 6
QUICK = settings(max_examples=30, deadline=None, derandomize=True)
SIZE, SEED = st.integers(1, 5), st.integers(0, 10**6)


def drawn_variance(outputs, scale, generator, rank=None):
    """V = A A' times a scale, [B, K, K], singular where the rank is below K."""
    shape = (COUNT, outputs, outputs if rank is None else rank)
    root = torch.randn(shape, generator=generator, dtype=torch.float64)
    return scale * root @ root.mT


def batch(likelihood, outputs, targets, variance):
    targets = likelihood.prepare(outputs, targets)
    residual = likelihood.residual(outputs, targets)
    return KnownBatch(KnownVariance(variance), outputs, targets, residual)


def estimate(name, known, likelihood, rounds=3, guard=GUARD):
    return ESTIMATORS[name](known, Setting(likelihood, None, rounds, DiscardGradients(), guard))


def drawn_batch(case, scale=0.02, rank=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(COUNT, case.num_outputs, generator=generator, dtype=torch.float64)
    targets = case.targets(COUNT, case.num_outputs, generator)
    variance = drawn_variance(case.num_outputs, scale, generator, rank)
    return batch(case.make(), outputs, targets, variance), targets


@pytest.mark.parametrize("rank", [None, 1], ids=["full rank", "rank one"])
@pytest.mark.parametrize("likelihood", LIKELIHOOD_OF)
class TestClosedForms:
    """Every rule and likelihood once, by matrices of single examples."""

    def test_linear(self, likelihood, rank):
        case = LIKELIHOOD_OF[likelihood]
        known, targets = drawn_batch(case, rank=rank)
        error = case.dense.residuals(known.outputs, targets)
        expected = torch.stack([v @ e for v, e in zip(known.trace.variances, error, strict=True)])
        found = estimate("linear", known, case.make())
        assert_close(found.deviation, expected, 1e-12)
        moved = known.outputs + expected
        assert_close(found.loo_loss, case.dense.losses(moved, targets), 1e-12)
        change = case.dense.means(moved) - case.dense.means(known.outputs)
        assert_close(found.prediction_deviation, change, 1e-12)
        assert not found.flagged.any()

    def test_corrected(self, likelihood, rank):
        case = LIKELIHOOD_OF[likelihood]
        known, targets = drawn_batch(case, rank=rank)
        variance, identity = known.trace.variances, torch.eye(case.num_outputs).double()
        hessian = case.dense.hessians(known.outputs, targets)
        error = case.dense.residuals(known.outputs, targets)
        system = identity - variance @ hessian
        assert float(torch.linalg.eigvals(variance @ hessian).real.max()) < GUARD
        expected = torch.linalg.solve(system, variance @ error[:, :, None])[:, :, 0]
        found = estimate("corrected", known, case.make())
        assert_close(found.deviation, expected, 1e-11)
        assert_close(found.loo_loss, case.dense.losses(known.outputs + expected, targets), 1e-11)
        assert_close((variance @ found.pull[:, :, None])[:, :, 0], expected, 1e-11)
        trace = (variance * hessian).sum((1, 2))
        assert_close(found.eigenvalues.sum(1), trace, 1e-11)
        assert not found.flagged.any()

    def test_iterated(self, likelihood, rank):
        case = LIKELIHOOD_OF[likelihood]
        known, targets = drawn_batch(case, rank=rank)
        times = known.trace.variances
        expected = times @ case.dense.residuals(known.outputs, targets)[:, :, None]
        for _ in range(4):
            moved = known.outputs + expected[:, :, 0]
            expected = times @ case.dense.residuals(moved, targets)[:, :, None]
        found = estimate("iterated", known, case.make(), rounds=4)
        kept = ~found.flagged
        assert kept.any()
        assert_close(found.deviation[kept], expected[kept, :, 0], 1e-11)

    def test_paper(self, likelihood, rank):
        case = LIKELIHOOD_OF[likelihood]
        known, targets = drawn_batch(case, rank=rank)
        error = case.dense.residuals(known.outputs, targets)
        expected = known.trace.variances.diagonal(dim1=1, dim2=2) * error
        found = estimate("paper", known, case.make())
        assert_close(found.deviation, expected, 1e-12)
        change = case.dense.mean_derivatives(known.outputs) * expected
        assert_close(found.prediction_deviation, change, 1e-12)


def ridge(seed, size, delta=0.3):
    """Features [N, D], targets [N, K], and the coefficients of a weighted ridge regression."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(COUNT, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(COUNT, size, generator=generator, dtype=torch.float64)

    def fit(rows):
        gram = z[rows].T @ z[rows] + delta * torch.eye(3).double()
        return torch.linalg.solve(gram, z[rows].T @ y[rows])

    everyone = torch.arange(COUNT)
    gram = z.T @ z + delta * torch.eye(3).double()
    scalar = (z @ torch.linalg.solve(gram, z.T)).diagonal()
    variance = scalar[:, None, None] * torch.eye(size).double()
    without = torch.stack([z[i] @ fit(everyone[everyone != i]) for i in range(COUNT)])
    return z @ fit(everyone), y, variance, without


@QUICK
@given(SEED, SIZE)
def test_corrected_and_iterated_are_refits_of_ridge_regression(seed, size):
    outputs, targets, variance, without = ridge(seed, size)
    known = batch(Gaussian(), outputs, targets, variance)
    found = estimate("corrected", known, Gaussian(), guard=1 - 1e-9)
    assert_close(outputs + found.deviation, without, 1e-9)
    leverage = variance[:, 0, 0]
    rounds = estimate("iterated", known, Gaussian(), rounds=400)
    settled = leverage < 0.9
    assert_close(rounds.deviation[settled], found.deviation[settled], 1e-9)


@QUICK
@given(SEED, st.integers(2, 5), st.floats(0.01, 1.0))
def test_more_outputs_than_needed_by_products_are_the_same(seed, size, scale):
    """V built, and V only applied: the two ways of `corrected`."""
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(COUNT, size, generator=generator, dtype=torch.float64)
    targets = torch.randint(size, (COUNT,), generator=generator)
    variance = drawn_variance(size, scale / size, generator)
    known = batch(Categorical(), outputs, targets, variance)
    likelihood = Categorical()
    factor = likelihood.hessian_factor(outputs, known.targets)
    dense = corrected.solved(variance, known.residual, factor)
    pull, flagged = corrected.solved_by_products(
        known.trace.deviation,
        lambda u: likelihood.hessian_times(outputs, known.targets, u),
        known.residual,
    )
    kept = ~dense.flagged & (dense.eigenvalues.amax(1) < 0.95)
    assert not flagged[kept].any()
    if kept.any():
        found = known.trace.deviation(pull)[kept]
        torch.testing.assert_close(found, dense.deviation[kept], rtol=1e-5, atol=1e-7)


def test_many_outputs_are_solved_without_eigenvalues():
    size, generator = DENSE_OUTPUTS + 8, torch.Generator().manual_seed(0)
    outputs = torch.randn(COUNT, size, generator=generator, dtype=torch.float64)
    targets = torch.randint(size, (COUNT,), generator=generator)
    variance = drawn_variance(size, 0.01, generator)
    known = batch(Categorical(), outputs, targets, variance)
    found = estimate("corrected", known, Categorical())
    hessian = Categorical().output_hessian(outputs, known.targets)
    identity = torch.eye(size).double()
    plain = variance @ known.residual[:, :, None]
    expected = torch.linalg.solve(identity - variance @ hessian, plain)[:, :, 0]
    assert found.eigenvalues is None
    torch.testing.assert_close(found.deviation, expected, rtol=1e-5, atol=1e-8)
    paper = estimate("paper", known, Categorical())
    diagonal = variance.diagonal(dim1=1, dim2=2) * known.residual
    torch.testing.assert_close(paper.deviation, diagonal, rtol=1e-12, atol=0.0)


@QUICK
@given(SEED, SIZE, st.floats(0.5, 1e4))
def test_the_guard_holds_every_direction_and_flags(seed, size, scale):
    """However wrong V is, no direction is lengthened more than 1 / (1 - guard) times."""
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(COUNT, size, generator=generator, dtype=torch.float64)
    targets = torch.randn(COUNT, size, generator=generator, dtype=torch.float64)
    variance = drawn_variance(size, scale, generator)
    known = batch(Gaussian(), outputs, targets, variance)
    found = estimate("corrected", known, Gaussian())
    expected, flagged = dense_corrected(
        variance, torch.eye(size).double().expand(COUNT, -1, -1), known.residual
    )
    assert_close(found.deviation, expected, 1e-8)
    assert torch.equal(found.flagged, flagged)
    plain = known.trace.deviation(known.residual)
    longest = plain.norm(dim=1) / (1 - GUARD) * (1 + 1e-9)
    assert (found.deviation.norm(dim=1) <= longest).all()


def test_a_loss_that_is_not_convex_there_shortens_the_step():
    """One output with V Lambda = -1/2: d = V e / (1 + 1/2)."""
    variance, error = torch.tensor([[0.5]]), torch.tensor([[3.0]])
    found = corrected.solved_for_one(variance, error, torch.tensor([[-0.5]]))
    torch.testing.assert_close(found.deviation, torch.tensor([[1.0]]))
    assert not found.flagged.any()


def test_rounds_that_grow_apart_are_flagged_and_stay():
    """Squared loss with V = 2: d -> 2 (e + d) has no end; it stays at its first step."""
    outputs, targets = torch.tensor([[1.0]]).double(), torch.tensor([[0.0]]).double()
    known = batch(Gaussian(), outputs, targets, torch.tensor([[[2.0]]]).double())
    found = estimate("iterated", known, Gaussian(), rounds=30)
    assert found.flagged.all()
    assert float(found.deviation) == 2.0


def test_iterated_is_bounded_for_softmax():
    """Residuals are below 1, so that no V moves an output further than V's largest row sum."""
    generator = torch.Generator().manual_seed(1)
    outputs = torch.randn(COUNT, 3, generator=generator, dtype=torch.float64)
    variance = drawn_variance(3, 50.0, generator)
    known = batch(Categorical(), outputs, torch.arange(COUNT) % 3, variance)
    found = estimate("iterated", known, Categorical(), rounds=20)
    assert (found.deviation.abs() <= variance.abs().sum(2)).all()


@QUICK
@given(SEED, st.sampled_from(FROM_VARIANCE), st.permutations(range(COUNT)))
def test_examples_do_not_see_each_other(seed, name, order):
    case = LIKELIHOOD_OF["categorical"]
    known, targets = drawn_batch(case, scale=0.3, seed=seed)
    order = list(order)
    turned = batch(case.make(), known.outputs[order], targets[order], known.trace.variances[order])
    first, second = estimate(name, known, case.make()), estimate(name, turned, case.make())
    torch.testing.assert_close(second.deviation, first.deviation[order], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(second.loo_loss, first.loo_loss[order], rtol=1e-9, atol=1e-12)
    assert torch.equal(second.flagged, first.flagged[order])


@pytest.mark.parametrize("name", FROM_VARIANCE)
def test_without_variance_nothing_moves(name):
    known, _ = drawn_batch(LIKELIHOOD_OF["bernoulli"], scale=0.0)
    found = estimate(name, known, Bernoulli())
    assert not found.deviation.any()
    assert not found.prediction_deviation.any()
    assert not found.flagged.any()
