"""The audit: what was found in the data, as tables, a page and a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from engram.auditing.advice import advised
from engram.auditing.examples import Examples, Inputs, Pictures
from engram.auditing.group_effects import no_classes
from engram.auditing.tasks import Task
from engram.core.arguments import path_of
from engram.core.printable import printable
from engram.core.storage.values import ADDED_LATER
from engram.sensitivity.result import Result
from engram.trust.verdict import Verdict

if TYPE_CHECKING:
    import pandas as pd

    from engram.report.page import Neighbours, PageData


@dataclass(frozen=True, eq=False)
class Shown:
    """What can be shown of the examples.

    Args:
        kind: tabular, image or text.
        task: what the targets mean.
        ids: of the examples.
        texts: in words; of images their files.
        rows: the first columns of a table; None of anything else.
        groups: of the examples, where they are grouped.
        pictured: positions of those with a thumbnail, [M].
        thumbnails: [M, H, W, C] of bytes.
    """

    kind: str
    task: Task
    ids: tuple[str, ...]
    texts: tuple[str, ...]
    rows: pd.DataFrame | None
    groups: tuple[str, ...] | None
    pictured: np.ndarray
    thumbnails: np.ndarray


@dataclass(frozen=True)
class Findings:
    """The numbers of an audit, in a few lines.

    Args:
        num_data: examples.
        num_label_issues: labels that are likely wrong.
        precision: expected share of truly wrong ones among them; NaN where there are none.
        noise_rate: how often labels are contradicted among the examples that the model is surest
            of: the share of wrong labels, and more than that where the model is weak.
        num_memorised: examples that were learned by heart.
        num_duplicates: examples that have a copy.
        num_skipped: examples that could not be read.
        fewest_wrong, most_wrong: how many of the labels that are likely wrong are, with a chance of
            90 %.
    """

    num_data: int
    num_label_issues: int
    precision: float
    noise_rate: float
    num_memorised: int
    num_duplicates: int
    num_skipped: int
    fewest_wrong: int | None = field(default=None, metadata=ADDED_LATER)
    most_wrong: int | None = field(default=None, metadata=ADDED_LATER)

    @property
    def wrong(self) -> str:
        """How many of the labels that are called wrong are, in words."""
        low, high = self.fewest_wrong, self.most_wrong
        if low is None or high is None:
            return f"about {self.precision:.0%}"
        return f"{low:,}" if low == high else f"{low:,} to {high:,}"


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
        advice: what can be done where the verdict has doubts; empty where the result's own remedies
            say it.
        weights: of the trained model, by name.
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
    advice: str = ""
    weights: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def verdict(self) -> Verdict:
        """How far to believe the estimates, and what to do about it."""
        return advised(self.result.verdict, self.advice)

    @property
    def loo_probabilities(self) -> Tensor:
        """Out-of-sample probabilities of the classes, [N, C], as cleanlab takes them."""
        return self.result.loo_probabilities

    def _tested(self) -> list[tuple[str, float]]:
        """Loss and accuracy on the test data; none where there are none."""
        return [(name, self.test[name]) for name in ("loss", "accuracy") if name in self.test]

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
        sure = f", {found.wrong} of them probably are" if found.num_label_issues else ""
        lines = [
            f"Audit of {found.num_data:,} examples ({self.shown.kind}, {self.shown.task.name})",
            f"likely wrong labels   {found.num_label_issues:,}{sure}",
            f"memorised             {found.num_memorised:,}",
            f"with a near copy      {found.num_duplicates:,}",
            f"train loss            {self.result.train_nll:.4f} nats per example",
            f"leave-one-out loss    {self.result.loo_nll:.4f} nats per example",
        ]
        lines += [f"{name:<22}{metrics[name]:.4f} left out" for name in metrics.index[1:2]]
        lines += [f"test {name:<17}{value:.4f} on the test data" for name, value in self._tested()]
        lines += [f"note                  {printable(note)}" for note in self.notes]
        return "\n".join([*lines, repr(self.verdict)])


def shown_of(examples: Examples) -> Shown:
    """What to keep of examples for showing, but for their pictures."""
    inputs = examples.inputs
    return Shown(
        inputs.kind,
        examples.task,
        examples.ids,
        tuple(inputs.texts()),
        inputs.rows(),
        examples.groups,
        np.empty(0, np.int64),
        np.empty((0, 1, 1, 1), np.uint8),
    )


def with_pictures(audit: Audit, inputs: Inputs) -> Audit:
    """The audit with the pictures of the examples that its page shows, where there are any."""
    from engram.report.shown import shown_positions

    if not isinstance(inputs, Pictures):
        return audit
    pictured = np.sort(shown_positions(audit.page_data().examples))
    shown = replace(audit.shown, pictured=pictured, thumbnails=inputs.pixels[pictured])
    return replace(audit, shown=shown)
