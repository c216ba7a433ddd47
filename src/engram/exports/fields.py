"""One row per example with what other tools show of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engram.auditing.outcome import Audit
from engram.core.arguments import shown
from engram.errors import ArgumentError, LikelihoodError
from engram.sensitivity.label_issues import label_issues
from engram.sensitivity.result import Result

if TYPE_CHECKING:
    import pandas as pd


def fields(found: Audit | Result | Any) -> pd.DataFrame:
    """What an audit or a result says about each example, by its position in the data.

    Of an audit the table of issues; of a result ``score``, ``loss``, ``loo_loss``, ``trust`` and,
    of a classifier, ``given_label``, ``predicted_label`` and ``label_score``, the probability of
    the given label under leave-one-out.

    Args:
        found: of :func:`engram.audit` or :func:`engram.sensitivities`.

    Example:
        >>> import torch
        >>> import engram
        >>> model, data = torch.nn.Linear(3, 2), (torch.randn(20, 3), torch.arange(20) % 2)
        >>> fitted = engram.laplace(model, data, prior_precision=1.0)
        >>> list(fields(engram.sensitivities(model, data, fitted)).columns)
        ['given_label', 'predicted_label', 'label_score', 'score', 'loss', 'loo_loss', 'trust']
    """
    if isinstance(found, Audit):
        return found.issues
    if not isinstance(found, Result):
        raise ArgumentError(
            "an audit or a result", shown(found), "pass what engram.audit or sensitivities gave"
        )
    frame = found.to_frame()[["score", "loss", "loo_loss"]]
    frame["trust"] = found.verdict.level_names
    try:
        issues = label_issues(found).loc[frame.index]
    except LikelihoodError:  # a regression has no labels
        return frame
    frame.insert(0, "given_label", issues["given"])
    frame.insert(1, "predicted_label", issues["predicted"])
    frame.insert(2, "label_score", issues["loo_probability"])
    return frame


def plain(frame: pd.DataFrame) -> pd.DataFrame:
    """Python's own values, and None where there is none: other libraries know no other."""
    return frame.astype(object).where(frame.notna(), None)


def check_length(frame: pd.DataFrame, count: int, what: str) -> None:
    """ArgumentError unless there is a sample for each example."""
    if len(frame) != count:
        raise ArgumentError(
            f"{what} with the {len(frame):,} examples of the result, in its order",
            f"{count:,}",
            "pass the data that the result is about",
        )
