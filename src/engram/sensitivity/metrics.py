r"""How good predictions are: on the training data, and under leave-one-out as on test data.

Of classifiers, with :math:`p_i` the probabilities of example i and :math:`y_i` its given label:

- accuracy, the share whose likeliest class is the given label;
- AUROC, of two classes: how often an example of the second has the higher probability of it;
- Brier score, the mean of :math:`\sum_k (p_{ik} - [y_i = k])^2`, of two classes half of that;
- calibration error, the mean distance of confidence and accuracy over bins of equal width.

Of regressions :math:`R^2` and the root of the mean square error, both of the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engram.likelihoods import Likelihood

BINS = 15  # of confidence: more are finer, and noisier by their fewer examples

Metric = Callable[[Tensor, Tensor, Tensor], float]


def accuracy(probabilities: Tensor, labels: Tensor, counts: Tensor) -> float:
    """The share of examples whose likeliest class is the given one.

    Args:
        probabilities: of the classes, [N, C].
        labels: given classes, [N].
        counts: how many examples each row stands for, [N].
    """
    return _mean((probabilities.argmax(1) == labels).double(), counts)


def auroc(probabilities: Tensor, labels: Tensor, counts: Tensor) -> float:
    """How often an example of class 1 has a higher probability of it than one of class 0.

    Equal ones count half; NaN where one of the two has no example. Arguments as for
    :func:`accuracy`, with C = 2.

    Example:
        >>> share = torch.tensor([0.1, 0.4, 0.35, 0.8])
        >>> auroc(torch.stack([1 - share, share], 1), torch.tensor([0, 0, 1, 1]), torch.ones(4))
        0.75
    """
    if bool(probabilities.isnan().any()):
        return math.nan
    _, place = probabilities[:, 1].unique(return_inverse=True)
    weights, size = counts.double(), int(place.max()) + 1
    ones = torch.bincount(place, weights * (labels == 1), size)
    zeros = torch.bincount(place, weights * (labels == 0), size)
    pairs = float(ones.sum() * zeros.sum())
    below = zeros.cumsum(0) - zeros / 2
    return float((ones * below).sum()) / pairs if pairs > 0 else math.nan


def brier_score(probabilities: Tensor, labels: Tensor, counts: Tensor) -> float:
    """Mean square of the probabilities' errors, summed over classes; of two classes half of it."""
    hot = torch.nn.functional.one_hot(labels, probabilities.shape[1])
    squares = (probabilities.double() - hot).square().sum(1)
    return _mean(squares, counts) / (2 if probabilities.shape[1] == 2 else 1)


def calibration_bins(
    probabilities: Tensor, labels: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Examples in bins of confidence of equal width: how sure, and how often right.

    Returns:
        Of each of the ``BINS``: its examples, the sum of their confidence, and how many of them
        are right. Arguments as for :func:`accuracy`.

    Example:
        >>> share = torch.tensor([[0.9, 0.1], [0.8, 0.2]])
        >>> size, sure, right = calibration_bins(share, torch.tensor([0, 1]), torch.ones(2))
        >>> float(size.sum()), float(right.sum())
        (2.0, 1.0)
    """
    confidence, predicted = probabilities.double().max(1)
    place = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
    weights = counts.double()
    sums = (weights, weights * confidence, weights * (predicted == labels))
    size, sure, right = (torch.bincount(place, column, BINS) for column in sums)
    return size, sure, right


def calibration_error(probabilities: Tensor, labels: Tensor, counts: Tensor) -> float:
    """Mean of |accuracy - confidence| over bins of confidence, each by its share of examples."""
    if bool(probabilities.isnan().any()):
        return math.nan
    size, sure, right = calibration_bins(probabilities, labels, counts)
    return float((right - sure).abs().sum() / size.sum())


def r_squared(predicted: Tensor, observed: Tensor, counts: Tensor) -> float:
    """1 minus the square error over that of the targets' mean, averaged over outputs [N, K]."""
    weights = counts.double()[:, None]
    centre = (weights * observed).sum(0) / weights.sum()
    left = (weights * (observed - predicted).square()).sum(0)
    return float((1 - left / (weights * (observed - centre).square()).sum(0)).mean())


def root_mean_square_error(predicted: Tensor, observed: Tensor, counts: Tensor) -> float:
    """Over examples and outputs."""
    return math.sqrt(_mean((observed - predicted).square().mean(1), counts))


def _mean(column: Tensor, counts: Tensor) -> float:
    weights = counts.double()
    return float((weights * column).sum() / weights.sum())


CLASSIFIER: dict[str, Metric] = {
    "accuracy": accuracy,
    "brier_score": brier_score,
    "calibration_error": calibration_error,
}
TWO_CLASSES: dict[str, Metric] = {"auroc": auroc}
REGRESSION: dict[str, Metric] = {"r_squared": r_squared, "rmse": root_mean_square_error}


def classes_of(means: Tensor) -> Tensor:
    """Probabilities of all classes [N, C] from a classifier's means; of one output, of its two."""
    return torch.cat([1 - means, means], 1) if means.shape[1] == 1 else means


def compared(
    likelihood: Likelihood,
    outputs: Tensor,
    targets: Tensor,
    predictions: Sequence[Tensor],
    counts: Tensor,
) -> dict[str, tuple[float, ...]]:
    """Every metric that the likelihood has, of each of some predictions for the same targets.

    Args:
        likelihood: says whether targets name classes, are numbers, or can be compared with nothing.
        outputs: of the model, [N, K].
        targets: as the data gives them.
        predictions: means [N, K].
        counts: how many examples each row stands for, [N].
    """
    chosen, given = REGRESSION, likelihood.labels(outputs, targets)
    if given is not None:
        predictions = [classes_of(means) for means in predictions]
        chosen = CLASSIFIER | (TWO_CLASSES if predictions[0].shape[1] == 2 else {})
    else:
        given = likelihood.observed(outputs, targets)
    if given is None:
        return {}
    some = counts > 0
    return {
        name: tuple(metric(p[some], given[some], counts[some]) for p in predictions)
        for name, metric in chosen.items()
    }
