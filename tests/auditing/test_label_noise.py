"""The cut-off says how many labels are wrong, and is right about how sure that is."""

import pytest
import torch

from engram.auditing.label_noise import blended, label_noise
from engram.auditing.outliers import wrong_residuals, wrong_sets


def drawn(count: int, classes: int, sure: float, rate: float, shift: bool):
    """Labels drawn from a model's own probabilities, then some of them made wrong."""
    generator = torch.Generator().manual_seed(0)
    logits = sure * torch.randn(count, classes, generator=generator, dtype=torch.float64)
    p = logits.softmax(1)
    right = torch.multinomial(p, 1, generator=generator)[:, 0]
    wrong = torch.rand(count, generator=generator) < rate
    steps = torch.randint(1, classes, (count,), generator=generator)
    steps = torch.ones_like(steps) if shift else steps
    return p, torch.where(wrong, (right + steps) % classes, right), wrong


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize(("classes", "sure"), [(2, 6.0), (5, 4.0), (10, 8.0)])
@pytest.mark.parametrize("rate", [0.05, 0.1, 0.2])
def test_stated_precision_is_the_true_one(classes, sure, rate, shift):
    p, given, wrong = drawn(6000, classes, sure, rate, shift)
    found = label_noise(p, given)
    true = float(wrong[found.is_issue].double().mean())
    assert abs(found.called.share - true) < 0.1
    assert abs(found.rate - rate) < 0.05
    assert float(wrong[found.is_issue].sum() / wrong.sum()) > 0.3


def test_labels_without_noise_have_few_issues():
    p, given, _ = drawn(6000, 10, 8.0, 0.0, False)
    assert label_noise(p, given).count < 60


def test_the_blend_is_the_geometric_mean():
    p, q = torch.tensor([[0.9, 0.1]]), torch.tensor([[0.5, 0.5]])
    assert torch.allclose(blended(p, q), torch.tensor([[0.75, 0.25]]).double())
    assert torch.allclose(blended(p, None), p.double())
    missing = torch.tensor([[torch.nan, torch.nan]])
    assert torch.allclose(blended(p, missing), p.double())


def test_residuals_of_a_normal_distribution_are_no_issue():
    u = torch.randn(2000, generator=torch.Generator().manual_seed(0))
    assert wrong_residuals(u).count <= 2
    u[:20] += 12.0
    found = wrong_residuals(u)
    assert found.is_issue[:20].all()
    assert found.count <= 24


def test_an_example_is_as_wrong_as_its_worst_label():
    p, given, _ = drawn(2000, 2, 6.0, 0.1, False)
    sets = torch.stack([given.double(), given.double()], 1)
    found = wrong_sets(torch.stack([p[:, 1], p[:, 1]], 1), sets)
    alone = label_noise(p, given)
    assert torch.equal(found.is_issue, alone.is_issue)
