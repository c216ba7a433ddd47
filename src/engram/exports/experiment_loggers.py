"""For people who keep their runs in Weights & Biases or TensorBoard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engram.auditing.outcome import Audit
from engram.core.arguments import whole
from engram.core.optional import require
from engram.core.printable import printable
from engram.exports.fields import fields, plain
from engram.sensitivity.result import Result

if TYPE_CHECKING:
    import pandas as pd

TOP = 1000  # rows of a table: more make pages that are slow to open
SHOWN = 50  # rows of a text in TensorBoard, which is one page
SPECIAL = {ord(sign): f"&#{ord(sign)};" for sign in "&\\`*_{}[]<>()#+!|"}  # of Markdown and HTML


def to_wandb(found: Audit | Result, run: Any, name: str = "engram", top: int = TOP) -> None:
    """Log a table of the examples with the highest leave-one-out loss, and the summary's numbers.

    Args:
        found: an audit or a result.
        run: of ``wandb.init``.
        name: before the slash of everything that is logged.
        top: rows of the table.
    """
    wandb = require("wandb", "wandb")
    table = wandb.Table(dataframe=plain(_top(found, top)))
    scalars = {f"{name}/{key}": value for key, value in _numbers(found).items()}
    run.log({f"{name}/examples": table, **scalars})


def to_tensorboard(
    found: Audit | Result, writer: Any, step: int = 0, name: str = "engram", top: int = SHOWN
) -> None:
    """Write losses and metrics, a histogram, and a table of the highest leave-one-out losses.

    Args:
        found: an audit or a result.
        writer: a ``torch.utils.tensorboard.SummaryWriter``; it is neither flushed nor closed.
        step: of the training.
        name: before the slash of every tag.
        top: rows of the table.
    """
    for key, value in _numbers(found).items():
        writer.add_scalar(f"{name}/{key}", value, step)
    losses = _result(found).loo_loss
    writer.add_histogram(f"{name}/loo_losses", losses[losses.isfinite()], step)
    writer.add_text(f"{name}/examples", _markdown(_top(found, top)), step)


def _result(found: Audit | Result) -> Result:
    return found.result if isinstance(found, Audit) else found


def _numbers(found: Audit | Result) -> dict[str, float]:
    result = _result(found)
    metrics = result.metrics()["leave_one_out"].drop("loss")
    numbers = {"train_loss": result.train_nll, "loo_loss": result.loo_nll}
    return numbers | {f"loo_{key}": float(value) for key, value in metrics.items()}


def _top(found: Audit | Result, top: int) -> pd.DataFrame:
    frame = fields(found).sort_values("loo_loss", ascending=False, kind="stable")
    return frame.head(whole("top", top)).rename_axis("example").reset_index()


def _markdown(frame: pd.DataFrame) -> str:
    """A table in Markdown; what stands in its cells stays text."""
    rows = [list(frame.columns), ["---"] * len(frame.columns)]
    rows += [[_cell(value) for value in row] for row in frame.itertuples(index=False)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _cell(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else printable(value)
    return text.translate(SPECIAL)
