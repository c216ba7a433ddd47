"""The record of ``benchmarks.during_training`` as a page and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from scipy.stats import spearmanr

from benchmarks.records import conditions, table

PATIENCE = 5  # updates without a lower estimate after which a tracker says stop, by default


def kinds(run: dict[str, Any]) -> list[str]:
    """The posteriors of a run."""
    return [key.removeprefix("estimate ") for key in run["rows"][0] if key.startswith("estimate ")]


def known(run: dict[str, Any], kind: str) -> list[dict[str, float]]:
    """The rows that have this estimate, after the first epoch."""
    return [row for row in run["rows"][1:] if f"estimate {kind}" in row]


def judged(run: dict[str, Any], kind: str) -> dict[str, float]:
    """How close the estimate is to the test loss after the first epoch, and where it is lowest."""
    rows = known(run, kind)
    estimate, test = [r[f"estimate {kind}"] for r in rows], [r["test"] for r in rows]
    lowest = min(range(len(rows)), key=lambda i: estimate[i])
    return {
        "gap": sum(abs(e / t - 1) for e, t in zip(estimate, test, strict=True)) / len(rows),
        "training gap": sum(abs(r["train"] / r["test"] - 1) for r in rows) / len(rows),
        "signed": sum(e / t - 1 for e, t in zip(estimate, test, strict=True)) / len(rows),
        "rank": float(spearmanr(estimate, test).statistic),
        "best": float(rows[lowest]["epoch"]),
        "cost": test[lowest] / min(row["test"] for row in run["rows"][1:]) - 1,
    }


def stopped(run: dict[str, Any], kind: str) -> float:
    """Test loss at the best update so far when a tracker says stop, over the lowest; less one."""
    rows = known(run, kind)
    best = 0
    for number, row in enumerate(rows):
        if row[f"estimate {kind}"] < rows[best][f"estimate {kind}"]:
            best = number
        if number - best >= PATIENCE:
            break
    return rows[best]["test"] / min(row["test"] for row in run["rows"][1:]) - 1


def page(record: dict[str, Any]) -> str:
    """The Markdown page."""
    rows = []
    for name, run in record["runs"].items():
        for kind in kinds(run):
            found, cost = judged(run, kind), run.get("cost", {}).get(kind)
            last = known(run, kind)[-1]
            rows.append(
                [
                    name,
                    kind,
                    str(run["settings"]["epochs"]),
                    f"{last['train']:.3f}",
                    f"{last['test']:.3f}",
                    f"{last[f'estimate {kind}']:.3f}",
                    f"{100 * last['accuracy']:.1f} %",
                    f"{100 * found['gap']:.1f} %",
                    f"{100 * found['signed']:+.1f} %",
                    f"{100 * found['training gap']:.1f} %",
                    f"{found['rank']:.2f}",
                    f"{found['best']:.0f}",
                    f"{100 * found['cost']:.1f} %",
                    f"{100 * stopped(run, kind):.1f} %",
                    "-" if cost is None else f"{cost:.1f}",
                ]
            )
    header = ["run", "posterior", "epochs", "training loss", "test loss", "estimate", "accuracy"]
    header += [
        "mean gap",
        "signed",
        "gap of the training loss",
        "rank correlation",
        "best epoch",
        "cost of stopping there",
        "cost of stopping by patience",
        "update, epochs",
    ]
    first = next(iter(record["runs"].values()))
    return f"""# The test loss, estimated while training

Losses in nats, at the last epoch. *Mean gap* is the mean over the evaluated epochs after the first
(every second or fourth) of |estimate / test loss - 1|, *signed* the same without the bars; *cost of
stopping there* is the test loss where the estimate is lowest over the lowest test loss, less one;
*by patience* the same where the estimate was lowest when a tracker first said stop, after five
updates without a lower one.
The estimate sees the training data alone. The *gap of the training loss* is what one would get by
taking that for the test loss.

The CNNs are ordinary ones (`benchmarks/during_training_nets.py`): BatchNorm, dropout but for those
that overfit, 2,000 or 3,000 images, a tenth of the labels wrong in training and test data alike.
Their estimates are a tracker's defaults: `recorded` has the training time so far in the precision,
S + N / C with Kronecker factors; with `1,000 examples` an update looks at so many; `along the
checkpoints` walks through those so far (`estimator="trajectory"`), at fewer updates. *Update,
epochs* is what one update costs, in epochs of the training.
For the others *posterior* `optimizer` is the state as it stands, `per example` the
same with squares scaled to single examples, and `followed` a twin of the training that leaves a
twentieth of the data out, but at least 1,000 examples (`Tracker(..., held_out=...)`). The IVON runs
are short and hardly overfit: on MNIST the training loss is the closer of the two, on Fashion-MNIST
the estimate.
Settings (rates, prior precision, batch size) are in the JSON file and follow the paper, with fewer
epochs.
{conditions(first["environment"])}
Written by `python -m benchmarks.during_training` with ENGRAM_DATA naming the folder of the data.

{table(header, rows)}

![The estimate and the test loss by epoch](during_training.png)
"""


def picture(record: dict[str, Any], path: Path) -> None:
    """One panel a run: test loss, training loss and the estimates."""
    runs = record["runs"]
    columns = min(3, len(runs))
    lines = -(-len(runs) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.1 * lines), layout="constrained")
    for number, (name, run) in enumerate(runs.items()):
        axes = figure.add_subplot(lines, columns, number + 1)
        epochs = [row["epoch"] for row in run["rows"]]
        axes.plot(epochs, [row["test"] for row in run["rows"]], color="#8a8f98", lw=3, label="test")
        axes.plot(
            epochs, [row["train"] for row in run["rows"]], ":", color="#8a8f98", label="train"
        )
        for kind, colour in zip(kinds(run), ("#1b1b1b", "#c8553d", "#2f6f8f"), strict=False):
            rows = [run["rows"][0], *known(run, kind)]
            values = [row[f"estimate {kind}"] for row in rows]
            axes.plot(
                [row["epoch"] for row in rows],
                values,
                "-o",
                ms=3,
                color=colour,
                label=f"estimate, {kind}",
            )
        highest = max(row["test"] for row in run["rows"])
        axes.set(title=name, xlabel="epoch", ylabel="nats per example", ylim=(0, 2.5 * highest))
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=110)
