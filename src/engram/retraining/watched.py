"""Data that a training function of the user's must leave as it is."""

from __future__ import annotations

from dataclasses import dataclass

from engram.core.data.batches import Data
from engram.core.errors import TrainingError
from engram.retraining import fingerprints


@dataclass(frozen=True, eq=False)
class Watched:
    """Data sets and what they were like.

    Args:
        data: that reads the same each time; other data cannot be watched.
        before: a fingerprint of each.
    """

    data: tuple[Data, ...]
    before: tuple[str, ...]

    @classmethod
    def of(cls, *data: Data) -> Watched:
        """Data as it is now."""
        return cls(data, tuple(map(fingerprints.of_sample, data)))

    def check(self) -> None:
        """Raise where it has changed since."""
        if self.before != tuple(map(fingerprints.of_sample, self.data)):
            raise TrainingError(
                "a training function that leaves the data as it is",
                "data that changed during the training",
                "copy what you want to change, for instance x = x.clone()",
            )
