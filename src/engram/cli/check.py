"""``engram check RUN``: limits that a run must keep, with exit codes for continuous integration."""

from __future__ import annotations

from typing import Annotated

import typer

from engram.auditing.outcome import Audit
from engram.cli.commands import tell
from engram.cli.output import Json, Quiet, console, print_json, say
from engram.cli.runs import Run, saved_in
from engram.errors import EngramError
from engram.sensitivity.limits import limits
from engram.sensitivity.result import Result

PASSED, WRONG = 1, 2  # exit codes: a limit is passed; the arguments or the run are no good
Verdict = Annotated[
    str | None,
    typer.Option("--min-verdict", help="good, caution or unreliable: the worst allowed."),
]


def share(text: str) -> float:
    """A share, or a whole number: ``1%``, ``0.01`` or ``12``.

    Example:
        >>> share("1%"), share("0.02"), share("12")
        (0.01, 0.02, 12)
    """
    number = text.strip()
    try:
        if number.isdecimal():
            return int(number)
        value = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no number and no percentage") from None
    if not 0 <= value <= 1:
        raise typer.BadParameter(f"{text!r} is no share from 0 to 1 and no whole number")
    return value


Issues = Annotated[
    float | None,
    typer.Option(
        "--max-label-issues", parser=share, metavar="SHARE", help="Wrong labels: 1%, 0.01 or 12."
    ),
]
Loss = Annotated[float | None, typer.Option("--max-loo-loss", help="Mean leave-one-out loss.")]


def command(
    run: Run,
    max_label_issues: Issues = None,
    max_loo_loss: Loss = None,
    min_verdict: Verdict = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Hold a run against limits. Exit code 0: all are kept; 1: one is passed; 2: wrong arguments.

    Example: engram check run --max-label-issues 1% --max-loo-loss 0.4 --min-verdict caution
    """
    if max_label_issues is None and max_loo_loss is None and min_verdict is None:
        raise typer.BadParameter("give one limit or more", param_hint="--max-loo-loss")
    try:
        saved = saved_in(run)
        found = limits(
            saved.result if isinstance(saved, Audit) else saved,
            max_label_issues=max_label_issues,
            max_loo_loss=max_loo_loss,
            min_verdict=min_verdict,
            label_issue_count=_counted(saved),
        )
    except EngramError as error:
        tell(error)
        raise typer.Exit(WRONG) from None
    passed = [limit for limit in found if not limit.kept]
    if as_json:
        print_json({"kept": not passed, "limits": [vars(limit) for limit in found]})
    else:
        for limit in passed if quiet else found:
            say(limit, console())
    if passed:
        raise typer.Exit(PASSED)


def _counted(saved: Audit | Result) -> int | None:
    """The labels that an audit calls wrong; a result alone has not counted them."""
    return saved.findings.num_label_issues if isinstance(saved, Audit) else None
