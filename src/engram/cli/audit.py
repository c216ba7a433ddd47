"""``engram audit DATA``: wrong labels, memorised and repeated examples, groups, and a page."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engram.cli.output import Json, Quiet, console, frame_table, print_json, say
from engram.cli.subjects import Seed, Weights

if TYPE_CHECKING:
    import pandas as pd

SHOWN = 10  # issues that are listed in the terminal; the page has them all


class Optimizer(str, Enum):
    """That the stock model is trained with."""

    adamw = "adamw"
    adam = "adam"
    sgd = "sgd"


class Task(str, Enum):
    """What is to be predicted, where the label column does not say."""

    auto = "auto"
    classes = "classes"
    regression = "regression"


Source = Annotated[
    Path,
    typer.Argument(
        metavar="DATA",
        help="CSV, TSV, Parquet, JSON lines, npz, a folder of images by class, or a Hugging Face "
        "dataset folder.",
    ),
]
Output = Annotated[
    Path | None, typer.Argument(metavar="[OUTPUT]", help="Folder of the run; run/NAME without.")
]
Label = Annotated[
    list[str] | None, typer.Option("--label", help="Label column; several times for multi-label.")
]
Text = Annotated[str | None, typer.Option("--text", help="Column with the text.")]
Image = Annotated[str | None, typer.Option("--image", help="Column with names of image files.")]
Group = Annotated[
    str | None, typer.Option("--group-by", help="Column (source, annotator, day) to leave out by.")
]
Id = Annotated[str | None, typer.Option("--id", help="Column that people know examples by.")]
Test = Annotated[Path | None, typer.Option("--test", help="Further data of the same form.")]
Sampled = Annotated[int | None, typer.Option("--sample", min=2, help="Most examples to read.")]
Epochs = Annotated[int | None, typer.Option(min=1, help="Of the training; else as many as needed.")]
With = Annotated[Optimizer, typer.Option("--optimizer", help="Of the stock model.")]
Kind = Annotated[Task, typer.Option("--task", help="Where the label column does not say.")]
Own = Annotated[
    str | None,
    typer.Option("--model", metavar="MODULE:FUNCTION", help="Your own model, in place of ours."),
]
Train = Annotated[
    str | None,
    typer.Option("--train", metavar="MODULE:FUNCTION", help="Your own training of it."),
]
Minimal = Annotated[bool, typer.Option("--minimal", help="Leave out what takes longest.")]


def command(
    data: Source,
    output: Output = None,
    label: Label = None,
    text: Text = None,
    image: Image = None,
    group_by: Group = None,
    id: Id = None,
    test: Test = None,
    task: Kind = Task.auto,
    sample: Sampled = None,
    model: Own = None,
    weights: Weights = None,
    train: Train = None,
    epochs: Epochs = None,
    optimizer: With = Optimizer.adamw,
    seed: Seed = 0,
    minimal: Minimal = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Which labels look wrong, what a model leans on, and how well it will do on unseen data.

    Example: engram audit reviews.csv run/reviews --label stars --text review --group-by source
    """
    run_audit(
        {
            "data": str(data),
            "label": label[0] if label and len(label) == 1 else label,
            "text": text,
            "image": image,
            "group_by": group_by,
            "id": id,
            "test": None if test is None else str(test),
            "task": task.value,
            "sample": sample,
            "model": model,
            "weights": None if weights is None else str(weights),
            "train": train,
            "epochs": epochs,
            "optimizer": optimizer.value,
            "seed": seed,
            "minimal": minimal,
        },
        output or Path("run") / data.resolve().stem,
        as_json,
        quiet,
    )


def run_audit(settings: dict[str, object], output: Path, as_json: bool, quiet: bool) -> None:
    """Audit with these settings, and say what was found."""
    from engram.auditing.audit import audit

    found = audit(**settings, output=output, progress=not quiet)  # type: ignore[arg-type]
    page = output / "report.html"
    if as_json:
        issues = found.issues[found.issues["is_label_issue"]]
        print_json(
            {
                "folder": str(output),
                "page": str(page),
                "verdict": found.verdict.level,
                "loo_loss": found.result.loo_nll,
                "test": found.test,
                "findings": vars(found.findings),
                "label_issues": issues,
                "notes": found.notes,
            }
        )
        return
    out = console()
    if not quiet:
        say(found, out)
        issues = found.issues[found.issues["is_label_issue"]].sort_values("label_score")
        columns = ["given_label", "predicted_label", "label_score", "loo_loss", "memorised"]
        if len(issues):
            title = f"The {min(SHOWN, len(issues))} labels of {len(issues):,} that look most wrong"
            first = issues[columns].head(SHOWN)
            out.print(frame_table(_by_id(first, issues["id"]), title))
    out.print(f"Page     {page}", markup=False, soft_wrap=True)
    if not quiet:
        out.print(f"Again    engram {output / 'run.json'}", markup=False, soft_wrap=True)


def _by_id(shown: pd.DataFrame, ids: pd.Series[str]) -> pd.DataFrame:
    """The rows by the ids that people know them by, where these are not just positions."""
    named = ids.loc[shown.index]
    if (named == named.index.astype(str)).all():
        return shown
    return shown.set_index(named)
