"""The table of an audit: for every example whether its label looks wrong, and what it does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engram.auditing.duplicates import Duplicates
from engram.auditing.label_noise import LabelNoise
from engram.auditing.tasks import Task
from engram.sensitivity.result import Result

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = {  # name of a column: what it says
    "is_label_issue": "whether the label is more likely wrong than right",
    "label_score": "0 to 1, low where the other examples contradict the label",
    "given_label": "as the data has it",
    "predicted_label": "by the model without the example",
    "chance_wrong": "that the label is wrong",
    "loss": "under the model as it is",
    "loo_loss": "under the model without the example and its copies",
    "memorised": "known at the end, and unknown before each look at it",
    "score": "how far the example moves its own prediction",
    "duplicate_of": "position of its nearest copy; missing where it has none",
    "group": "by which examples are left out together",
    "group_harm": "what its group adds to the loss of others; positive where it hurts",
    "trust": "how far to believe the row: good, caution or unreliable",
}


def label_losses(result: Result, heard: Tensor | None) -> Tensor:
    """The loss that labels are ranked by, [N]: without the example, and before each look at it.

    Args:
        result: leave-one-out losses.
        heard: prequential losses, where the training has named its examples.
    """
    left_out = result.loo_loss.double()
    if heard is None:
        return left_out
    return torch.where(heard.isfinite(), 0.5 * (left_out + heard.double()), left_out)


def issue_table(
    task: Task,
    ids: tuple[str, ...],
    result: Result,
    noise: LabelNoise,
    losses: Tensor,
    memorised: Tensor | None,
    duplicates: Duplicates,
) -> pd.DataFrame:
    """One row an example, by its position in the data; groups are added where there are some."""
    import pandas as pd

    means = result.basis.known_likelihood.mean(result.outputs) + result.prediction_deviation
    nearest = pd.array(duplicates.nearest.numpy(), dtype="Int64")
    nearest[duplicates.nearest.numpy() < 0] = pd.NA
    known = np.full(len(ids), False) if memorised is None else memorised.numpy()
    return pd.DataFrame(
        {
            "id": list(ids),
            "is_label_issue": noise.is_issue.numpy(),
            "label_score": (-losses).exp().numpy(),
            "given_label": task.words(result.targets),
            "predicted_label": task.predicted(means),
            "chance_wrong": noise.chance.numpy(),
            "loss": result.loss.numpy(),
            "loo_loss": result.loo_loss.numpy(),
            "memorised": known,
            "score": result.score.numpy(),
            "duplicate_of": nearest,
            "group": pd.array([None] * len(ids), dtype="string"),
            "group_harm": np.nan,
            "trust": result.verdict.level_names,
        },
        index=pd.RangeIndex(len(ids), name="example"),
    )
