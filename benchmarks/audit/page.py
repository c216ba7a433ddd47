"""The page of the benchmark: rankings, times and cut-offs beside cleanlab's."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from benchmarks.audit.runs import arrays_of
from benchmarks.records import conditions, table, write
from benchmarks.timing import environment
from engram.auditing.called import Called
from engram.auditing.label_noise import LabelNoise, blended
from engram.auditing.second_training import SecondOpinion, carried_over
from engram.sensitivity.label_issues import suspicion

NEAR = 0.1  # between stated and true share, which is asked for
FIFTH = 0.2  # of the time of the folds, which is asked for
TEXT = """# Audits beside five-fold cleanlab

Data with a tenth of its labels made wrong: `symmetric`, any other class; `dependent`, the next
class (of two classes, only labels of the second). The stock model of `engram.audit` is trained once
and recorded; cleanlab is given the probabilities of five folds of the same model, trained for as
many epochs. {conditions}
Run by `python -m benchmarks.audit`, written by `python -m benchmarks.audit --page`; seconds are of
the process.

AUROC of the wrong labels: by `label_score`; by cleanlab with five folds; by cleanlab with our
`loo_probabilities`; by the leave-one-out loss, the mean loss at the visits, and the training loss
alone. Means over seeds where there are several.

{ranking}

At least as good as five folds in {ahead}; the largest distance behind is {behind}.

Time over that of the five folds: of the estimate, of the second training that the cut-off takes,
and of both with the first training, which the user does anyway.

{times}

The estimate takes at most a fifth of the folds' time in {cheap}. Where it takes more, it goes along
the record of a training of some tenths of a second, and half of it is products of gradients of a
fixed number of examples.

The cut-off ([on more data](audit-cut-off.md)): how many labels are called wrong, what share of them
is stated to be and is, and what share of the wrong labels is found; beside it cleanlab's own
choice, with five folds and with our probabilities. What is stated counts for no more than
fourteen looks at a label ([why](audit-sureness.md)).

{cut_offs}

The stated share is within ten points of the true one in {near} runs; {within} have the true number
where it was stated to be with a chance of 90 %.

Data as it is (`none`), where nobody knows the truth.

{calibration}

{looked_at}
"""


def summary(path: Path, with_folds: bool = True) -> dict[str, Any]:
    """The numbers of one run; those of its folds where they are asked for and were trained."""
    from sklearn.metrics import roc_auc_score

    arrays = arrays_of(path)
    name, kind, seed = path.stem.rsplit("-", 2)
    wrong, given = arrays["wrong"], arrays["given"]
    both = (torch.from_numpy(arrays[name]) for name in ("loo_loss", "heard"))
    arrays["label_loss"] = suspicion(*both).double().numpy()
    found: dict[str, Any] = {
        "data": name,
        "noise": kind,
        "seed": int(seed),
        "examples": len(wrong),
        "wrong": int(wrong.sum()),
        "train_seconds": float(arrays["train_seconds"]),
        "estimate_seconds": float(arrays["estimate_seconds"]),
        "second_seconds": float(arrays["second_seconds"]),
    }
    noise = _noise(arrays)
    found |= {"cut_off": _cut_off(noise.chance.numpy(), wrong), "rate": noise.rate}
    if with_folds and "folds" in arrays:
        rows = np.arange(len(given))
        own = arrays["loo_probabilities"][rows, given]
        found |= {
            "fold_seconds": float(arrays["fold_seconds"]),
            "auroc": float(roc_auc_score(wrong, arrays["label_loss"])),
            "auroc_loo_loss": float(roc_auc_score(wrong, arrays["loo_loss"])),
            "auroc_heard": float(roc_auc_score(wrong, arrays["heard"])),
            "auroc_loss": float(roc_auc_score(wrong, arrays["loss"])),
            "auroc_folds": float(roc_auc_score(wrong, -_quality(given, arrays["folds"]))),
            "auroc_ours_in_cleanlab": float(
                roc_auc_score(wrong, -_quality(given, arrays["loo_probabilities"]))
            ),
            "auroc_self_confidence": float(roc_auc_score(wrong, -own)),
            "cleanlab_folds": _issues(given, arrays["folds"], wrong),
            "cleanlab_ours": _issues(given, arrays["loo_probabilities"], wrong),
        }
    return found


def _noise(arrays: dict[str, np.ndarray]) -> LabelNoise:
    """Chances by what the second training has said."""
    said = (arrays["second_positions"], arrays["second_probabilities"])
    opinion = SecondOpinion(*map(torch.from_numpy, said), float(arrays["second_loss"]))
    labels = torch.from_numpy(arrays["given"])
    both = (torch.from_numpy(arrays[name]) for name in ("loo_probabilities", "visits"))
    losses = torch.from_numpy(arrays["label_loss"])
    return carried_over(opinion, losses, blended(*both), labels)


def _cut_off(chance: np.ndarray, wrong: np.ndarray) -> dict[str, float]:
    chosen = chance > 0.5
    some = bool(chosen.any())
    called = Called.by(torch.from_numpy(chance[chosen]))
    return {
        "count": called.count,
        "chance": float(chance[chosen].mean()) if some else float("nan"),
        "stated": called.share,
        "low": called.low,
        "high": called.high,
        "true": float(wrong[chosen].mean()) if some else float("nan"),
        "recall": float(wrong[chosen].sum() / max(1, wrong.sum())),
    }


def _quality(given: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """cleanlab's own scores, high for good labels."""
    from cleanlab.rank import get_label_quality_scores

    return np.asarray(get_label_quality_scores(given, _rows(probabilities)))


def _issues(given: np.ndarray, probabilities: np.ndarray, wrong: np.ndarray) -> dict[str, float]:
    """cleanlab's own choice of wrong labels."""
    from cleanlab.filter import find_label_issues

    chosen = np.asarray(find_label_issues(given, _rows(probabilities), n_jobs=1))
    true = float(wrong[chosen].mean()) if chosen.any() else float("nan")
    return {
        "count": int(chosen.sum()),
        "true": true,
        "recall": float(wrong[chosen].sum() / max(1, wrong.sum())),
    }


def _rows(probabilities: np.ndarray) -> np.ndarray:
    found = np.clip(probabilities.astype(np.float64), 1e-9, 1)
    return found / found.sum(1, keepdims=True)


def write_results(runs: Path, folder: Path, looked_at: str) -> None:
    """Write audit.json and audit.md from what the runs have kept."""
    found = [summary(path) for path in sorted(runs.glob("*.npz"))]
    with_folds = [row for row in found if "auroc_folds" in row]
    cases = _averaged(with_folds)
    ahead = sum(case["auroc"] >= case["auroc_folds"] for case in cases)
    worst = min(case["auroc"] - case["auroc_folds"] for case in cases)
    cheap = sum(case["estimate_seconds"] <= FIFTH * case["fold_seconds"] for case in cases)
    setting = environment(0)
    record = {"environment": setting, "runs": found, "cases": cases, "ahead": ahead, "worst": worst}
    text = TEXT.format(
        conditions=conditions(setting),
        ranking=_ranking(cases),
        ahead=f"{ahead} of {len(cases)}",
        behind=f"{max(0.0, -worst):.4f}",
        times=_times(cases),
        cheap=f"{cheap} of {len(cases)}",
        cut_offs=_cut_offs(with_folds),
        near=f"{sum(map(_is_near, with_folds))} of {len(with_folds)}",
        within=sum(map(_is_within, with_folds)),
        calibration=_calibration([row for row in found if "auroc_folds" not in row]),
        looked_at=looked_at,
    )
    write(folder, "audit", record, text)


def _averaged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over seeds."""
    keys = sorted({(row["data"], row["noise"]) for row in rows})
    found = []
    for data, noise in keys:
        own = [row for row in rows if (row["data"], row["noise"]) == (data, noise)]
        numbers = {k: mean(r[k] for r in own) for k, v in own[0].items() if isinstance(v, float)}
        about = {"data": data, "noise": noise, "seeds": len(own), "examples": own[0]["examples"]}
        found.append(about | numbers)
    return found


def _ranking(cases: list[dict[str, Any]]) -> str:
    names = ("auroc", "auroc_folds", "auroc_ours_in_cleanlab", "auroc_loo_loss", "auroc_heard")
    header = ["", "audit", "five folds", "ours in cleanlab", "loo loss", "visits", "training loss"]
    rows = [
        [
            f"{_case(case)} ({case['examples']:,})",
            *(f"{case[name]:.4f}" for name in (*names, "auroc_loss")),
        ]
        for case in cases
    ]
    return table(header, rows)


def _times(cases: list[dict[str, Any]]) -> str:
    rows = []
    for case in cases:
        folds = case["fold_seconds"]
        parts = (case["estimate_seconds"], case["second_seconds"], case["train_seconds"])
        shares = [parts[0] / folds, parts[1] / folds, sum(parts) / folds]
        rows.append([_case(case), *(f"{share:.2f}" for share in shares), f"{folds:.1f} s"])
    return table(["", "estimate", "second training", "all three", "five folds"], rows)


def _case(row: dict[str, Any]) -> str:
    return f"{row['data']}, {row['noise']}"


def _cut_offs(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        own, folds, ours = row["cut_off"], row["cleanlab_folds"], row["cleanlab_ours"]
        lines.append(
            [
                f"{_case(row)}, seed {row['seed']}",
                *_numbers(own),
                f"{folds['count']} / {folds['true']:.2f}",
                f"{ours['count']} / {ours['true']:.2f}",
            ]
        )
    header = [
        "",
        "called wrong",
        "of them wrong",
        "stated",
        "true",
        "found",
        "cleanlab: called / true",
    ]
    return table([*header, "with ours: called / true"], lines)


def _calibration(rows: list[dict[str, Any]]) -> str:
    lines = [[_case(row), *_numbers(row["cut_off"])[:3]] for row in rows]
    return table(["", "called wrong", "of them wrong", "stated"], lines)


def _is_near(row: dict[str, Any]) -> bool:
    """Whether the stated share is within ten points of the true one."""
    return bool(abs(row["cut_off"]["stated"] - row["cut_off"]["true"]) <= NEAR)


def _is_within(row: dict[str, Any]) -> bool:
    """Whether the true number is where it was stated to be."""
    cut = row["cut_off"]
    return bool(cut["low"] <= round(cut["true"] * cut["count"]) <= cut["high"])


def _numbers(cut: dict[str, float]) -> list[str]:
    shares = [f"{cut[name]:.2f}" for name in ("stated", "true", "recall")]
    return [f"{cut['count']:,.0f}", f"{cut['low']:,} to {cut['high']:,}", *shares]
