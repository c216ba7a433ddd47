"""Texts: TF-IDF of words and word pairs, reduced to their main directions, and a small head."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engram.auditing.examples import Examples, Inputs, Texts
from engram.auditing.stock.base import Recipe, Stock
from engram.errors import DataError

MOST_TERMS = 30_000  # words and pairs that are counted
DIRECTIONS = 300  # of the terms that are kept
HIDDEN = 64


def tfidf_head(examples: Examples) -> Stock:
    """A small MLP on the main directions of TF-IDF."""
    assert isinstance(examples.inputs, Texts)
    encoder = TextEncoder(examples.inputs)
    inputs = encoder(examples.inputs)
    return Stock(
        nn.Sequential(
            nn.Linear(inputs.shape[1], HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, examples.task.num_outputs),
        ),
        encoder,
        inputs,
        Recipe(40, 64, 2e-3, 1e-2, anneals=False, stops_early=True),
        f"TF-IDF in {inputs.shape[1]} directions, MLP with {HIDDEN} hidden units",
    )


class TextEncoder:
    """TF-IDF and its main directions, as the training texts have them.

    Args:
        texts: the training data's.
    """

    def __init__(self, texts: Texts) -> None:
        from sklearn.decomposition import TruncatedSVD
        from sklearn.feature_extraction.text import TfidfVectorizer

        often = 2 if len(texts) >= 100 else 1
        self.vectorizer = TfidfVectorizer(
            ngram_range=(1, 2), min_df=often, max_features=MOST_TERMS, sublinear_tf=True
        )
        try:
            counts = self.vectorizer.fit_transform(texts.lines)
        except ValueError as error:
            raise DataError(
                "texts with words in them", str(error), "name another column with text="
            ) from error
        count = min(DIRECTIONS, counts.shape[1] - 1, len(texts) - 1)
        self.directions: Any = None
        if count >= 2:
            self.directions = TruncatedSVD(count, random_state=0).fit(counts)
        self.scale = 1.0
        self.scale = float(self(texts).std().clamp(min=1e-6))

    def __call__(self, inputs: Inputs) -> Tensor:
        """[N, F], of unit variance over all entries."""
        assert isinstance(inputs, Texts)
        counts = self.vectorizer.transform(inputs.lines)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = (
                counts.toarray() if self.directions is None else self.directions.transform(counts)
            )
        return torch.from_numpy(np.asarray(found, dtype=np.float32)) / self.scale
