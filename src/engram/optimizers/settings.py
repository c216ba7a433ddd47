"""Settings of a parameter group, checked once, where they enter."""

from __future__ import annotations

import math
from typing import Any

from engram.core.arguments import MANY, is_number, positive, whole
from engram.core.errors import ArgumentError


def resolved(group: dict[str, Any]) -> dict[str, Any]:
    """The group with every setting checked, and the initial precision as a number."""
    positive("num_data", group["num_data"], "count the training examples")
    positive(
        "prior_precision",
        group["prior_precision"],
        "use num_data times the weight decay of the mean loss",
    )
    if group["initial_precision"] is None:
        group["initial_precision"] = group["num_data"] + group["prior_precision"]
    positive("initial_precision", group["initial_precision"], "use num_data, or leave it out")
    if not (is_number(group["lr"]) and 0 <= group["lr"] < math.inf):
        raise ArgumentError("lr of at least 0", repr(group["lr"]), "use 1 for a full Newton step")
    if not (is_number(group["precision_lr"]) and 0 <= group["precision_lr"] <= 1):
        raise ArgumentError("precision_lr from 0 to 1", repr(group["precision_lr"]), "use 0.1")
    whole("number of samples", group.get("samples", 1), 1, MANY, remedy="use samples=1 or more")
    return group
