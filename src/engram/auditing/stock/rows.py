"""Tables: imputed, standardised, one column for each category, and a small MLP."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from engram.auditing.examples import Examples, Inputs, Rows
from engram.auditing.stock.base import Recipe, Stock
from engram.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

HIDDEN = (64, 32)  # units of the two hidden layers
MOST_CATEGORIES = 30  # of a column; rarer ones share one
MOSTLY = 0.9  # share of a column's values that are numbers, from which the column is one of numbers
PARTLY = 0.5  # the same share, where as words its values would only name rows
NAMES_EACH = 0.5  # share of different values from which a column of words names rows: no feature
LARGEST = 20.0  # standard deviations from the mean at which a number is cut: one typo is no reason


def small_mlp(examples: Examples) -> Stock:
    """An MLP on encoded columns, which stops by our own estimate."""
    assert isinstance(examples.inputs, Rows)
    encoder = RowEncoder(examples.inputs.frame)
    inputs = encoder(examples.inputs)
    width = inputs.shape[1]
    model = nn.Sequential(
        nn.Linear(width, HIDDEN[0]),
        nn.ReLU(),
        nn.Linear(HIDDEN[0], HIDDEN[1]),
        nn.ReLU(),
        nn.Linear(HIDDEN[1], examples.task.num_outputs),
    )
    batch_size = 32 if len(examples) < 5000 else 128
    recipe = Recipe(60, batch_size, 2e-3, 1e-2, anneals=False, stops_early=True)
    name = f"MLP {width}-{HIDDEN[0]}-{HIDDEN[1]}-{examples.task.num_outputs}"
    return Stock(model, encoder, inputs, recipe, name, encoder.notes)


class RowEncoder:
    """Columns as numbers, by what the training data has in them.

    Args:
        frame: the training data's features.
    """

    def __init__(self, frame: pd.DataFrame) -> None:
        self.numeric, self.words, self.dropped = [], [], []  # type: ignore[var-annotated]
        self.notes: tuple[str, ...] = ()
        for name in frame.columns:
            self._sort_in(name, frame[name])
        if not self.numeric and not self.words:
            raise DataError(
                "a column that says something about the label",
                "columns that are constant or differ in every row",
                "name a text column with text=, or add features",
            )
        missing = int(frame[self.numeric + self.words].isna().sum().sum())
        if missing:
            self._note(f"{missing:,} missing values filled: medians, and a category of their own")
        self.transformer = self._transformer()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a column without any value, which was dropped
            self.transformer.fit(self._typed(frame))

    def __call__(self, inputs: Inputs) -> Tensor:
        """[N, F]."""
        assert isinstance(inputs, Rows)
        found = np.asarray(self.transformer.transform(self._typed(inputs.frame)), dtype=np.float32)
        return torch.from_numpy(found).clamp(-LARGEST, LARGEST)

    def _sort_in(self, name: str, column: pd.Series[Any]) -> None:
        """Whether a column is one of numbers, of words, or says nothing."""
        present = column.dropna()
        numbers = _numbers(present)
        share = float(np.isfinite(numbers).mean()) if len(present) else 0.0
        distinct = present.astype(str).nunique()
        names_rows = distinct > max(MOST_CATEGORIES, NAMES_EACH * len(present))
        if distinct < 2:
            self.dropped.append(name)
            self._note(f"column {name!r} left out: it has one value only")
        elif share >= (PARTLY if names_rows else MOSTLY):
            self.numeric.append(name)
            if share < 1:
                count = int((~np.isfinite(numbers)).sum())
                self._note(f"column {name!r} has mixed types: {count:,} non-numbers as missing")
        elif names_rows:
            self.dropped.append(name)
            self._note(f"column {name!r} left out: its {distinct:,} values name single rows")
        else:
            self.words.append(name)

    def _note(self, text: str) -> None:
        self.notes += (text,)

    def _typed(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Numbers as floats with NaN for what is missing, words as strings."""
        import pandas as pd

        numbers = {name: _numbers(frame[name]) for name in self.numeric}
        words = {
            name: frame[name].astype(object).where(frame[name].notna(), "missing").astype(str)
            for name in self.words
        }
        return pd.DataFrame(numbers | words, index=frame.index)

    def _transformer(self) -> Any:
        from sklearn.compose import ColumnTransformer
        from sklearn.impute import SimpleImputer
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import OneHotEncoder, StandardScaler

        imputer = SimpleImputer(strategy="median", add_indicator=True)
        known = OneHotEncoder(
            max_categories=MOST_CATEGORIES,
            handle_unknown="infrequent_if_exist",
            sparse_output=False,
        )
        return ColumnTransformer(
            [
                ("numbers", make_pipeline(imputer, StandardScaler()), self.numeric),
                ("words", known, self.words),
            ]
        )


def _numbers(column: pd.Series[Any]) -> np.ndarray:
    """As floats; NaN for what is no finite number."""
    import pandas as pd

    found = pd.to_numeric(column, errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)
    return np.where(np.isfinite(found), found, np.nan)
