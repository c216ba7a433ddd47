"""The training examples that speak for and against the labels that look most wrong."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engram.posteriors.gaussian import Posterior
from engram.report.examples import Neighbours
from engram.sensitivity.influence import influence

MOST = 240  # examples with neighbours, by how wrong they look: ten screens of cards
FEWEST = 24  # of them, however large the model: one screen
EACH = 4  # neighbours on each side
MOST_WORK = 2e12  # products of all gradients together, about a minute of a core


def neighbours_of(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    posterior: Posterior,
    losses: Tensor,
    progress: bool,
) -> Neighbours:
    """The most helpful and most harmful examples of those whose labels look most wrong.

    By the influence at the last weights, a pass over the data or a few.

    Args:
        model, data, posterior: of the audit.
        losses: by which labels are ranked, the most doubtful highest, [N].
        progress: show a bar.
    """
    inputs, targets = data
    covered = sum(p.numel() for n, p in model.named_parameters() if n in posterior.block_of)
    affordable = int(MOST_WORK / max(1, covered * len(targets)))
    chosen = losses.argsort(descending=True, stable=True)[: min(MOST, max(FEWEST, affordable))]
    found = influence(
        model,
        data,
        (inputs[chosen], targets[chosen]),
        posterior,
        estimator="linear",
        progress=progress,
    )
    return Neighbours.of_influence(found, torch.as_tensor(chosen).numpy(), EACH)
