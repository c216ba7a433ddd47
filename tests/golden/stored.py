"""Records as files, and what differs between two of them.

A safetensors file holds the numbers, those of one shape and quantity stacked to keep it small, and
a JSON file the words, so that a changed verdict is seen in the diff of a commit.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from golden.record import Record

FOLDER = Path(__file__).parent / "values"
SMALLEST_SCALE = 1e-6  # what is smaller throughout is compared with this


def write(name: str, record: Record) -> None:
    groups: dict[tuple[str, str, torch.Size], list[str]] = defaultdict(list)
    for key, values in record.numbers.items():
        posterior, variant, quantity = key.split("/")
        groups[posterior, quantity, values.shape].append(variant)
    stacked = {
        f"{posterior}/{','.join(variants)}/{quantity}": torch.stack(
            [record.numbers[f"{posterior}/{variant}/{quantity}"] for variant in variants]
        ).contiguous()
        for (posterior, quantity, _), variants in groups.items()
    }
    save_file(stacked, FOLDER / f"{name}.safetensors")
    words = json.dumps(record.words, indent=0, sort_keys=True)
    (FOLDER / f"{name}.json").write_text(words + "\n")


def read(name: str) -> Record:
    """An empty record where nothing is stored yet."""
    path = FOLDER / f"{name}.safetensors"
    if not path.exists():
        return Record()
    numbers = {}
    for key, values in load_file(path).items():
        posterior, variants, quantity = key.split("/")
        for variant, row in zip(variants.split(","), values, strict=True):
            numbers[f"{posterior}/{variant}/{quantity}"] = row
    return Record(numbers, json.loads((FOLDER / f"{name}.json").read_text()))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest entry; infinite where they cannot be compared."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    actual, expected = actual.double(), expected.double()
    finite = expected.isfinite()
    if not torch.equal(actual.isfinite(), finite):
        return float("inf")
    if not torch.allclose(actual[~finite], expected[~finite], equal_nan=True):
        return float("inf")
    if not finite.any():
        return 0.0
    scale = max(float(expected[finite].abs().max()), SMALLEST_SCALE)
    return float((actual - expected)[finite].abs().max()) / scale


def differences(actual: Record, expected: Record, tolerance: float) -> list[str]:
    """One line for every word that changed and every number that is off by more."""
    lines = []
    for name in sorted(actual.words.keys() | expected.words.keys()):
        now, then = actual.words.get(name), expected.words.get(name)
        if now != then:
            lines.append(f"{name}: was {then!r}, is {now!r}")
    for name in sorted(actual.numbers.keys() | expected.numbers.keys()):
        if name not in actual.numbers or name not in expected.numbers:
            lines.append(f"{name}: {'new' if name in actual.numbers else 'gone'}")
            continue
        error = relative_error(actual.numbers[name], expected.numbers[name])
        if error > tolerance:
            lines.append(f"{name}: off by {error:.1e} of its largest entry")
    return lines
