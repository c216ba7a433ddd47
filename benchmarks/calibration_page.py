"""The page of the calibration benchmark."""

from __future__ import annotations

from typing import Any

from benchmarks.records import conditions, table, times

HEADER = ("structure", "way", "score", "increase", "mean over true")
CLOSE = 0.15


def _close(found: dict[str, float]) -> bool:
    return abs(found["increase_ratio"] - 1) <= CLOSE


def _row(structure: str, way: str, found: dict[str, float]) -> list[str]:
    ratio = times(found["increase_ratio"])
    return [
        structure,
        way,
        f"{found['score_spearman']:.3f} / {found['score_pearson']:.3f}",
        f"{found['increase_pearson']:.3f}",
        f"**{ratio}**" if _close(found) else ratio,
    ]


def _problem(name: str, found: dict[str, Any]) -> str:
    rows = [
        _row(structure, way, numbers)
        for structure, parts in found["structures"].items()
        for way, numbers in parts["ways"].items()
    ]
    return f"""## {name}

{found["num_data"]:,} examples, {found["num_params"]:,} parameters; the smallest
eigenvalue of the Hessian is {found["smallest_eigenvalue"]:.2g}, the largest gradient norm of a
refit {found["gradient_norm"]:.0e}.

{table(HEADER, rows)}"""


def _cost(record: dict[str, Any]) -> str:
    header = ("problem", "structure", "scale", "products", "seconds", "gradients over the data")
    rows = []
    for name, found in record["problems"].items():
        for structure, parts in found["structures"].items():
            if "calibration" not in parts:
                continue
            made = parts["calibration"]
            rows.append(
                [
                    name,
                    structure,
                    f"{made['scale']:.2f} ± {made['scale_error']:.2f}",
                    str(made["products"]),
                    f"{made['seconds']:.2f}",
                    f"{made['epochs']:.0f}",
                ]
            )
    return table(header, rows)


def _summary(record: dict[str, Any]) -> str:
    """How many problems each way gets within 15 %, by structure."""
    counts: dict[tuple[str, str], list[dict[str, float]]] = {}
    for found in record["problems"].values():
        for structure, parts in found["structures"].items():
            for way, numbers in parts["ways"].items():
                counts.setdefault((structure, way), []).append(numbers)
    rows = []
    for (structure, way), found_all in sorted(counts.items(), key=lambda item: item[0][0]):
        ratios = [numbers["increase_ratio"] for numbers in found_all]
        rows.append(
            [
                structure,
                way,
                f"{sum(map(_close, found_all))} of {len(found_all)}",
                f"{times(min(ratios))} to {times(max(ratios))}",
                f"{min(numbers['score_spearman'] for numbers in found_all):.3f}",
                f"{min(numbers['score_pearson'] for numbers in found_all):.3f}",
            ]
        )
    header = ("structure", "way", "mean within 15 %", "mean over true")
    return table((*header, "lowest Spearman", "lowest Pearson"), rows)


def page(record: dict[str, Any]) -> str:
    """The Markdown page."""
    problems = "\n\n".join(_problem(name, found) for name, found in record["problems"].items())
    return f"""# Calibration and refining against true refits

Converged nets in float64, {record["refits"]} random examples of each left out and the net trained
again until its gradient vanishes. Score: Spearman / Pearson with the true score. Increase: Pearson
over examples of leave-one-out loss minus loss. Mean over true: the mean increase over the true
mean; bold within 15 %. The mean hangs on few examples where nearly all losses are small (USPS,
breast cancer).
{conditions(record["environment"])}
Written by `python -m benchmarks.calibration`.

"Errors matched" is `engram.calibrate`; "leverages matched" is the same with `match="leverages"`;
both against the exact Hessian. The refined rows start from the calibrated Kronecker posterior.

## Summary

{_summary(record)}

## What calibration costs

Products with the exact Hessian (10 probes, relative residual 0.05), and the processor time of
`calibrate` in units of one gradient over all data.

{_cost(record)}

{problems}
"""
