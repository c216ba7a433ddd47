"""``engram show RUN``: a saved result as a table in the terminal."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from engram.auditing.outcome import Audit
from engram.cli.output import Json, Quiet, console, frame_table, print_json, say
from engram.cli.runs import Run, saved_in


class Ranking(str, Enum):
    """Columns that examples can be ranked by, highest first."""

    score = "score"
    loo_loss = "loo_loss"
    increase = "increase"
    loss = "loss"
    leverage = "leverage"


def command(
    run: Run,
    top: Annotated[int, typer.Option(min=1, help="How many examples to list.")] = 20,
    by: Annotated[Ranking, typer.Option(help="What to rank them by.")] = Ranking.score,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Print a saved result: its summary and its most sensitive examples.

    Example: engram show run/demo --top 5 --by loo_loss
    """
    show(run, top, by, as_json, quiet)


def show(run: Path, top: int, by: Ranking, as_json: bool, quiet: bool) -> None:
    """The same as a function."""
    saved = saved_in(run)
    result = saved.result if isinstance(saved, Audit) else saved
    frame = result.top(top, by.value)
    if as_json:
        found = saved.verdict
        aspects = {
            aspect.name: {"level": aspect.level, "expected": aspect.value}
            for aspect in (found.ranking, found.size, found.mean)
        }
        words = {"level": found.level, "line": found.line, "reasons": list(map(str, found.reasons))}
        verdict = {**words, **aspects}
        losses = {"examples": result.num_data, "loss": result.train_nll, "loo_loss": result.loo_nll}
        print_json({**losses, "verdict": verdict, "metrics": result.metrics(), "top": frame})
        return
    out = console()
    if not quiet:
        say(saved, out)
        out.print()
    out.print(frame_table(frame, f"{len(frame)} examples with the highest {by.value}"))
