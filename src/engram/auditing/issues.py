"""The table of an audit: for every example whether its label looks wrong, and what it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engram.auditing.duplicates import Duplicates
from engram.auditing.examples import Examples
from engram.auditing.label_noise import LabelNoise, blended, label_noise
from engram.auditing.outliers import wrong_numbers
from engram.auditing.second_training import SecondOpinion, carried_over
from engram.errors import LikelihoodError
from engram.sensitivity.label_issues import suspicion
from engram.sensitivity.result import Result
from engram.training.memorisation import memorisation, prequential
from engram.training.training import Training

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
    "score": "how far the example moves its own prediction; of numbers in their unit",
    "duplicate_of": "position of its nearest copy; missing where it has none",
    "group": "by which examples are left out together",
    "group_harm": "what its group adds to the loss of others; positive where it hurts",
    "trust": "how far to believe the row: good, caution or unreliable",
}


@dataclass(frozen=True, eq=False)
class Judged:
    """What is thought of the labels.

    Args:
        losses: by which they are ranked, [N]: without the example, and before each look at it.
        noise: which are likely wrong.
        memorised: examples that were learned by heart, [N]; None where no visit was recorded.
        predicted: probabilities or numbers without the example, [N, K].
    """

    losses: Tensor
    noise: LabelNoise
    memorised: Tensor | None
    predicted: Tensor


def judged(
    result: Result, training: Training | None, targets: Tensor, opinion: SecondOpinion | None
) -> Judged:
    """The labels, by leave-one-out and by what the training said before each look at them.

    Args:
        result: leave-one-out.
        training: the record; None where there is none.
        targets: of the training.
        opinion: of a model that has not seen half of them; None where there is none.
    """
    heard = None if training is None else prequential(training, targets)
    nothing = torch.full_like(result.loo_loss, torch.nan)
    losses = suspicion(result.loo_loss, nothing if heard is None else heard).double()
    left_out = result.basis.known_likelihood.mean(result.outputs) + result.prediction_deviation
    known = None
    if training is not None and heard is not None:
        known = memorisation(training, targets, result.loss).memorised
    try:
        labels = result.labels
    except LikelihoodError:
        return Judged(losses, wrong_numbers(result, left_out), known, left_out)
    at_visits = None
    if training is not None and heard is not None and training.visits is not None:
        at_visits, _ = training.visits.mean_predictions(torch.arange(len(targets)))
    probabilities = blended(result.loo_probabilities, at_visits)
    noise = (
        label_noise(probabilities, labels)
        if opinion is None
        else carried_over(opinion, losses, probabilities, labels)
    )
    return Judged(losses, _with_others(noise, labels), known, probabilities)


def _with_others(noise: LabelNoise, labels: Tensor) -> LabelNoise:
    """Without what is said of the only example of a class: nothing is known of it without that."""
    alone = labels.bincount()[labels] == 1
    return LabelNoise.of(torch.where(alone, noise.rate, noise.chance), noise.rate)


def issue_table(
    examples: Examples, result: Result, labels: Judged, duplicates: Duplicates
) -> pd.DataFrame:
    """One row an example, by its position in the data."""
    import pandas as pd

    count = len(examples)
    nearest = pd.array(duplicates.nearest.numpy(), dtype="Int64")
    nearest[duplicates.nearest.numpy() < 0] = pd.NA
    nothing = np.full(count, False)
    groups = [None] * count if examples.groups is None else list(examples.groups)
    return pd.DataFrame(
        {
            "id": list(examples.ids),
            "is_label_issue": labels.noise.is_issue.numpy(),
            "label_score": (-labels.losses).exp().clamp(max=1).numpy(),
            "given_label": examples.task.told(result.targets),
            "predicted_label": examples.task.predicted(labels.predicted),
            "chance_wrong": labels.noise.chance.numpy(),
            "loss": result.loss.numpy(),
            "loo_loss": result.loo_loss.numpy(),
            "memorised": nothing if labels.memorised is None else labels.memorised.numpy(),
            "score": examples.task.unit * result.score.numpy(),
            "duplicate_of": nearest,
            "group": pd.array(groups, dtype="string"),
            "group_harm": np.nan,
            "trust": result.verdict.level_names,
        },
        index=pd.RangeIndex(count, name="example"),
    )
