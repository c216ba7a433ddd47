"""Command line: ``python -m benchmarks.wrong_labels``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from cleanlab.filter import find_label_issues
from sklearn.metrics import roc_auc_score
from torch import Tensor

from benchmarks.records import RESULTS, write
from benchmarks.timing import environment
from benchmarks.wrong_labels.page import page
from benchmarks.wrong_labels.scores import FOLDER, kept, quality
from benchmarks.wrong_labels.settings import SETTINGS
from engram.sensitivity.label_issues import suspicion

SEEDS = 2


def ways(found: dict[str, Any]) -> dict[str, Tensor]:
    """Every way's score."""
    labels, folds = found["given"], found["folds"]
    return {
        "label_issues": suspicion(found["walk"], found["visits"]),
        "label_issues, end alone": suspicion(found["end"], found["visits"]),
        "loo_loss": found["walk"],
        "loo_loss, end alone": found["end"],
        "visits": found["visits"],
        "epochs": found["epochs"],
        "loss": found["loss"],
        "cleanlab": quality(labels, folds, "self_confidence"),
        "cleanlab, margin": quality(labels, folds, "normalized_margin"),
        "cleanlab with loo_probabilities": quality(
            labels, found["walk probabilities"], "self_confidence"
        ),
    }


def costs(seconds: dict[str, float]) -> dict[str, float]:
    """In trainings, beside the one that everybody has."""
    walk, end, folds = (seconds[part] / seconds["training"] for part in ("walk", "end", "folds"))
    free = dict.fromkeys(("visits", "epochs", "loss"), 0.0)
    dear = dict.fromkeys(("label_issues", "loo_loss", "cleanlab with loo_probabilities"), walk)
    cheap = dict.fromkeys(("label_issues, end alone", "loo_loss, end alone"), end)
    return free | dear | cheap | dict.fromkeys(("cleanlab", "cleanlab, margin"), folds)


def flagged(found: dict[str, Any], probabilities: str) -> dict[str, float]:
    """What ``cleanlab.filter.find_label_issues`` takes for wrong, without being told how many."""
    rows = found[probabilities].double()
    rows = rows / rows.sum(1, keepdim=True)
    chosen = torch.from_numpy(find_label_issues(found["given"].numpy(), rows.numpy()))
    right = float((chosen & found["wrong"]).sum())
    return {
        "precision": right / max(1.0, float(chosen.sum())),
        "recall": right / float(found["wrong"].sum()),
    }


def judged(found: dict[str, Any]) -> dict[str, Any]:
    """AUROC and precision at the number of wrong labels, of every way."""
    wrong, spent = found["wrong"], costs(found["seconds"])
    count = int(wrong.sum())
    rows = {}
    for way, score in ways(found).items():
        first = wrong[score.argsort(descending=True)[:count]].double().mean()
        area = float(roc_auc_score(wrong.numpy(), score.numpy()))
        rows[way] = {"auroc": area, "precision": float(first), "cost": spent[way]}
    return {
        "ways": rows,
        "training_loss": float(found["loss"].mean()),
        "wrong": count,
        "flagged": {
            "cross-validated": flagged(found, "folds"),
            "leave-one-out": flagged(found, "walk probabilities"),
        },
    }


def main() -> None:
    """Compute what is not there, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wrong_labels", description=__doc__)
    parser.add_argument("names", nargs="*", help="of settings; all of them where none is named")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the scores")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--page", action="store_true", help="from what is in the folder alone")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in chosen.names or list(SETTINGS):
        for seed in range(chosen.seeds):
            files = [chosen.folder / f"{name}-{seed}-{part}.pt" for part in ("scores", "folds")]
            if chosen.page and not all(file.is_file() for file in files):
                continue
            found = kept(name, SETTINGS[name], seed, chosen.folder)
            rows.append({"setting": name, "seed": seed} | judged(found))
            print(rows[-1], flush=True)
    record = {"environment": environment(seed=0), "rows": rows}
    write(chosen.output, "wrong-labels", record, page(record))


if __name__ == "__main__":
    main()
