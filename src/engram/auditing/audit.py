"""``engram.audit``: data in, findings out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engram.auditing.advice import advice_for
from engram.auditing.columns import Wanted
from engram.auditing.duplicates import find_duplicates, without_copies
from engram.auditing.estimating import estimated
from engram.auditing.examples import Examples, Texts
from engram.auditing.fitting import Fit, Schedule
from engram.auditing.group_effects import (
    Trained,
    class_effects,
    group_effects,
    no_classes,
    no_groups,
)
from engram.auditing.issues import Judged, issue_table, judged
from engram.auditing.neighbours import neighbours_of
from engram.auditing.outcome import Audit, Findings, shown_of, with_pictures
from engram.auditing.own_model import Own
from engram.auditing.provenance import provenance
from engram.auditing.readers import read_examples
from engram.auditing.run_lock import RunInProgress, in_progress
from engram.auditing.stock import stock_of
from engram.auditing.stock.base import Stock
from engram.auditing.tasks import Classes
from engram.core.arguments import AUTO, path_of, seed_number, truth, whole
from engram.core.identity.digests import bytes_of, joined
from engram.core.state.process import kept_surroundings
from engram.errors import DataError


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
    model: str | Callable[..., Any] | None = None,
    weights: str | Path | None = None,
    train: str | Callable[..., Any] | None = None,
    epochs: int | None = None,
    optimizer: str = "adamw",
    seed: int = 0,
    minimal: bool = False,
    progress: bool = True,
) -> Audit:
    """Which labels look wrong, what a model leans on, and how well it will do on unseen data.

    A stock model is trained on the data, or your own, its training recorded, and every example left
    out by the memory-perturbation equation, near copies together.

    Args:
        data: a file (CSV, TSV, Parquet, JSON lines, npz, lines of label and text), a folder (of
            images by class, or a data set in Arrow files), a ``DataFrame``, or a tuple of inputs
            and labels.
        output: folder of the run, with a table, arrays and a page. After Ctrl-C or a kill the same
            call goes on. Without one nothing is written.
        label: the label column, or several 0/1 columns of a multi-label task.
        text, image: the column to predict from, where it is text or names image files.
        group_by: column (source, annotator, day) by whose values examples are left out together.
        id: column by which people know the examples.
        test: further data of the same form; effects of groups are then seen on it.
        task: ``classes`` or ``regression``, where the label column does not say.
        sample: most examples to read, drawn at random.
        model: your own model in place of the stock one, a function or ``package.module:function``;
            called with the examples where it takes an argument, it returns the module.
            ``"minilm"`` is a pretrained encoder of texts with a small head.
        weights: file with the model's weights, which is then not trained.
        train: your own training, called with the model and (inputs, targets); it may return the
            record of :func:`engram.record`, or its optimizer.
        epochs: of the training; without it as many as our own estimate, or the recipe, asks for.
        optimizer: ``adamw``, ``adam`` or ``sgd``.
        seed: of first weights, order and draws.
        minimal: leave out what takes longest: a second training on half of the data, without which
            the cut-off is less sure, groups, classes, neighbours, and the walk along the training
            of a model of yours.
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
    given = {name: value for name, value in locals().items() if name not in ("output", "progress")}
    wanted = Wanted(label, text, image, group_by, id, task, _count(sample), seed_number(seed))
    plan = _Plan(
        Own(model, weights, train),
        Schedule(None if epochs is None else whole("epochs", epochs), optimizer, seed),
        truth("minimal", minimal),
        truth("progress", progress),
        {name: _told(value) for name, value in given.items()},
    )
    examples = read_examples(data, wanted)
    others = None if test is None else _same_task(read_examples(test, wanted), examples)
    with kept_surroundings():
        return plan.run(examples, others, None if output is None else path_of("folder", output))


def _count(sample: int | None) -> int | None:
    return None if sample is None else whole("sample", sample, 2, remedy="use sample=100_000")


def _told(value: Any) -> Any:
    """A setting as ``run.json`` has it: plain, or the name of what cannot be written."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
        return list(value)
    if callable(value) and not isinstance(value, type) and hasattr(value, "__qualname__"):
        return f"{value.__module__}:{value.__qualname__}"
    return f"a {type(value).__name__} in memory"


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


@dataclass(frozen=True, eq=False)
class _Plan:
    """How examples are audited.

    Args:
        own: the user's model.
        schedule: of the training.
        minimal: without what takes longest.
        progress: show bars.
        settings: as they were given, for the record.
    """

    own: Own
    schedule: Schedule
    minimal: bool
    progress: bool
    settings: dict[str, Any] = field(repr=False)

    def run(self, examples: Examples, others: Examples | None, output: Path | None) -> Audit:
        """The audit, in a folder where one was given."""
        stock = self.own.stock(examples, stock_of)
        fingerprint = self._fingerprint(stock, examples)
        folder: AbstractContextManager[RunInProgress | None] = nullcontext()
        if output is not None:
            folder = in_progress(output, fingerprint, self.settings)
        with folder as kept:
            before: Audit | None = None if kept is None else kept.finished()
            if before is not None:
                return before
            trained = self.own.fit(stock, examples, self.schedule, self.progress, kept)
            found = self._found(stock, trained, examples, others, fingerprint)
            if kept is not None:
                found.save(kept.folder)
                kept.clear()
        return found

    def _fingerprint(self, stock: Stock, examples: Examples) -> str:
        """Of everything that the numbers depend on."""
        settings = json.dumps(self.settings, sort_keys=True, default=str)
        words = json.dumps([examples.ids, examples.groups])
        parts = (settings, words, bytes_of(stock.inputs), bytes_of(examples.targets))
        return joined("audit", *parts).hex()

    def _found(
        self,
        stock: Stock,
        trained: Fit,
        examples: Examples,
        others: Examples | None,
        fingerprint: str,
    ) -> Audit:
        begun = time.monotonic()
        data, how = (stock.inputs, examples.targets), stock.recipe.estimate
        how = replace(how, estimator="linear") if self.minimal else how
        plain, posterior = estimated(
            trained.model, data, examples.task, trained.training, how, self.progress
        )
        lines = examples.inputs.lines if isinstance(examples.inputs, Texts) else None
        copies = find_duplicates(stock.inputs, lines)
        result = without_copies(plain, copies)
        opinion = None
        if not self.minimal:
            opinion = self.own.opinion(
                stock, examples, self.schedule, len(trained.curve), self.progress
            )
        labels = judged(result, trained.training, examples.targets, opinion)
        issues = issue_table(examples, result, labels, copies)
        test = None if others is None else (stock.encode(others.inputs), others.targets)
        groups, classes, near = no_groups(), no_classes(), None
        if not self.minimal:
            about = Trained(trained.model, data, posterior, trained.training, result, test)
            near = neighbours_of(trained.model, data, posterior, labels.losses, self.progress)
            if isinstance(examples.task, Classes):
                classes = class_effects(about, examples.task.classes, self.progress)
            if examples.groups is not None:
                groups = group_effects(about, examples.groups, self.schedule.seed, self.progress)
                issues["group_harm"] = issues["group"].map(groups["harm"]).astype(float)
        facts = {
            **provenance(),
            "source": examples.source,
            "model": stock.name,
            "epochs_trained": len(trained.curve),
            "stopped": trained.stopped,
            "held_out_loss": None if opinion is None else opinion.loss,
            "seconds_estimating": round(time.monotonic() - begun, 2),
            "groups_on": "the other examples" if others is None else "the test data",
            "skipped": list(examples.skipped),
            "fingerprint": fingerprint,
        }
        found = Audit(
            shown_of(examples),
            result,
            issues,
            _findings(examples, labels, copies.count),
            groups,
            tuple(trained.curve),
            self.settings,
            facts,
            _notes(examples, stock.notes),
            {} if test is None else _test_losses(trained, test, examples),
            classes,
            near,
            advice_for(
                self.own, trained.training, self.minimal, None if opinion is None else opinion.loss
            ),
            {name: w.detach().clone() for name, w in trained.model.state_dict().items()},
        )
        return with_pictures(found, examples.inputs)


def _findings(examples: Examples, labels: Judged, copies: int) -> Findings:
    called = labels.noise.called
    return Findings(
        len(examples),
        called.count,
        called.share,
        labels.noise.rate,
        0 if labels.memorised is None else int(labels.memorised.sum()),
        copies,
        len(examples.skipped),
        called.low,
        called.high,
    )


def _notes(examples: Examples, more: tuple[str, ...]) -> tuple[str, ...]:
    skipped = examples.skipped
    names = f"{len(skipped):,} could not be read and were left out: {'; '.join(skipped[:5])}"
    told = (*((names,) if skipped else ()), *examples.notes, *more)
    return tuple(dict.fromkeys(told))  # a reader and a model may say the same


def _test_losses(trained: Fit, test: tuple[Tensor, Tensor], examples: Examples) -> dict[str, float]:
    """Mean loss, and accuracy of a classifier, on the test data."""
    with torch.no_grad():
        outputs = torch.cat([trained.model(part) for part in test[0].split(1024)])
    found = {"loss": float(examples.task.loss(outputs, test[1])), "examples": float(len(test[1]))}
    if isinstance(examples.task, Classes):
        found["accuracy"] = float((outputs.argmax(1) == test[1]).double().mean())
    return found
