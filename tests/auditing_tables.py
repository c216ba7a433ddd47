"""Small tables with wrong labels and copies in them."""

from __future__ import annotations

import numpy as np
import pandas as pd


def blobs(count: int = 120, seed: int = 0) -> tuple[pd.DataFrame, np.ndarray]:
    """Two clouds of points with three labels wrong, and which ones."""
    generator = np.random.default_rng(seed)
    label = np.arange(count) % 2
    points = generator.normal(0, 1, (count, 3)) + 4 * label[:, None]
    wrong = np.array([5, count // 2, count - 9])
    given = label.copy()
    given[wrong] = 1 - given[wrong]
    frame = pd.DataFrame(points, columns=["a", "b", "c"])
    frame["label"] = np.where(given == 1, "yes", "no")
    return frame, wrong
