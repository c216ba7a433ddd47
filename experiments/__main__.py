"""``python -m experiments list | run NAME | run all | page``."""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import engram
from engram.errors import EngramError
from experiments.accuracies import judged
from experiments.cost import check_affordable
from experiments.figures import PANELS
from experiments.page import FOLDER, page
from experiments.panel import SCALES, Outcome, Panel
from experiments.workplace import Workplace, write

RUNS = Path("runs") / "experiments"


def run(panel: Panel, scale: str, place: Workplace, results: Path | None, force: bool) -> Outcome:
    """Run one panel, or go on with it; its numbers, arrays and picture are kept.

    Args:
        panel: which one.
        scale: how much of it.
        place: where it runs.
        results: folder for what the page shows; None leaves it out.
        force: run it though the machine seems too small.
    """
    if not force:
        check_affordable(panel, panel.scales[scale])
    settings = (panel.settings, panel.scales[scale])
    found = panel.run(*settings, place.at(panel.name, *settings))
    folder = place.folder / panel.name
    level, reason = panel.held(found)
    if scale != "smoke":
        level, reason = judged(panel.name, found.numbers, level, reason)
    numbers: dict[str, Any] = {
        "panel": panel.name,
        "scale": scale,
        "seed": place.seed,
        "versions": {"engram": engram.__version__, "torch": torch.__version__},
        "settings": {n: v for n, v in asdict(panel.scales[scale]).items() if v is not None},
        "threads": torch.get_num_threads(),
        "processor_seconds": round(sum(processor for processor, _ in place.seconds), 1),
        "wall_seconds": round(sum(clock for _, clock in place.seconds), 1),
        "verdict": level,
        "reason": reason,
        "results": dict(found.numbers),
    }
    outcome = Outcome(numbers, found.arrays)
    write(folder / "outcome", outcome)
    figure = panel.draw(panel.settings, found)
    for kind in ("png", "svg"):
        figure.savefig(folder / f"figure.{kind}", dpi=110)
    if results is not None:
        results.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "outcome.json", results / f"{panel.name}.json")
        shutil.copy(folder / "figure.png", results / f"{panel.name}.png")
    return outcome


def chosen_panels(names: list[str]) -> list[Panel]:
    """Those with these names; a SystemExit that shows the list where one is unknown."""
    if names == ["all"]:
        return list(PANELS.values())
    for name in names:
        if name not in PANELS:
            near = difflib.get_close_matches(name, PANELS, 3)
            meant = f"; did you mean {' or '.join(near)}?" if near else ""
            raise SystemExit(f"unknown panel {name!r}{meant}\n\n{listed()}")
    return [PANELS[name] for name in names]


def listed() -> str:
    """All panels, a line each."""
    width = max(map(len, PANELS))
    return "\n".join(f"{name:{width}}  {panel.title}" for name, panel in PANELS.items())


def run_all(given: argparse.Namespace) -> None:
    """The panels that were asked for, one after the other, a line each."""
    folder = given.folder / given.scale / f"seed-{given.seed}"
    for panel in chosen_panels(given.names):
        place = Workplace(
            folder, seed=given.seed, data_dir=given.data_dir, progress=not given.quiet
        )
        results = given.results if given.scale != "smoke" else None
        found = run(panel, given.scale, place, results, given.force).numbers
        words = f"{panel.name}  {found['verdict']}: {found['reason']}"
        seconds = f"{found['processor_seconds']} s of a processor"
        print(f"{words}  ({seconds}, {folder / panel.name})", flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the panels by name")
    running = commands.add_parser("run", help="run panels, or go on with them")
    running.add_argument("names", nargs="+", help="of panels, or all")
    running.add_argument("--scale", choices=SCALES, default="cpu")
    running.add_argument("--seed", type=int, default=0)
    running.add_argument("--folder", type=Path, default=RUNS, help="where runs are kept")
    running.add_argument("--data-dir", default=os.environ.get("ENGRAM_DATA"))
    running.add_argument("--results", type=Path, default=FOLDER, help="of the page's files")
    running.add_argument("--force", action="store_true", help="though memory seems too small")
    running.add_argument("--quiet", action="store_true")
    commands.add_parser("page", help="write docs/results/paper.md from what was run")
    given = parser.parse_args(arguments)
    if given.command == "list":
        print(listed())
    elif given.command == "page":
        print(page())
    else:
        try:
            run_all(given)
        except EngramError as error:
            raise SystemExit(str(error)) from error
        except KeyboardInterrupt:
            raise SystemExit("interrupted; the same command goes on from here") from None


if __name__ == "__main__":
    main()
