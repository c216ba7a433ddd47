"""Measures as a table."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from torch import Tensor


def measures_frame(measures: Mapping[str, object], names: tuple[str, ...]) -> pd.DataFrame:
    """One row per example; vectors by their name, DFBETAS by column name."""
    columns = {k: v.numpy() for k, v in measures.items() if isinstance(v, Tensor) and v.dim() == 1}
    scaled = measures["dfbetas"]
    assert isinstance(scaled, Tensor)
    columns |= {f"dfbetas_{name}": scaled[:, k].numpy() for k, name in enumerate(names)}
    return pd.DataFrame(columns).rename_axis("example")
