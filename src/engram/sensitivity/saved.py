"""What a result must be to be saved and read: columns of one length, of finite numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engram.core.errors import StorageError
from engram.sensitivity.provenance import check_provenance

FORMAT = 3
TABLES = ("outputs", "deviation", "prediction_deviation")  # [N, K]
COLUMNS = ("score", "loss", "loo_loss", "leverage")  # [N]
ALWAYS_FINITE = ("outputs", "loss", "counts")
FINITE_UNLESS_FLAGGED = ("deviation", "prediction_deviation", "score", "loo_loss")
WAYS = 3  # in which an example's numbers are obtained


def check_saved(values: Mapping[str, Any]) -> None:
    """StorageError unless the columns of a result fit together and hold numbers.

    A row that the estimator's guard flagged may be NaN, and so may a leverage that was not
    computed.
    """
    indices = values["indices"]
    _check(indices.dim() == 1 and len(indices) > 0, "indices [N]", indices)
    _check(indices.dtype == torch.int64 and bool((indices >= 0).all()), "whole indices", indices)
    shape, targets = values["outputs"].shape, values["targets"]
    _check(len(shape) == 2 and shape[0] == len(indices) and shape[1] > 0, "outputs [N, K]", indices)
    _check(targets.dim() > 0 and len(targets) == len(indices), "targets [N, ...]", targets)
    for name in TABLES + COLUMNS:
        wanted = shape if name in TABLES else indices.shape
        found = values[name]
        _check(found.shape == wanted and found.is_floating_point(), f"{name} {list(wanted)}", found)
    flagged, obtained = values["flagged"], values["obtained"]
    _check(flagged.dtype == torch.bool and flagged.shape == indices.shape, "flags [N]", flagged)
    known = obtained.dtype == torch.uint8 and obtained.shape == indices.shape
    _check(known and bool((obtained < WAYS).all()), "how each example was obtained [N]", obtained)
    counts = values["counts"]
    counted = counts.is_floating_point() and counts.shape == indices.shape
    _check(counted and bool((counts >= 0).all()) and bool(counts.any()), "counts [N]", counts)
    for name in ALWAYS_FINITE + FINITE_UNLESS_FLAGGED:
        rows = slice(None) if name in ALWAYS_FINITE else ~flagged
        _check_finite(name, values[name][rows])
    check_provenance(values["provenance"])
    if targets.is_floating_point():
        _check_finite("targets", targets)


def _check(good: bool, expected: str, got: Tensor) -> None:
    if not good:
        raise StorageError(
            f"a result with {expected}",
            f"{got.dtype} of shape {list(got.shape)}",
            "save it again: it is damaged or edited",
        )


def _check_finite(name: str, values: Tensor) -> None:
    count = int((~torch.isfinite(values)).sum())
    if count:
        raise StorageError(
            f"a result with finite {name}",
            f"{count:,} of {values.numel():,} numbers NaN or infinite",
            "compute it again: see the result's verdict for what may be wrong",
        )
