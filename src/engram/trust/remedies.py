"""What to do about a doubtful estimate: what it takes, and what it brought in the studies.

A recorded training knows how long it took, so that what trains again is told with its time.
"""

from __future__ import annotations

from engram.core.progress import time_in_words

REFITS = 32  # of a certificate, which trains once more with nothing left out
SUBSETS = 64  # trainings for the truth of every example
REPLAYED = "pass training=, the record of engram.record(..., replay=True)"
REPLAYED_SHARE = 2 / 3  # of a training, that the replay of a removal walks again


def taking(trainings: float, seconds: float | None) -> str:
    """What trainings take, as words to put behind them; none where nobody knows of one.

    Args:
        trainings: how many.
        seconds: of one.

    Example:
        >>> taking(32, 7.5), taking(32, None)
        (' (about 4 min)', '')
    """
    return "" if seconds is None else f" (about {time_in_words(trainings * seconds)})"


GAIN_ALONG = (
    "in the study the ranking of half of the nets was then above 0.9, not 0.82, and sizes within "
    "2 times for 15 of 16, not for 8."
)


def record(seconds: float | None) -> str:
    """Of an estimate from the end of a training alone, of which no checkpoints are there."""
    return (
        "Record the training with its checkpoints and visits, engram.record(optimizer, model, "
        f"loader=loader){taking(1, seconds)}, and pass training= without an estimator: {GAIN_ALONG}"
    )


def go_along(walkable: bool, seconds: float | None) -> str:
    """Of an estimate from the end of a training alone.

    Args:
        walkable: whether its checkpoints are there, so that nothing has to be trained again.
        seconds: that the training took.
    """
    if not walkable:
        return record(seconds)
    return f"Leave out estimator=, so that the estimate goes along the record: {GAIN_ALONG}"


def replay(seconds: float | None) -> str:
    """Of the removal of a group from a net that was stopped."""
    return (
        f"Walk the training again: {REPLAYED}{taking(REPLAYED_SHARE, seconds)}. In the study of "
        "groups its sign was right in all of 86 clear cases, and its size within 2 times in 81."
    )


def finer() -> str:
    """Of sizes along a recorded training that are expected to be off."""
    return (
        "Go along it in smaller steps, segments=8: for twice the time sizes were within 1.5 times "
        "for 14 of 15 convolutional and residual nets and transformers, not for 9 (of MLPs for as "
        "many as before)."
    )


def certify(seconds: float | None) -> str:
    """Of a size or a mean that is to be known, where a training takes so long."""
    return (
        f"Where the number counts: engram.certify(..., refits={REFITS}) trains {REFITS + 1} times"
        f"{taking(REFITS + 1, seconds)} and gives the mean with an interval, 9 to 12 % either way "
        f"for two such nets; {truth(seconds)}"
    )


def truth(seconds: float | None) -> str:
    """Of a ranking that is to be known."""
    return (
        f"engram.retrain(..., subsets={SUBSETS}) has the truth of every example"
        f"{taking(SUBSETS, seconds)}."
    )
