"""Copies are found, and left out together."""

import pytest
import torch

import engram
from engram.auditing.duplicates import (
    corrected,
    find_duplicates,
    nearest_neighbours,
    without_copies,
)


def test_exact_and_near_copies_and_nothing_else():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 10, generator=generator)
    x[150], x[151] = x[3], x[3]
    x[160] = x[7] + 1e-4
    found = find_duplicates(x)
    assert found.group.ge(0).nonzero()[:, 0].tolist() == [3, 7, 150, 151, 160]
    assert found.group[3] == found.group[150] == found.group[151] != found.group[7]
    assert found.exact.nonzero()[:, 0].tolist() == [3, 150, 151]
    assert found.nearest[7] == 160
    assert found.nearest[160] == 7
    assert found.nearest[3] in (150, 151)
    assert found.count == 5


def test_texts_are_copies_by_their_words():
    review = "We came for the soup, stayed for the cake and shall be back with all of our friends"
    texts = ["What is titanium ?", "What is a caldera ?", review, "what is TITANIUM", "Who is it ?"]
    texts += [f"{review} soon", review.replace("cake", "pie").replace("soup", "fish")]
    vectors = torch.zeros(7, 3)  # of texts with rare words only, of which a model is given nothing
    vectors[[2, 5, 6]] = torch.tensor([[1.0, 0.5, 2.0], [1.1, 0.5, 2.0], [1.3, 0.4, 2.0]])
    found = find_duplicates(vectors, texts)
    assert found.nearest.tolist() == [3, -1, 5, 0, -1, 2, -1]
    assert found.exact.tolist() == [True, False, False, True, False, False, False]


def test_nearest_neighbours_are_those_of_all_distances():
    points = torch.randn(50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    distances = torch.cdist(points, points).fill_diagonal_(torch.inf)
    distance, place = nearest_neighbours(points)
    assert torch.equal(place, distances.argmin(1))
    assert torch.allclose(distance, distances.min(1).values)


def test_copies_together_are_what_removing_the_pair_gives():
    """Ridge regression with linear deviations: one step for the pair, evaluated at its input."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    x[20] = x[4]
    y = torch.randn(30, 1, generator=generator, dtype=torch.float64)
    model = torch.nn.Linear(4, 1).double()
    posterior = engram.laplace(
        model, (x, y), likelihood="gaussian", structure="full", prior_precision=1.0
    )
    result = engram.sensitivities(model, (x, y), posterior, estimator="linear", progress=False)
    together = without_copies(result, find_duplicates(x))
    pair = engram.remove(model, (x, y), posterior, [4, 20], estimator="linear")
    expected = (pair.group.outputs_without - pair.group.outputs)[:, 0]
    assert torch.allclose(together.deviation[[4, 20], 0], expected)
    assert torch.allclose(together.loo_loss[[4, 20]], pair.group.loss_without)
    others = [i for i in range(30) if i not in (4, 20)]
    assert torch.equal(together.loo_loss[others], result.loo_loss[others])


def test_copies_with_other_labels_take_their_share_of_a_loss():
    loo, alone = torch.full((3,), 0.4), torch.full((3,), 2.0)
    together = torch.tensor([1.0, 2.0, 2.5])
    assert corrected(loo, alone, together).tolist() == pytest.approx([0.2, 0.4, 0.9])
