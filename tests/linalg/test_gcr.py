"""Systems that share their directions, against dense answers in float64."""

import torch

from engram.linalg.gcr import BlockGCR


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def counted(matrix):
    seen = []

    def multiply(rows):
        seen.append(len(rows))
        return rows @ matrix

    return multiply, seen


def test_systems_share_their_directions():
    root = random(60, 60)
    matrix = root @ root.T / 60 + torch.eye(60).double()
    right = random(3, 60, seed=1)
    right = torch.cat([right, random(9, 3, seed=2) @ right])  # twelve systems of rank three
    multiply, seen = counted(matrix)
    shared = BlockGCR(torch.clone, multiply, right, 60)
    goals = torch.full((12,), 1e-8, dtype=torch.float64)
    found, left = shared.solve(right, goals)
    assert (found @ matrix - right).norm(dim=1).max() < 1e-7
    assert (right - found @ matrix - left).abs().max() < 1e-12
    assert max(seen) == 3  # a round never asks for more than what the residuals span
    known = len(seen)
    shared.solve(random(4, 12, seed=3) @ right, goals[:4])
    assert len(seen) == known  # combinations of what is known cost nothing
    images = shared.images[: shared.count]
    assert (images @ images.mT - torch.eye(shared.count).double()).abs().max() < 1e-10


def test_the_residual_is_the_least_that_the_directions_allow():
    root = random(40, 40)
    matrix, right = root @ root.T / 40 + torch.eye(40).double(), random(5, 40, seed=1)
    multiply, _ = counted(matrix)
    shared = BlockGCR(torch.clone, multiply, right, 10)
    found, left = shared.solve(right, torch.full((5,), 1e-9, dtype=torch.float64))
    assert shared.full
    images = shared.directions @ matrix
    least = torch.linalg.lstsq(images.T, right.T).solution.T @ images
    assert (found @ matrix - least).abs().max() < 1e-8
    assert (right - least - left).abs().max() < 1e-8
