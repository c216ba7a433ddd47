"""For people who look at their data in FiftyOne or Spotlight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engram.auditing.outcome import Audit
from engram.exports.fields import check_length, fields, plain
from engram.sensitivity.result import Result

if TYPE_CHECKING:
    import pandas as pd

PREFIX = "engram_"  # before the names of fields, so that none of the user's is replaced


def to_fiftyone(found: Audit | Result, samples: Any, prefix: str = PREFIX) -> list[str]:
    """Add a field for each column of :func:`fields` to the samples of a FiftyOne dataset or view.

    A column without any value is left out: FiftyOne could not tell its type.

    Args:
        found: an audit or a result.
        samples: in the order of the examples.
        prefix: of the fields' names.

    Returns:
        The names of the fields, to sort and filter by.
    """
    frame = plain(fields(found))
    check_length(frame, len(samples), "a dataset")
    names = []
    for name, column in frame.loc[:, frame.notna().any()].items():
        samples.set_values(f"{prefix}{name}", column.tolist())
        names.append(f"{prefix}{name}")
    return names


def to_spotlight(
    found: Audit | Result, data: pd.DataFrame | None = None, prefix: str = PREFIX
) -> pd.DataFrame:
    """The user's table with our columns beside its own, for ``spotlight.show``.

    Args:
        found: an audit or a result.
        data: one row per example, in its order; only our columns if not given.
        prefix: of our columns.

    Example:
        >>> import pandas as pd
        >>> import torch
        >>> import engram
        >>> model, data = torch.nn.Linear(3, 2), (torch.randn(4, 3), torch.arange(4) % 2)
        >>> fitted = engram.laplace(model, data, prior_precision=1.0)
        >>> result = engram.sensitivities(model, data, fitted)
        >>> list(to_spotlight(result, pd.DataFrame({"file": list("abcd")})).columns)[:2]
        ['file', 'engram_given_label']
    """
    frame = fields(found).add_prefix(prefix)
    if data is None:
        return frame
    check_length(frame, len(data), "a table")
    joined = data.reset_index(drop=True)
    return joined.join(frame.reset_index(drop=True))
