"""The truth about each training of the study, kept in a folder: it does not depend on estimates."""

from __future__ import annotations

import sys
from pathlib import Path

import engram
from benchmarks.trust.practical.settings import SETTINGS
from benchmarks.trust.truths import CACHE

FOLDER = CACHE / "practical"
KEEP = 0.85  # share of the examples that each training sees


def truth(name: str, folder: Path = FOLDER) -> engram.SubsetTruth:
    """Trainings on random subsets, each with another seed; read where they are there."""
    kept = folder / name
    if (kept / "subset_truth.json").is_file():
        found: engram.SubsetTruth = engram.load(kept)
        return found
    setting = SETTINGS[name]
    split = setting.split()
    found = engram.retrain(
        setting.net,
        split.data,
        train=setting.fit,
        subsets=setting.subsets,
        keep=KEEP,
        evaluate_on=(split.test_inputs, split.test_given),
        progress=False,
    )
    found.save(kept)
    print(f"  {name}: {float(found.seconds.mean()):.2f} s each", file=sys.stderr, flush=True)
    return found
