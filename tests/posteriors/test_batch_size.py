"""What is sampled belongs to the examples: no batch size changes a posterior or a result."""

import pytest
import torch
from torch import nn

import engram
from engram.likelihoods.draws import Draws

CLASSES = 40


@pytest.fixture(scope="module")
def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
    with torch.no_grad():
        model[2].weight *= 10  # confident, so that most classes can be sampled
    return model, (torch.randn(90, 6).double(), torch.randint(0, CLASSES, (90,)))


@pytest.mark.parametrize(
    ("structure", "curvature"),
    [
        ("kronecker", "ggn"),
        ("ekfac", "ggn"),
        ("diagonal", "ggn"),
        ("kronecker", "fisher"),
        ("diagonal", "fisher"),
        ("last_layer", "fisher"),
    ],
)
def test_no_batch_size_changes_it(problem, structure, curvature):
    found = []
    for batch_size in (90, 64, 7, 1):
        posterior = engram.laplace(
            *problem,
            structure=structure,
            curvature=curvature,
            tolerance=0.03,
            prior_precision=5.0,
            batch_size=batch_size,
            progress=False,
        )
        found.append(
            engram.sensitivities(
                *problem, posterior, estimator="linear", batch_size=batch_size, progress=False
            )
        )
    for other in found[1:]:
        for name in ("deviation", "loo_loss", "leverage"):
            expected, got = getattr(found[0], name), getattr(other, name)
            known = torch.isfinite(expected)
            assert known.sum() >= 10 if name == "leverage" else known.all()
            assert torch.equal(torch.isfinite(got), known)
            assert (got - expected)[known].abs().max() <= 1e-12 * expected[known].abs().max()


def test_it_is_sampled_at_all(problem):
    """Otherwise the test above would say nothing."""
    sampled = [
        engram.laplace(
            *problem,
            structure="kronecker",
            tolerance=0.03,
            seed=seed,
            progress=False,
            prior_precision=1.0,
        )
        for seed in (0, 1)
    ]
    assert sampled[0].log_det() != sampled[1].log_det()


def test_seed_example_place_and_stream_all_count():
    numbers = torch.arange(5000)
    drawn = [Draws(seed, numbers, stream).uniform(2) for seed in (0, 1) for stream in (0, 1)]
    columns = torch.cat(drawn, dim=1)
    assert columns.min() > 0
    assert columns.max() < 1
    assert (columns.mean(0) - 0.5).abs().max() < 5 * (1 / 12 / 5000) ** 0.5
    related = torch.corrcoef(columns.T) - torch.eye(8).double()
    assert related.abs().max() < 5 / 5000**0.5
    following = torch.corrcoef(torch.stack([columns[:-1, 0], columns[1:, 0]]))
    assert following[0, 1].abs() < 5 / 5000**0.5
    spread = torch.histc(columns[:, 0], 20, 0, 1)
    assert ((spread - 250) ** 2 / 250).sum() < 45  # chi-squared with 19 degrees, about 1 in 1000


def test_many_small_probabilities_are_drawn_in_half_precision_too():
    probability = torch.full((4000, 400), 1 / 400, dtype=torch.bfloat16)
    drawn = Draws(0, torch.arange(4000)).chosen(probability)[:, 0]
    assert (drawn.double().mean() - 199.5).abs() < 5 * 400 / (12 * 4000) ** 0.5
    assert len(drawn.unique()) > 390
