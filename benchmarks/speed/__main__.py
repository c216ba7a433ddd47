"""Every library on the same nets: processor time in plain epochs, peak memory, growth."""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.libraries import MODULES
from benchmarks.libraries.case import Way, installed, ways
from benchmarks.libraries.ours import ALONG
from benchmarks.records import RESULTS, write
from benchmarks.speed.figure import draw
from benchmarks.speed.measure import apart, measured, training_step
from benchmarks.speed.page import KINDS, page
from benchmarks.speed.settings import GROWING, GROWTH, NETS, Setting
from benchmarks.timing import environment


def every(kind: str) -> dict[str, Way]:
    """All ways of a kind by title."""
    return {title: way for module in MODULES for title, way in ways(module, kind).items()}


def rows(
    setting: Setting, chosen: argparse.Namespace, kind: str, known: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    """A row a way that is not known yet, one after the other."""
    for title, way in every(kind).items():
        if not title.startswith(chosen.ways) or "epochs" in known.get(title, {}):
            continue
        most = math.inf if title.startswith("engram") else chosen.seconds
        given = replace(setting, recorded=title.endswith(ALONG))
        found = apart(measured, given, way, chosen.repeats, most)
        shown = found.get("epochs", found.get("failed"))
        print(f"  {kind.lower()}, {title}: {shown}", file=sys.stderr, flush=True)
        yield title, found


def growth(chosen: argparse.Namespace) -> dict[str, Any]:
    """Epochs of some ways at several sizes."""
    found: dict[str, Any] = {}
    all_ways = every("OWN")
    for what, settings in GROWTH.items():
        print(f"growth with {what}", file=sys.stderr, flush=True)
        found[what] = {
            title: {
                size: apart(measured, setting, all_ways[title], chosen.repeats, chosen.seconds)
                for size, setting in settings.items()
            }
            for title in GROWING
            if title in all_ways
        }
    return found


def main() -> None:
    """Measure net by net; the files are written after each row."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__)
    parser.add_argument("--nets", nargs="*", choices=list(NETS), default=list(NETS))
    parser.add_argument("--repeats", type=int, default=3, help="rounds; medians are reported")
    parser.add_argument("--seconds", type=float, default=3.0, help="about what one call may take")
    parser.add_argument("--share", type=float, default=1.0, help="of every net's examples")
    parser.add_argument("--no-growth", action="store_true")
    parser.add_argument("--ways", default="", help="how the titles of the ways begin")
    parser.add_argument("--keep", action="store_true", help="go on with the file")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the three files")
    chosen = parser.parse_args()
    torch.set_num_threads(1)  # nothing has to be left behind by the fork
    warnings.simplefilter("ignore")
    record: dict[str, Any] = {
        "environment": environment(0),
        "versions": installed(),
        "repeats": chosen.repeats,
        "seconds": chosen.seconds,
        "nets": {},
        "growth": {},
    }
    if chosen.keep:
        before = json.loads((chosen.output / "speed.json").read_text())
        record |= {what: before[what] for what in ("nets", "growth")}
    for name in chosen.nets:
        setting = NETS[name]
        setting = replace(setting, examples=int(setting.examples * chosen.share))
        print(f"{name}, {setting.examples} examples", file=sys.stderr, flush=True)
        found = record["nets"][name] = {
            "title": setting.title,
            "parameters": sum(p.numel() for p in setting.net().parameters()),
            "examples": setting.examples,
            "training_step": apart(training_step, setting),
        } | {kind: record["nets"].get(name, {}).get(kind, {}) for kind in KINDS}
        for kind in KINDS if setting.pairs else ("own",):
            for title, row in rows(setting, chosen, kind.upper(), found[kind]):
                found[kind][title] = row
                write(chosen.output, "speed", record, page(record))
        draw(record, chosen.output / "speed.png")
    if not chosen.no_growth:
        record["growth"] = growth(chosen)
    write(chosen.output, "speed", record, page(record))
    draw(record, chosen.output / "speed.png")


if __name__ == "__main__":
    main()
