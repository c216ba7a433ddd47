"""The page: a table for what is the same quantity, one for what is not, and growth."""

from __future__ import annotations

from typing import Any

from benchmarks.records import conditions, table, times

BAR = 5.0  # times the fastest peer with the same quantity
OURS = {"own": "engram, Kronecker", "pairs": "engram, Kronecker"}
QUANTITIES = {  # what a row of "own" and of "pairs" is
    "own": {
        "engram, Kronecker": "V e, leave-one-out losses, leverages, verdict",
        "engram, diagonal": "V e, leave-one-out losses, leverages, verdict",
        "engram, Kronecker, posterior at hand": "the same without the fit",
        "Jacobian, diagonal": "V e",
        "torch.func, diagonal": "V e",
        "kronfluence, EK-FAC": "e' V e: self-influence",
        "laplace-torch, K-FAC": "V, V e",
        "captum, TracInCP": "squared gradient norm, no preconditioner",
        "captum, TracInCPFast (last layer)": "the same of the last layer",
    },
    "pairs": {
        "engram, Kronecker": "g' S^-1 g",
        "engram, EK-FAC": "g' S^-1 g",
        "engram, Kronecker, along the record": "the same along the training, fit included",
        "kronfluence, EK-FAC": "g' S^-1 g",
        "dattri, EK-FAC (linear layers)": "g' S^-1 g of linear layers",
        "pyDVL, EK-FAC (linear layers)": "g' S^-1 g of linear layers",
        "dattri, TRAK": "512 random projections",
        "TRAK": "512 random projections",
        "dattri, TracIn at the end": "g' g",
        "captum, TracInCP": "g' g",
        "captum, TracInCPFast (last layer)": "g' g of the last layer",
    },
}
SAME = {
    "own": (
        "Jacobian, diagonal",
        "torch.func, diagonal",
        "kronfluence, EK-FAC",
        "laplace-torch, K-FAC",
    ),
    "pairs": (
        "kronfluence, EK-FAC",
        "dattri, EK-FAC (linear layers)",
        "pyDVL, EK-FAC (linear layers)",
    ),
}
KINDS = {
    "own": "Every training example left out, one by one",
    "pairs": "The influence of every training example on 32 others",
}


BY_HAND = "torch.func, diagonal"  # sixty lines of our own for the comparison


def fastest(rows: dict[str, Any], kind: str, by_hand: bool = True) -> str | None:
    """The peer that computes the same quantity soonest; what is written by hand too, or not."""
    ran = [t for t in SAME[kind] if "epochs" in rows.get(t, {}) and (by_hand or t != BY_HAND)]
    return min(ran, key=lambda title: rows[title]["epochs"]) if ran else None


def summary(record: dict[str, Any], kind: str) -> str:
    """Ours against the fastest peer, a row a net."""
    found = []
    for net, of_net in record["nets"].items():
        rows = of_net[kind]
        ours, peer = rows.get(OURS[kind], {}), fastest(rows, kind)
        if "epochs" not in ours or peer is None:
            continue
        library = fastest(rows, kind, by_hand=False)
        memory = rows[peer]["bytes"] / max(ours["bytes"], 1)
        found.append(
            [
                net,
                times(ours["epochs"]),
                *_times_slower(rows, peer, ours),
                *(_times_slower(rows, library, ours) if library else ("-", "-")),
                times(memory) if memory >= 1 else f"**{times(memory)}**",
            ]
        )
    header = ["net", "engram", "fastest peer", f"times slower (bar {BAR:g})"]
    header += ["fastest but for torch.func", "times slower", "memory, fastest peer / engram"]
    return table(header, found)


def _times_slower(rows: dict[str, Any], peer: str, ours: dict[str, Any]) -> tuple[str, str]:
    epochs = rows[peer]["epochs"]
    ratio = epochs / ours["epochs"]
    return f"{peer}: {times(epochs)}", times(ratio) if ratio >= BAR else f"**{times(ratio)}**"


def section(name: str, found: dict[str, Any], kind: str) -> str:
    """All rows of a net."""
    step, rows = found["training_step"], []
    for title, row in found[kind].items():
        what = QUANTITIES[kind].get(title, "")
        if "failed" in row:
            rows.append([title, what, "-", "-", "-", row["failed"].replace("|", "/")[:90]])
            continue
        memory = f"{row['bytes'] / 2**20:.0f} MiB ({row['bytes'] / step:.1f})"
        rows.append([title, what, times(row["epochs"]), f"{row['examples']:,}", memory, ""])
    header = ["way", "quantity", "epochs", "examples", "peak memory (of a training step)", "note"]
    return (
        f"### {name}: {found['title']}, {found['parameters']:,} parameters\n\n"
        f"{found['examples']:,} examples; a training step takes {step / 2**20:.0f} MiB.\n\n"
        + table(header, rows)
    )


def growth(record: dict[str, Any]) -> str:
    """A table a quantity that grows."""
    parts = []
    for what, found in record["growth"].items():
        sizes = list(next(iter(found.values())))
        rows = [
            [title, *(times(row[s]["epochs"]) if "epochs" in row[s] else "-" for s in sizes)]
            for title, row in found.items()
        ]
        parts.append(f"### {what}\n\n" + table(["way", *map(str, sizes)], rows))
    return "\n\n".join(parts)


def page(record: dict[str, Any]) -> str:
    """The Markdown page."""
    versions = ", ".join(f"{name} {found}" for name, found in record["versions"].items())
    parts = [
        f"""# Speed beside other libraries

Whole calls, from the trained net to the numbers, fit included: processor time of one thread as a
multiple of one plain training epoch (Adam, the same examples and batches of 64), the median of
{record["repeats"]} rounds in which call and epoch take turns. A way that would take more than about
{record["seconds"]:g} s, unless it is engram's, is timed on fewer examples (the column says on how
many) and on a quarter of them, and its cost on all is that of the line through both: what grows
faster is favoured. Peak memory is above what net and data take, in a process of its own; on fewer
examples it is a lower bound. Every way uses its library's defaults,
Fisher matrices with sampled labels where it has them. Inputs are random: what they show does not
change the cost.

{conditions(record["environment"])} {versions}.
Written by `make bench-speed`, which is `python -m benchmarks.speed`.
[What a pass and a fit cost](pass-cost.md) has engram alone, at full size.

![epochs by net and way](speed.png)"""
    ]
    parts += [record["note"]] if "note" in record else []
    for kind, title in KINDS.items():
        if not any(found[kind] for found in record["nets"].values()):
            continue
        parts += [f"## {title}", summary(record, kind)]
        parts += [section(n, f, kind) for n, f in record["nets"].items() if f[kind]]
    if record["growth"]:
        parts += [
            "## Growth",
            "Epochs for every example left out: flat where a way grows as training does.",
            growth(record),
        ]
    return "\n\n".join(parts)
