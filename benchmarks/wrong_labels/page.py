"""The record of ``benchmarks.wrong_labels`` as a page."""

from __future__ import annotations

from typing import Any

from benchmarks.records import conditions, table

WAYS = {
    "label_issues": "`engram.label_issues`, along the record",
    "label_issues, end alone": "`engram.label_issues`, at the end alone",
    "loo_loss": "`result.loo_loss`, along the record",
    "loo_loss, end alone": "`result.loo_loss`, at the end alone",
    "visits": "prequential loss (`result.prequential`)",
    "epochs": "mean loss over epochs",
    "loss": "loss at the end",
    "cleanlab": "cleanlab, five-fold, self-confidence",
    "cleanlab, margin": "cleanlab, five-fold, normalised margin",
    "cleanlab with loo_probabilities": "cleanlab with `result.loo_probabilities`",
}


def page(record: dict[str, Any]) -> str:
    """Three tables over the settings; with several seeds the mean, lowest and highest."""
    rows = record["rows"]
    names = list(dict.fromkeys(row["setting"] for row in rows))
    seeds = {name: sum(row["setting"] == name for row in rows) for name in names}

    def cells(way: str, key: str, digits: int) -> list[str]:
        return [
            _spread([r["ways"][way][key] for r in rows if r["setting"] == name], digits)
            for name in names
        ]

    def tabled(key: str, digits: int) -> str:
        return table(
            ["", *names], [[words, *cells(way, key, digits)] for way, words in WAYS.items()]
        )

    filtered = [
        [
            kind,
            *(
                " / ".join(
                    _spread([r["flagged"][kind][part] for r in rows if r["setting"] == name], 2)
                    for part in ("precision", "recall")
                )
                for name in names
            ),
        ]
        for kind in ("cross-validated", "leave-one-out")
    ]
    losses = [
        _spread([r["training_loss"] for r in rows if r["setting"] == name], 2) for name in names
    ]
    return f"""# Wrong labels

A tenth of the labels of ordinary nets' training data made wrong, and who finds them: AUROC, and the
share of wrong ones among as many examples as there are wrong labels. *uniform*: any other class;
*classes*: the class that it is easily taken for. CNNs with BatchNorm, dropout and weight decay,
AdamW or SGD with momentum, 3,000 images, 10 or 12 epochs; *memorised* has no dropout and 40 epochs
on 2,000. On *usps-untuned* (another data set, net and optimizer) nothing was chosen.
Trainings: {", ".join(f"{name} {count}" for name, count in seeds.items())}; the mean and, in
brackets, the lowest and the highest.
{conditions(record["environment"])}
Written by `python -m benchmarks.wrong_labels` with ENGRAM_DATA naming the folder of the data.

AUROC:

{tabled("auroc", 3)}

Precision at the number of wrong labels:

{tabled("precision", 3)}

What it costs beside the training itself, in trainings (processor time; the mean loss over epochs
leaves its forward passes out):

{tabled("cost", 2)}

`cleanlab.filter.find_label_issues`, which says itself how many labels are wrong, with five-fold
probabilities and with `result.loo_probabilities`: precision / recall.

{table(["", *names], filtered)}

Mean training loss at the end: {", ".join(f"{n} {v}" for n, v in zip(names, losses, strict=True))}.
"""


def _spread(values: list[float], digits: int) -> str:
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} [{min(values):.{digits}f}, {max(values):.{digits}f}]"
