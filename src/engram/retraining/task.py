"""What a worker is asked to do."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engram.core.data.batches import Data
from engram.likelihoods import Likelihood
from engram.retraining.selection import Selection

NOTHING = torch.empty(0, dtype=torch.long)


@dataclass(frozen=True)
class Task:
    """What both workers need.

    Args:
        selection: which examples each copy leaves out.
        likelihood: of the data.
        evaluate_on: other data whose losses are wanted for every copy.
        refits: trainings with nothing left out; the first is the baseline.
        keep_models: whether the parameters of every copy are kept.
        seed: of all trainings.
    """

    selection: Selection
    likelihood: Likelihood
    evaluate_on: Data | None
    refits: int
    keep_models: bool
    seed: int
