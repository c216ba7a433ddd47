"""The neighbours on an audit's page are those of `engram.influence`, and are kept in its folder."""

import numpy as np
import torch

import engram
from auditing_tables import blobs
from engram.auditing.neighbours import EACH, neighbours_of


def trained():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=generator)
    y = (x[:, 0] > 0).long()
    model = torch.nn.Linear(3, 2)
    return model, (x, y), engram.laplace(model, (x, y), prior_precision=1.0, progress=False)


def test_they_are_the_strongest_influences_of_the_most_doubtful():
    model, data, posterior = trained()
    losses = torch.arange(60.0)
    near = neighbours_of(model, data, posterior, losses, progress=False)
    assert near.of.tolist() == list(range(59, -1, -1))
    influence = engram.influence(model, data, data, posterior, estimator="linear", progress=False)
    influence.fill_diagonal_(0)
    for row in (0, 17):
        column = influence[:, near.of[row]]
        assert np.allclose(near.helpful_effect[row], column.topk(EACH).values, rtol=1e-4)
        assert np.allclose(near.harmful_effect[row], -(-column).topk(EACH).values, rtol=1e-4)


def test_they_are_kept_with_the_run_and_are_on_the_page(tmp_path):
    frame, _ = blobs(60)
    found = engram.audit(frame, tmp_path / "run", epochs=4, progress=False)
    again = engram.load(tmp_path / "run")
    assert np.array_equal(again.neighbours.helpful, found.neighbours.helpful)
    assert again.page_data().examples.neighbours is again.neighbours
    first = int(found.issues["label_score"].idxmin())
    assert found.neighbours.of[0] == first


def test_a_minimal_audit_has_none():
    frame, _ = blobs(60)
    found = engram.audit(frame, epochs=1, minimal=True, progress=False)
    assert found.neighbours is None
    assert len(found.classes) == 0
