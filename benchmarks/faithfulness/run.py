"""Every method on one problem."""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.faithfulness import ours
from benchmarks.faithfulness.estimates import measure, methods_of
from benchmarks.faithfulness.limits import RETRAINING_SECONDS, SECONDS
from benchmarks.faithfulness.peers import PEERS
from benchmarks.faithfulness.settings import SETTINGS
from benchmarks.faithfulness.truths import Problem, problem
from engram.core.data.batches import Batches
from engram.posteriors.laplace import default_structure


def run(name: str, regime: str, seed: int, cache: Path) -> dict[str, Any]:
    """One problem in one process with one thread; a missing file is told, not raised."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    began = time.perf_counter()
    try:
        given = problem(SETTINGS[name], regime, seed, cache)
    except SystemExit as missing:
        return {"setting": name, "regime": regime, "error": str(missing)}
    described = describe(name, given) | {"truth_seconds": time.perf_counter() - began}
    methods = {
        title: measure(method, given, RETRAINING_SECONDS if title == ours.REFINED else SECONDS)
        for title, method in ours.METHODS.items()
    }
    peers: dict[str, Any] = {}
    for module, package in PEERS.items():
        peers |= peer_rows(given, module, package)
    return described | {"methods": methods, "peers": peers}


def peer_rows(given: Problem, module: str, package: str) -> dict[str, Any]:
    """The rows of one library, or what an earlier run with the same version has left."""
    version, found = methods_of(f"benchmarks.faithfulness.peers.{module}", package)
    kept = given.folder / f"{module}-{version}.json"
    if kept.is_file():
        rows: dict[str, Any] = json.loads(kept.read_text())
        return rows
    rows = {title: measure(method, given) for title, method in found.items()}
    if not any("error" in row and not row["error"].startswith("Timeout") for row in rows.values()):
        kept.write_text(json.dumps(rows))
    return rows


def describe(name: str, given: Problem) -> dict[str, Any]:
    """The problem and its truth in numbers."""
    truth = given.truth
    norms = truth.gradient_norm / truth.wanted_norm
    with torch.no_grad():
        right = given.model(given.inputs).argmax(1) == given.targets
    return {
        "setting": name,
        "regime": given.regime,
        "title": given.title,
        "prior_precision": given.prior_precision,
        "num_data": len(given.inputs),
        "num_params": sum(p.numel() for p in given.model.parameters()),
        "default_structure": default_structure(given.model, Batches(given.data, 1)),
        "train_accuracy": float(right.double().mean()),
        "relative_gradient": relative_gradient(given),
        "left_out": given.left_out.tolist(),
        "true_loss": float(truth.loss.mean()),
        "true_loo_loss": float(truth.loo_loss.mean()),
        "noise_floor": {"repeated": truth.noise_floor.repeated},
        "refits_short_of_convergence": int((~truth.converged).sum()),
        "worst_norm_over_wanted": float(norms.max()),
        "true_score": truth.score.double().tolist(),
    }


def relative_gradient(given: Problem) -> float:
    """Norm of the objective's gradient over that of the regulariser's part: 0 where converged."""
    parameters = list(given.model.parameters())
    loss = torch.nn.functional.cross_entropy(
        given.model(given.inputs), given.targets, reduction="sum"
    )
    parts = torch.autograd.grad(loss, parameters)
    decay = [given.prior_precision * p.detach() for p in parameters]
    total = sum(float(((g + d) ** 2).sum()) for g, d in zip(parts, decay, strict=True))
    return (total / sum(float((d**2).sum()) for d in decay)) ** 0.5
