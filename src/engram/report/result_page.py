r"""The page of a result: what every example does to its own prediction.

.. math:: \text{error}_i = \lVert \hat y_{\setminus i} - y_i \rVert, \qquad
    \text{variance}_i = \lVert \hat y_{\setminus i} - \hat y_i \rVert \,/\, \text{error}_i

Without the example, its prediction :math:`\hat y_{\setminus i}` is off by the error. The
prediction variance is the share of it that the example takes away itself: near 0 it is predicted
by the others, near 1 it is known by heart. For linear regression that is exactly its leverage. The
map shows the two factors, and the score is their product.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn import functional

from engram.core.dtypes import SMALLEST_DIVISOR
from engram.errors import LikelihoodError
from engram.likelihoods import Likelihood
from engram.report.page import Alert, Examples, Headline, Making, PageData
from engram.sensitivity.metrics import classes_of
from engram.sensitivity.result import Result
from engram.trust.verdict import LEVELS, UNRELIABLE, Verdict

COVERED = 1.96  # standard errors either side of a mean: 95 % of a normal distribution
FIRST = ("accuracy", "r squared")  # measures that a person asks for first
CONTRADICTED, MEMORISED, UNSURE = "contradicted label", "memorised", "unreliable estimate"
EXPLANATIONS = {
    "leave-one-out loss": "The loss of an example under the model as it would be without that "
    "example, estimated from one trained model. Its mean estimates the loss on unseen data; the "
    "interval is 1.96 standard errors of the mean over examples.",
    "score": "How far the example's own prediction moves when it is left out: the sum of the "
    "absolute changes of its probabilities, or of its predicted values.",
    "prediction error": "How far the prediction is from the label when the example is left out: of "
    "a classifier 1 minus the probability of the given label, else the distance to the target.",
    "prediction variance": "The share of that error that the example takes away itself, by being "
    "trained on: near 0 the others predict it, near 1 it is known by heart. In linear regression "
    "it is the leverage. Error times variance is the score, up to a factor.",
    "memorised": "Right with the example in the training data, wrong without it.",
    "trust": "Good, caution or unreliable, from signals that need no retraining: leverages, "
    "convergence, and how consistent the posterior is with the example.",
    "sign": "Every change is without the example minus with it.",
}


def result_data(
    result: Result,
    *,
    ids: Sequence[Any] | None = None,
    classes: Sequence[str] | None = None,
    images: Any = None,
    texts: Any = None,
    rows: Any = None,
) -> PageData:
    """What a result says, for a page.

    Args:
        result: of :func:`engram.sensitivities`.
        ids: names of the N examples; their positions in the data if not given.
        classes: names of the classes; their numbers if not given.
        images, texts, rows: the examples themselves, as in :class:`engram.report.page.Examples`.

    Example:
        >>> import torch
        >>> import engram
        >>> model, data = torch.nn.Linear(3, 2), (torch.randn(20, 3), torch.arange(20) % 2)
        >>> fitted = engram.laplace(model, data, prior_precision=1.0)
        >>> page = result_data(engram.sensitivities(model, data, fitted), classes=["cat", "dog"])
        >>> len(page.examples), page.examples.classes, list(page.examples.flags)
        (20, ['cat', 'dog'], ['contradicted label', 'memorised', 'unreliable estimate'])
    """
    columns = _columns(result, classes)
    names = result.indices.tolist() if ids is None else list(ids)
    shown = {"images": images, "texts": texts, "rows": rows}
    examples = Examples(names, result.loss, result.loo_loss, result.score, **columns, **shown)
    metrics = _metrics(result)
    return PageData(
        _headline(result, examples, metrics),
        examples,
        _alerts(examples),
        metrics=metrics,
        making=_making(result),
    )


def _columns(result: Result, classes: Sequence[str] | None) -> dict[str, Any]:
    """What the likelihood knows of the examples; nothing where only its name is left."""
    levels = result.verdict.levels
    flags = {UNSURE: levels == UNRELIABLE}
    found: dict[str, Any] = {"trust": levels, "flags": flags}
    likelihood = result.basis.likelihood
    if not isinstance(likelihood, Likelihood):
        return found
    try:
        labels = result.labels
    except LikelihoodError:
        return found | _regression(result, likelihood)
    return found | _classification(result, likelihood, labels, classes, flags)


def _classification(
    result: Result,
    likelihood: Likelihood,
    labels: Tensor,
    classes: Sequence[str] | None,
    flags: Mapping[str, Tensor],
) -> dict[str, Any]:
    before = classes_of(likelihood.mean(result.outputs))
    without = result.loo_probabilities.clamp(0, 1)
    predicted = without.argmax(1)
    contradicted = predicted != labels
    memorised = contradicted & (before.argmax(1) == labels)
    count = before.shape[1]
    given = functional.one_hot(labels, count)
    return {
        "classes": [str(number) for number in range(count)] if classes is None else list(classes),
        "given": labels,
        "predicted": predicted,
        "probabilities": before,
        "loo_probabilities": without,
        "prediction_error": 1 - without.gather(1, labels[:, None])[:, 0],
        "prediction_variance": prediction_share(before, without, given),
        "flags": {CONTRADICTED: contradicted, MEMORISED: memorised, **flags},
    }


def _regression(result: Result, likelihood: Likelihood) -> dict[str, Any]:
    observed = likelihood.observed(result.outputs, result.targets)
    if observed is None:
        return {}
    means = likelihood.mean(result.outputs)
    without = means + result.prediction_deviation
    found: dict[str, Any] = {
        "prediction_error": (without - observed).abs().sum(1),
        "prediction_variance": prediction_share(means, without, observed),
    }
    if observed.shape[1] == 1:
        found["given"], found["predicted"] = observed[:, 0], without[:, 0]
    return found


def prediction_share(before: Tensor, without: Tensor, target: Tensor) -> Tensor:
    """The share of its left-out error that an example takes away itself, [N]; L1 norms over [N, K].

    Example:
        >>> import torch
        >>> prediction_share(torch.tensor([[1.5]]), torch.tensor([[1.0]]), torch.tensor([[2.0]]))
        tensor([0.5000])
    """
    error = (without - target).abs().sum(1).clamp_min(SMALLEST_DIVISOR)
    return (without - before).abs().sum(1) / error


def _headline(
    result: Result, examples: Examples, metrics: Mapping[str, tuple[float, float]]
) -> Headline:
    measure = next((name for name in FIRST if name in metrics), FIRST[0])
    values = metrics.get(measure)
    low, high = loss_interval(result.loo_loss, result.counts)
    return Headline(
        title="What the model remembers",
        sentence=_sentence(examples, result.verdict, measure, values),
        train_loss=result.train_nll,
        loo_loss=result.loo_nll,
        loo_interval=None if math.isnan(low) else (low, high),
        accuracy=values[1] if values else None,
        accuracy_name=measure,
        train_accuracy=values[0] if values else None,
        verdict=result.verdict.level,
        verdict_line=result.verdict.line,
        reasons=[str(reason) for reason in result.verdict.reasons],
        unit=result.basis.loss_unit,
    )


def loss_interval(losses: Tensor, counts: Tensor) -> tuple[float, float]:
    """The mean of losses, less and plus 1.96 standard errors; NaN for fewer than two.

    Example:
        >>> import torch
        >>> low, high = loss_interval(torch.tensor([0.0, 2.0]), torch.ones(2))
        >>> round(low, 2), round(high, 2)
        (-0.96, 2.96)
    """
    some = counts > 0
    weights, values = counts[some].double(), losses[some].double()
    total = weights.sum()
    if not total > 1:
        return math.nan, math.nan
    mean = (weights * values).sum() / total
    spread = (weights * (values - mean).square()).sum() / (total - 1)
    reach = COVERED * float((spread / total).sqrt())
    return float(mean) - reach, float(mean) + reach


def _metrics(result: Result) -> dict[str, tuple[float, float]]:
    """Every measure on the training data and under leave-one-out, as far as it is known."""
    if not isinstance(result.basis.likelihood, Likelihood):
        return {}
    frame = result.metrics()
    names = [str(name).replace("_", " ") for name in frame.index]
    return dict(
        zip(names, zip(*(frame[c].tolist() for c in frame.columns), strict=True), strict=True)
    )


def _sentence(
    examples: Examples, verdict: Verdict, measure: str, values: tuple[float, float] | None
) -> str:
    count = len(examples)
    if verdict.level == LEVELS[UNRELIABLE]:
        return f"{count:,} examples left out one at a time: {verdict.line}."
    if CONTRADICTED in examples.flags and values is not None:
        against = int(examples.flags[CONTRADICTED].sum())
        return (
            f"Left out one at a time, {against:,} of {count:,} examples are contradicted by the "
            f"others; on unseen data the model should be right {100 * values[1]:.1f} % of the time."
        )
    known = "" if values is None else f"; {measure} on unseen data should be near {values[1]:.2f}"
    return f"Each of {count:,} examples left out in turn, from one trained model{known}."


def _alerts(examples: Examples) -> list[Alert]:
    words = {
        CONTRADICTED: ("label{} that the others contradict", "Wrong labels are among them."),
        MEMORISED: ("memorised example{}", "Right with it in the data, wrong without: by heart."),
        UNSURE: ("estimate{} not to lean on", "That it stands out is sure, its size is not."),
    }
    counts = {name: int(np.count_nonzero(flag)) for name, flag in examples.flags.items()}
    return [
        Alert(
            f"{count:,} {words[name][0].format('' if count == 1 else 's')}",
            words[name][1],
            flag=name,
        )
        for name, count in counts.items()
        if count and name in words
    ]


def _making(result: Result) -> Making:
    record = dict(result.provenance)
    settings = dict(record.pop("settings", {}))
    facts = {**record, **settings, **result.diagnostics.to_dict()}
    command = "engram.sensitivities(model, data, posterior).report('report.html')"
    return Making(EXPLANATIONS, facts, command, tuple(result.basis.not_estimated))
