"""The audit: what was found in the data, as tables, a page and a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from engram.auditing.examples import Examples
from engram.auditing.group_effects import no_classes
from engram.auditing.tasks import Task
from engram.core.arguments import path_of
from engram.core.printable import printable
from engram.sensitivity.result import Result

if TYPE_CHECKING:
    import pandas as pd

    from engram.report.page import Neighbours, PageData

MOST_THUMBNAILS = 2000  # pictures that are kept for showing: the page has no more


@dataclass(frozen=True, eq=False)
class Shown:
    """What can be shown of the examples.

    Args:
        kind: tabular, image or text.
        task: what the targets mean.
        ids: of the examples.
        texts: in words; of images their files.
        groups: of the examples, where they are grouped.
        pictured: positions of those with a thumbnail, [M].
        thumbnails: [M, H, W, C] of bytes.
    """

    kind: str
    task: Task
    ids: tuple[str, ...]
    texts: tuple[str, ...]
    groups: tuple[str, ...] | None
    pictured: np.ndarray
    thumbnails: np.ndarray


@dataclass(frozen=True)
class Findings:
    """The numbers of an audit, in a few lines.

    Args:
        num_data: examples.
        num_label_issues: labels that are likely wrong.
        precision: expected share of truly wrong ones among them.
        noise_rate: how often labels are contradicted among the examples that the model is surest
            of: the share of wrong labels, and more than that where the model is weak.
        num_memorised: examples that were learned by heart.
        num_duplicates: examples that have a copy.
        num_skipped: examples that could not be read.
    """

    num_data: int
    num_label_issues: int
    precision: float
    noise_rate: float
    num_memorised: int
    num_duplicates: int
    num_skipped: int


@dataclass(frozen=True, eq=False)
class Audit:
    """What :func:`engram.audit` has found.

    Attributes:
        shown: the examples, as far as they are shown.
        result: sensitivities of the examples, near copies left out together.
        issues: a table with a row an example; :data:`engram.auditing.issues.COLUMNS` says what its
            columns are.
        findings: counts.
        groups: what leaving each group out does, a row a group; empty without groups.
        curve: the training: epoch, training loss, leave-one-out estimate.
        settings: of the run, as they were given.
        facts: versions, times, the model: for people to read.
        notes: what was done to the data, and what could not be read.
        test: the loss and accuracy on the data given as ``test=``; empty without.
        classes: what examples of the other classes gain where there are none of a class, a row a
            class; empty where there are no classes.
        neighbours: the examples that help and harm those whose labels look most wrong.
    """

    shown: Shown = field(repr=False)
    result: Result = field(repr=False)
    issues: pd.DataFrame = field(repr=False)
    findings: Findings
    groups: pd.DataFrame = field(repr=False)
    curve: Sequence[Mapping[str, float]] = field(repr=False)
    settings: Mapping[str, Any]
    facts: Mapping[str, Any] = field(repr=False)
    notes: tuple[str, ...] = ()
    test: Mapping[str, float] = field(default_factory=dict)
    classes: pd.DataFrame = field(default_factory=no_classes, repr=False)
    neighbours: Neighbours | None = field(default=None, repr=False)

    @property
    def loo_probabilities(self) -> Tensor:
        """Out-of-sample probabilities of the classes, [N, C], as cleanlab takes them."""
        return self.result.loo_probabilities

    def save(self, folder: str | Path) -> Path:
        """Write the run folder: run.json, examples.parquet, arrays, report.html."""
        from engram.auditing.run_folder import write_run

        return write_run(self, path_of("folder", folder))

    def report(self, path: str | Path = "report.html") -> Path:
        """Write the page: one self-contained HTML file."""
        from engram.report.html import write_page

        return write_page(self.page_data(), path_of("file", path))

    def page_data(self) -> PageData:
        """What stands on the page."""
        from engram.auditing.page import audit_page

        return audit_page(self)

    def __repr__(self) -> str:
        found, metrics = self.findings, self.result.metrics()["leave_one_out"]
        sure = f", {found.precision:.0%} of them expected to be" if found.num_label_issues else ""
        lines = [
            f"Audit of {found.num_data:,} examples ({self.shown.kind}, {self.shown.task.name})",
            f"likely wrong labels   {found.num_label_issues:,}{sure}",
            f"memorised             {found.num_memorised:,}",
            f"with a near copy      {found.num_duplicates:,}",
            f"train loss            {self.result.train_nll:.4f} nats per example",
            f"leave-one-out loss    {self.result.loo_nll:.4f} nats per example",
        ]
        lines += [f"{name:<22}{metrics[name]:.4f} left out" for name in metrics.index[1:2]]
        lines += [f"note                  {printable(note)}" for note in self.notes]
        return "\n".join([*lines, repr(self.result.verdict)])


def shown_of(examples: Examples, first: np.ndarray) -> Shown:
    """What to keep of examples for showing.

    Args:
        examples: all of them.
        first: positions, the most worth a picture first.
    """
    from engram.auditing.examples import Pictures

    inputs = examples.inputs
    pictured, thumbnails = np.empty(0, np.int64), np.empty((0, 1, 1, 1), np.uint8)
    if isinstance(inputs, Pictures):
        pictured = np.sort(first[:MOST_THUMBNAILS])
        thumbnails = inputs.pixels[pictured]
    return Shown(
        inputs.kind,
        examples.task,
        examples.ids,
        tuple(inputs.texts()),
        examples.groups,
        pictured,
        thumbnails,
    )
