"""What a retraining must be to be saved and read: rows and copies that fit, of finite numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engram.core.errors import StorageError
from engram.sensitivity.provenance import check_provenance

FORMAT = 3
KINDS = ("examples", "groups", "classes")
TABLES = ("outputs", "deviation", "prediction_deviation")  # [R, K]
COLUMNS = ("score", "loss", "loo_loss", "noise")  # [R]
NORMS = ("gradient_norm", "wanted_norm")  # [C], of which a training function has none


def check_saved(values: Mapping[str, Any]) -> None:
    """StorageError unless the fields of a retraining fit together and hold numbers."""
    check(values["kind"] in KINDS, f"one of {', '.join(KINDS)}", repr(values["kind"])[:80])
    indices, owners, outputs = values["indices"], values["owners"], values["outputs"]
    for name, highest in (("indices", math.inf), ("owners", len(values["labels"]))):
        check_positions(name, values[name], highest)
    check(owners.shape == indices.shape, "an owner of every row", str(list(owners.shape)))
    rows, copies = len(indices), len(values["labels"])
    check(outputs.dim() == 2 and outputs.shape[1] > 0, "outputs [R, K]", str(list(outputs.shape)))
    targets = values["targets"]
    check(targets.dim() > 0 and len(targets) == rows, "a target a row", str(list(targets.shape)))
    for name in TABLES:
        check_numbers(name, values[name], (rows, outputs.shape[1]))
    for name in COLUMNS:
        check_numbers(name, values[name], (rows,))
    for name in NORMS:
        check_shape(name, values[name], (copies,))
    check_numbers("seconds", values["seconds"], (copies,))
    evaluations = values["evaluations"]
    check(evaluations.shape == (copies,), "evaluations of each copy", str(evaluations.shape))
    _check_evaluation(values["evaluation_loss"], values["evaluation_loss_with"], copies)
    for name, value in values["parameters"].items():
        check_numbers(f"the parameter {name!r}", value, (copies, *value.shape[1:]))
    check_provenance(values["provenance"])
    floor = values["noise_floor"]
    numbers = (floor.repeated, floor.reseeded, floor.drift, floor.refits)
    check(all(0 <= n < math.inf for n in numbers), "a noise floor", str(numbers))


def _check_evaluation(without: Tensor | None, given: Tensor | None, copies: int) -> None:
    check((without is None) == (given is None), "both or none of the evaluation losses", "one")
    if without is not None and given is not None:
        check(given.dim() == 1, "losses [T] on the evaluation data", str(list(given.shape)))
        check_numbers("evaluation_loss_with", given, (len(given),))
        check_numbers("evaluation_loss", without, (copies, len(given)))


def check_positions(name: str, found: Tensor, highest: float) -> None:
    """Whole numbers from 0 to below the highest, one at least."""
    whole = found.dtype == torch.int64 and found.dim() == 1 and len(found) > 0
    inside = whole and int(found.min()) >= 0 and int(found.max()) < highest
    check(inside, f"{name} from 0 to below {highest}", f"{found.dtype} {list(found.shape)}")


def check_numbers(name: str, found: Tensor, shape: tuple[int, ...]) -> None:
    """Numbers of this shape, all finite."""
    check_shape(name, found, shape)
    check(bool(torch.isfinite(found).all()), f"{name} to be finite", "NaN or infinity")


def check_shape(name: str, found: Tensor, shape: tuple[int, ...]) -> None:
    """Numbers of this shape."""
    right = tuple(found.shape) == shape and found.is_floating_point()
    check(right, f"{name} of shape {list(shape)}", f"{found.dtype} {list(found.shape)}")


def check(good: bool, expected: str, got: str) -> None:
    """StorageError unless something is good."""
    if not good:
        raise StorageError(expected, got, "run it again, and save it again")
