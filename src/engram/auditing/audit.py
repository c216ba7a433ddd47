"""``engram.audit``: data in, findings out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engram.auditing.columns import Wanted
from engram.auditing.duplicates import find_duplicates, without_copies
from engram.auditing.estimating import estimated
from engram.auditing.examples import Examples
from engram.auditing.fitting import Fit, Schedule, fit
from engram.auditing.group_effects import COLUMNS, Trained, group_effects
from engram.auditing.issues import issue_table, label_losses
from engram.auditing.label_noise import LabelNoise, label_noise
from engram.auditing.outcome import Audit, Findings, shown_of
from engram.auditing.provenance import provenance
from engram.auditing.readers import read_examples
from engram.auditing.stock import stock_of
from engram.auditing.tasks import Classes
from engram.core.arguments import AUTO, path_of, seed_number, truth, whole
from engram.core.state.process import kept_surroundings
from engram.errors import DataError
from engram.sensitivity.result import Result
from engram.training.memorisation import memorisation, prequential


def audit(
    data: Any,
    output: str | Path | None = None,
    *,
    label: str | Sequence[str] | None = None,
    text: str | None = None,
    image: str | None = None,
    group_by: str | None = None,
    id: str | None = None,
    test: Any = None,
    task: str = AUTO,
    sample: int | None = None,
    epochs: int | None = None,
    optimizer: str = "adamw",
    seed: int = 0,
    minimal: bool = False,
    progress: bool = True,
) -> Audit:
    """Which labels look wrong, what a model leans on, and how well it will do on unseen data.

    A stock model is trained on the data, its training recorded, and every example left out by the
    memory-perturbation equation, near copies together.

    Args:
        data: a file (CSV, TSV, Parquet, JSON lines, npz), a folder, a ``DataFrame``, or a tuple of
            inputs and labels.
        output: folder of the run, with a table, arrays and a page; nothing is written without one.
        label: the label column, or several 0/1 columns of a multi-label task.
        text, image: the column to predict from, where it is text or names image files.
        group_by: column (source, annotator, day) by whose values examples are left out together.
        id: column by which people know the examples.
        test: further data of the same form; effects of groups are then seen on it.
        task: ``classes`` or ``regression``, where the label column does not say.
        sample: most examples to read, drawn at random.
        epochs: of the training; without it as many as our own estimate, or the recipe, asks for.
        optimizer: ``adamw``, ``adam`` or ``sgd``.
        seed: of first weights, order and draws.
        minimal: leave out what takes longest: the walk along the training, and groups.
        progress: show bars.

    Returns:
        The audit, with ``issues`` (a table), ``result``, ``report(path)`` and ``save(folder)``.

    Example:
        >>> import numpy as np
        >>> x = np.concatenate([np.random.default_rng(0).normal(m, 1, (40, 2)) for m in (-3, 3)])
        >>> y = np.array(["left"] * 40 + ["right"] * 40)
        >>> y[7] = "right"  # which it is not
        >>> found = audit((x, y), progress=False)
        >>> int(found.issues["label_score"].idxmin())
        7
    """
    wanted = Wanted(label, text, image, group_by, id, task, sample, seed_number(seed))
    schedule = Schedule(None if epochs is None else whole("epochs", epochs), optimizer, seed)
    minimal, progress = truth("minimal", minimal), truth("progress", progress)
    settings = {
        "data": str(data) if isinstance(data, str | Path) else type(data).__name__,
        **{name: getattr(wanted, name) for name in ("label", "text", "image", "group_by", "id")},
        "test": str(test) if isinstance(test, str | Path) else None,
        "task": task,
        "sample": sample,
        "epochs": epochs,
        "optimizer": optimizer,
        "seed": seed,
        "minimal": minimal,
    }
    examples = read_examples(data, wanted)
    others = None if test is None else _same_task(read_examples(test, wanted), examples)
    with kept_surroundings():
        found = _audited(examples, others, schedule, minimal, progress, settings)
    if output is not None:
        found.save(path_of("folder", output))
    return found


def _same_task(test: Examples, examples: Examples) -> Examples:
    """The test data with the classes of the training data; DataError where they are others."""
    if type(test.inputs) is not type(examples.inputs) or type(test.task) is not type(examples.task):
        raise DataError(
            f"test data like the training data: {examples!r}", repr(test), "pass the same kind"
        )
    if not isinstance(examples.task, Classes) or not isinstance(test.task, Classes):
        return replace(test, task=examples.task)
    known = {name: k for k, name in enumerate(examples.task.classes)}
    unknown = sorted(set(test.task.classes) - set(known))
    if unknown:
        raise DataError(
            f"test labels among {', '.join(known)[:200]}", unknown[0], "leave these out"
        )
    targets = torch.tensor([known[test.task.classes[k]] for k in test.targets.tolist()])
    return replace(test, task=examples.task, targets=targets)


def _audited(
    examples: Examples,
    others: Examples | None,
    schedule: Schedule,
    minimal: bool,
    progress: bool,
    settings: dict[str, Any],
) -> Audit:
    begun = time.monotonic()
    stock, task = stock_of(examples), examples.task
    data = (stock.inputs, examples.targets)
    trained = fit(stock, examples.targets, task, schedule, progress)
    after = time.monotonic()
    plain, posterior = estimated(trained.model, data, task, trained.training, minimal, progress)
    copies = find_duplicates(stock.inputs)
    result = without_copies(plain, copies)
    heard = prequential(trained.training, examples.targets)
    losses = label_losses(result, heard)
    noise = _noise(result)
    known = memorisation(trained.training, examples.targets, result.loss).memorised
    issues = issue_table(task, examples.ids, result, noise, losses, known, copies)
    test = None if others is None else (stock.encode(others.inputs), others.targets)
    groups = _no_groups()
    if examples.groups is not None:
        issues["group"] = list(examples.groups)
        issues["group"] = issues["group"].astype("string")
        if not minimal:
            about = Trained(trained.model, data, posterior, trained.training, result, test)
            groups = group_effects(about, examples.groups, progress)
            issues["group_harm"] = issues["group"].map(groups["harm"]).astype(float)
    findings = Findings(
        len(examples),
        noise.count,
        noise.precision,
        noise.rate,
        int(known.sum()),
        copies.count,
        len(examples.skipped),
    )
    facts = {
        **provenance(),
        "source": examples.source,
        "model": stock.name,
        "epochs_trained": len(trained.curve),
        "stopped": trained.stopped,
        "seconds_training": round(after - begun, 2),
        "seconds_estimating": round(time.monotonic() - after, 2),
        "groups_on": "the other examples" if others is None else "the test data",
        "skipped": list(examples.skipped),
    }
    first = losses.argsort(descending=True).numpy()
    return Audit(
        shown_of(examples, first),
        result,
        issues,
        findings,
        groups,
        trained.curve,
        settings,
        facts,
        _notes(examples, stock.notes),
        {} if test is None else _test_losses(trained, test, examples),
    )


def _noise(result: Result) -> LabelNoise:
    return label_noise(result.loo_probabilities, result.labels)


def _no_groups() -> Any:
    import pandas as pd

    return pd.DataFrame(columns=list(COLUMNS)).rename_axis("group")


def _notes(examples: Examples, more: tuple[str, ...]) -> tuple[str, ...]:
    skipped = examples.skipped
    names = f"{len(skipped):,} could not be read and were left out: {'; '.join(skipped[:5])}"
    return (*((names,) if skipped else ()), *examples.notes, *more)


def _test_losses(trained: Fit, test: tuple[Tensor, Tensor], examples: Examples) -> dict[str, float]:
    """Mean loss, and accuracy of a classifier, on the test data."""
    with torch.no_grad():
        outputs = torch.cat([trained.model(part) for part in test[0].split(1024)])
    found = {"loss": float(examples.task.loss(outputs, test[1])), "examples": float(len(test[1]))}
    if isinstance(examples.task, Classes):
        found["accuracy"] = float((outputs.argmax(1) == test[1]).double().mean())
    return found
