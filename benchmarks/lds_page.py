"""The page and the figure of the linear datamodeling scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.records import conditions, table


def page(record: dict[str, Any]) -> str:
    """The Markdown page."""
    versions = ", ".join(f"{name} {found}" for name, found in record["versions"].items())
    parts = [
        f"""# Linear datamodeling scores

The way the field compares influences: a net is trained on many random halves of its training data;
for every test example the influences on it, added up over the half, are compared by
Spearman's correlation over the halves with the loss that it has there; the score is the mean over
the test examples. A training of each half has first weights and an order of its own, so that no
influence, however right, reaches 1. Behind +- is the standard error from drawing halves anew; it is
the same halves for all methods, so that differences are surer than that. The column of trainings
averages the influences of several trainings with all data before they are added up.

Every method gets the trained net as it is; engram also the record of the training, and from it its
prior. Where a library asks for a damping, it is 1 / N. Library defaults otherwise.
{conditions(record["environment"])}
{versions}. Written by `python -m benchmarks.lds`.

![scores](lds.png)"""
    ]
    for found in record["settings"].values():
        rows = [
            [
                title,
                "-" if "failed" in row else f"{row['lds']:.3f} +- {row['error']:.3f}",
                "-" if "failed" in row else f"{row['together']:.3f}",
                f"{row['seconds']:.1f}",
                row.get("failed", "").replace("|", "/")[:120],
            ]
            for title, row in found["methods"].items()
        ]
        parts.append(
            f"## {found['title']}\n\n"
            f"{found['num_train']:,} training and {found['num_test']:,} test examples, "
            f"{found['parameters']:,} parameters; {found['halves']} halves.\n\n"
            + table(
                ["method", "score", f"{found['seeds']} trainings", "seconds of processor", "note"],
                rows,
            )
            + (f"\n\n{found['note']}" if "note" in found else "")
        )
    return "\n\n".join(parts)


def draw(record: dict[str, Any], path: Path) -> None:
    """A row of bars a setting."""
    settings = record["settings"]
    figure = Figure(figsize=(9, 0.5 + 3.2 * len(settings)), layout="constrained")
    panels = figure.subplots(len(settings), 1, squeeze=False, sharex=True)[:, 0]
    for axes, found in zip(panels, settings.values(), strict=True):
        rows = {t: r for t, r in found["methods"].items() if "failed" not in r}
        titles = sorted(rows, key=lambda title: rows[title]["lds"])
        colours = ["C0" if title.startswith("engram") else "0.6" for title in titles]
        values, errors = ([rows[t][k] for t in titles] for k in ("lds", "error"))
        axes.barh(titles, values, xerr=errors, color=colours)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_title(found["title"], fontsize=10)
    panels[-1].set_xlabel("linear datamodeling score")
    figure.savefig(path, dpi=120)
