"""The result: for every example, how far the model would move without it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engram.core.arguments import one_of, path_of, whole
from engram.core.printable import printable
from engram.core.storage.kinds import (
    Kind,
    anything,
    check_finite,
    check_that,
    checked,
    flags,
    numbers,
    positions,
    stored,
)
from engram.core.storage.values import ADDED_LATER
from engram.errors import (
    ArgumentError,
    LikelihoodError,
    ModelMismatchError,
    StorageError,
    TargetError,
)
from engram.likelihoods import Likelihood, Tokens
from engram.sensitivity.basis import Basis
from engram.sensitivity.diagnostics import Diagnostics
from engram.sensitivity.metrics import classes_of, compared
from engram.sensitivity.tokens import TokenLosses
from engram.trust.judge import judge
from engram.trust.verdict import Verdict

if TYPE_CHECKING:
    import pandas as pd

NOTE = "note                  "  # before a line of the summary, as wide as its names
OBTAINED = ("estimate", "solve", "retrain", "replay")  # what the numbers in the column stand for
UNITS = {
    "sign": "a deviation is without the example minus with it",
    "loss": "nats per example",
    "loo_loss": "nats per example, the example's own loss when it is left out",
    "score": "L1 norm of the deviation of the example's prediction",
    "prequential": "nats per example, mean loss just before the training's own steps with it",
    "leverage": "trace of prediction variance times output Hessian; NaN where not computed",
}


@dataclass(frozen=True, eq=False)
class Result:
    """Sensitivities of N examples with K outputs; tensors are on the CPU.

    A deviation is *without the example minus with it*: a positive ``loo_loss - loss`` means that
    leaving the example out makes its own loss worse. Losses are in nats per example, unless
    ``basis.loss_unit`` says otherwise.

    Attributes:
        indices: position of each example in the data, [N].
        targets: as the data gives them.
        outputs: f, [N, K]; of sequences the log probabilities of their tokens, [N, T].
        deviation: of the example's outputs when it is left out, [N, K].
        prediction_deviation: of its prediction, [N, K].
        score: L1 norm of that, [N].
        loss: of each example under the trained model, [N].
        loo_loss: under the model without that example, [N].
        leverage: [N], NaN where it was not computed.
        flagged: where the estimator's guard held, [N].
        diagnostics: what needs no truth to judge the result by.
        coverage: how each parameter was handled, by name.
        provenance: versions, settings and seed, for the record; nothing is decided by it.
        basis: the facts about posterior and likelihood that decide later.
        obtained: how each example was obtained, as a position in ``OBTAINED``; all are estimates
            until :func:`engram.refine` replaces some, [N].
        counts: how many examples each row stands for in means, [N]; 1 unless the data had
            frequencies or rows of weight 0. Leaving out takes one of them.
        prequential: mean loss just before the training's own steps that used the example, [N]; NaN
            where no recorded steps have named it.
    """

    indices: Tensor
    targets: Tensor
    outputs: Tensor
    deviation: Tensor
    prediction_deviation: Tensor
    score: Tensor
    loss: Tensor
    loo_loss: Tensor
    leverage: Tensor
    flagged: Tensor
    diagnostics: Diagnostics
    coverage: Mapping[str, str] = field(repr=False)
    provenance: Mapping[str, Any] = field(repr=False)
    basis: Basis = field(default_factory=Basis)
    obtained: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.uint8))
    counts: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    prequential: Tensor = field(default_factory=lambda: torch.zeros(0), metadata=ADDED_LATER)

    def __post_init__(self) -> None:
        if self.counts.numel() == 0:
            object.__setattr__(self, "counts", torch.ones(len(self.indices), dtype=torch.float64))
        if self.prequential.numel() == 0:
            object.__setattr__(self, "prequential", torch.full_like(self.loss, math.nan))
        if self.obtained.numel() == 0:
            object.__setattr__(self, "obtained", torch.zeros_like(self.flagged, dtype=torch.uint8))

    @property
    def num_data(self) -> int:
        """N, the rows."""
        return len(self.indices)

    @property
    def num_examples(self) -> float:
        """The examples that the rows stand for."""
        return float(self.counts.sum())

    @property
    def num_outputs(self) -> int:
        """K."""
        return int(self.outputs.shape[1])

    @property
    def train_nll(self) -> float:
        """Mean loss on the training data, nats per example."""
        return self._mean(self.loss)

    @property
    def loo_nll(self) -> float:
        """Mean leave-one-out loss, which estimates the test loss; nats per example."""
        return self._mean(self.loo_loss)

    def _mean(self, column: Tensor) -> float:
        """Over examples, a row for as many as it stands for."""
        some = self.counts > 0
        total = (self.counts[some] * column[some].double()).sum()
        return float(total / self.counts[some].sum())

    @cached_property
    def verdict(self) -> Verdict:
        """How far to believe it, from what it carries; :func:`engram.assess` knows more."""
        return judge(self)

    def check_data(self, num_data: int) -> None:
        """Raise unless this can be a result on so many examples."""
        if self.num_data != num_data:
            raise ModelMismatchError(
                f"a result on these {num_data} examples",
                f"one on {self.num_data}",
                "pass the data that the sensitivities were computed on",
            )

    @property
    def labels(self) -> Tensor:
        """The class that the data gives each example, [N]; LikelihoodError for a regression."""
        return self._check_classifier()

    def _check_classifier(self) -> Tensor:
        """The labels; LikelihoodError where targets are no classes."""
        likelihood = self.basis.known_likelihood
        found = likelihood.labels(self.outputs, self.targets)
        if found is None:
            raise LikelihoodError(
                "a classifier, whose targets name a class each",
                f"{likelihood!r} with {self.num_outputs} outputs",
                "use result.metrics() for a regression; of a loss of your own on class numbers, "
                "pass its probabilities as mean= to from_loss",
            )
        return found

    @property
    def classifies(self) -> bool:
        """Whether targets name a class each, as far as the result knows its likelihood."""
        likelihood = self.basis.likelihood
        if not isinstance(likelihood, Likelihood):
            return False
        return likelihood.labels(self.outputs, self.targets) is not None

    @property
    def loo_probabilities(self) -> Tensor:
        """Probabilities of the classes under leave-one-out, [N, C], as cleanlab asks for.

        LikelihoodError for a regression. A model with one logit has two classes. With
        ``estimator="paper"``, whose predictions are linearised, they may lie outside of 0 and 1.
        """
        self._check_classifier()
        means = self.basis.known_likelihood.mean(self.outputs)
        return classes_of(means + self.prediction_deviation)

    def metrics(self) -> pd.DataFrame:
        """How good the predictions are on the training data and, beside it, under leave-one-out.

        A row for each: ``loss``, and of a classifier ``accuracy``, ``brier_score``,
        ``calibration_error`` and, of two classes, ``auroc``; of a regression ``r_squared`` and
        ``rmse``; of sequences ``perplexity``. :mod:`engram.sensitivity.metrics` has the equations.

        Example:
            >>> import engram
            >>> model, data = torch.nn.Linear(3, 2), (torch.randn(20, 3), torch.arange(20) % 2)
            >>> fitted = engram.laplace(model, data, prior_precision=1.0)
            >>> frame = engram.sensitivities(model, data, fitted).metrics()
            >>> list(frame.index), list(frame.columns)
            (['loss', 'accuracy', 'brier_score', 'calibration_error', 'auroc'],
             ['training', 'leave_one_out'])
        """
        import pandas as pd

        rows: dict[str, tuple[float, ...]] = {"loss": (self.train_nll, self.loo_nll)}
        rows |= self._further_metrics()
        columns = ["training", "leave_one_out"]
        return pd.DataFrame.from_dict(rows, orient="index", columns=columns).rename_axis("metric")

    def _further_metrics(self) -> dict[str, tuple[float, ...]]:
        likelihood = self.basis.known_likelihood
        if not likelihood.keeps_outputs:
            return {"perplexity": (self.tokens.perplexity, self.tokens.loo_perplexity)}
        means = likelihood.mean(self.outputs)
        predictions = means, means + self.prediction_deviation
        return compared(likelihood, self.outputs, self.targets, predictions, self.counts)

    @property
    def tokens(self) -> TokenLosses:
        """The losses of each token of sequences, with the sequence in the data and without it.

        LikelihoodError for other data.
        """
        likelihood = self.basis.known_likelihood
        if not isinstance(likelihood, Tokens):
            raise LikelihoodError(
                "a result of sequences of tokens",
                f"{likelihood!r}",
                'fit the posterior with likelihood="tokens"',
            )
        return TokenLosses.of(self.outputs, self.deviation, likelihood.labels_at(self.targets))

    def top(self, count: int = 20, by: str = "score") -> pd.DataFrame:
        """The examples that come first in a column of :meth:`to_frame`, highest first.

        ``score`` finds what the model depends on most; ``loo_loss`` likely label errors, of which
        :func:`engram.label_issues` says more.
        """
        frame, count = self.to_frame(), whole("count", count, remedy="ask for top(20)")
        one_of("by", by, [str(name) for name in frame.columns], 'use "score"')
        return frame.sort_values(by, ascending=False, kind="stable").head(count)

    def to_frame(self) -> pd.DataFrame:
        """One row per example, indexed by its position in the data."""
        import pandas as pd

        columns: dict[str, Any] = {}
        if self.targets.dim() == 1:
            columns["target"] = self.targets.numpy()
        if self.num_outputs > 1 and not isinstance(self.basis.likelihood, Tokens):
            columns["predicted"] = self.outputs.argmax(1).numpy()
        threshold = self.basis.threshold
        if self.num_outputs == 1 and threshold is not None:
            columns["predicted"] = (self.outputs[:, 0] > threshold).long().numpy()
        columns |= {
            "score": self.score.numpy(),
            "loss": self.loss.numpy(),
            "loo_loss": self.loo_loss.numpy(),
            "increase": (self.loo_loss - self.loss).numpy(),
            "leverage": self.leverage.numpy(),
            "flagged": self.flagged.numpy(),
        }
        if bool(self.prequential.isfinite().any()):
            columns["prequential"] = self.prequential.numpy()
        if bool((self.counts != 1).any()):
            columns["count"] = self.counts.numpy()
        if self.obtained.any():
            columns["obtained"] = [OBTAINED[number] for number in self.obtained.tolist()]
        return pd.DataFrame(columns, index=pd.Index(self.indices.numpy(), name="example"))

    def units(self) -> dict[str, str]:
        """What the numbers of each column are."""
        unit = self.basis.loss_unit
        return {name: text.replace("nats", unit) for name, text in UNITS.items()}

    def _examples(self) -> str:
        if bool((self.counts == 1).all()):
            return f"{self.num_data:,} examples"
        return f"{self.num_examples:,.6g} examples in {self.num_data:,} rows"

    def _scores(self) -> str:
        known = (~self.score.isnan()).nonzero()[:, 0]
        if len(known) == 0:
            return "NaN for every example"
        score = self.score[known]
        largest = int(self.indices[known[score.argmax()]])
        lost = self.num_data - len(known)
        return (
            f"median {float(score.median()):.3g}, largest {float(score.max()):.3g} "
            f"(example {largest})" + (f"; NaN for {lost:,} others" if lost else "")
        )

    def save(self, folder: str | Path) -> Path:
        """Write ``result.json`` and its tensors into a folder, whole; no pickle."""
        return KIND.write(self, folder)

    def with_likelihood(self, likelihood: str | Likelihood) -> Result:
        """The same with the likelihood itself, where a file could only name it."""
        return replace(self, basis=self.basis.with_likelihood(likelihood))

    def report(
        self,
        path: str | Path,
        top: int = 20,
        *,
        ids: Sequence[Any] | None = None,
        classes: Sequence[str] | None = None,
        images: Any = None,
        texts: Any = None,
        rows: pd.DataFrame | None = None,
    ) -> Path:
        """Write one self-contained HTML page: alerts, the memory map and the examples themselves.

        Args:
            path: of the file.
            top: rows of its table of examples.
            ids: names of the N examples; their positions if not given.
            classes: names of the classes; their numbers if not given.
            images: N pictures, by position: [H, W], [H, W, 3] or [3, H, W].
            texts: N texts.
            rows: N rows of a table.
        """
        from engram.report.html import write_page
        from engram.report.result_page import result_data

        data = result_data(self, ids=ids, classes=classes, images=images, texts=texts, rows=rows)
        return write_page(data, path_of("file", path), whole("top", top, remedy="use top=20"))

    def __repr__(self) -> str:
        unit = f"{printable(self.basis.loss_unit)} per example"
        lines = [
            f"Sensitivities of {self._examples()}, {self.num_outputs} outputs"
            f" ({printable(self.basis.estimator)}, {printable(self.basis.structure)} posterior)",
            f"train loss            {self.train_nll:.4f} {unit}",
            f"leave-one-out loss    {self.loo_nll:.4f} {unit}: estimate of the test loss",
            f"score                 {self._scores()}",
            str(self.diagnostics),
            "sign                  without the example minus with it",
            repr(self.verdict),
        ]
        if self.basis.prior_fitted:
            lines.append(
                f"{NOTE}prior_precision {self.basis.prior_precision:.4g} is the "
                "one that the weights fit best: none was given"
            )
        if self.obtained.any():
            ways = range(1, len(OBTAINED))
            counts = {OBTAINED[n]: int((self.obtained == n).sum()) for n in ways}
            said = ", ".join(f"{count:,} by {way}" for way, count in counts.items() if count)
            lines.append(f"refined               {said}; the others are estimates")
        if self.basis.in_eval_mode:
            layers = printable(", ".join(self.basis.in_eval_mode))
            lines.append(f"{NOTE}{layers} in eval mode for this; as before now")
        for words in self.basis.not_estimated:
            lines += wrap(printable(words), 79, initial_indent=NOTE, subsequent_indent=" " * 22)
        return "\n".join(lines)


def check_result(value: Any) -> None:
    """Raise unless a value is a result."""
    if not isinstance(value, Result):
        raise ArgumentError(
            "a result of engram.sensitivities", type(value).__name__, "pass the result itself"
        )


COLUMNS = {
    "indices": positions("N"),
    "targets": anything("N ..."),
    "outputs": numbers("N K"),
    "deviation": numbers("N K", finite=False),
    "prediction_deviation": numbers("N K", finite=False),
    "score": numbers("N", finite=False),
    "loss": numbers("N"),
    "loo_loss": numbers("N", finite=False),
    "leverage": numbers("N", finite=False),  # NaN where it was not computed
    "flagged": flags("N"),
    "obtained": positions("N", below=len(OBTAINED), dtype=torch.uint8),
    "counts": numbers("N", low=0),
    "prequential": numbers("N", finite=False),  # NaN where nothing was recorded
}
FINITE_UNLESS_FLAGGED = ("deviation", "prediction_deviation", "score", "loo_loss")


def _check(found: Result) -> None:
    for name in FINITE_UNLESS_FLAGGED:
        check_finite(name, getattr(found, name)[~found.flagged])
    check_that(bool(found.counts.any()), "a row that counts", "none")
    try:
        _ = found.classifies
    except TargetError as error:
        raise StorageError(error.expected, error.got, "save it again") from error


KIND = stored(
    Kind(
        "result",
        3,
        checked(Result, COLUMNS, _check),
        units=Result.units,
        completed=Result.with_likelihood,
    )
)
