"""An example's own outputs when the parameters really move, and along the tangent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engram.evidence.objective import Objective
from engram.sensitivity.effects import effect


@dataclass(frozen=True, eq=False)
class Displacement:
    """Change of the predictions of n examples, each with its own step, [n, K]."""

    tangent: Tensor
    displaced: Tensor

    @property
    def error(self) -> Tensor:
        """How far the tangent is off, relative to what it says, L1 over outputs, [n]."""
        off = (self.displaced - self.tangent).abs().sum(1)
        size = self.tangent.abs().sum(1)
        return off / size.clamp(min=torch.finfo(size.dtype).tiny)


def displacement(objective: Objective, indices: Tensor, steps: Tensor) -> Displacement:
    """Each example at theta + its step: linearised, and run."""
    opened = objective.opened
    found: dict[str, list[Tensor]] = {"linearised": [], "displaced": []}
    for index, step in zip(indices, steps, strict=True):
        delta = objective.layout.unflatten(step)
        for place, rows in found.items():
            batches = opened.batches.subset(index[None])
            moved = effect(opened, batches, 1, delta, place)
            mean = opened.likelihood.mean
            rows.append(mean(moved.outputs_without) - mean(moved.outputs))
    return Displacement(torch.cat(found["linearised"]), torch.cat(found["displaced"]))
