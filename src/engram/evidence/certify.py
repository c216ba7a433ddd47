"""The leave-one-out loss with a confidence interval, from the estimate and some refits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from engram.core.arguments import AUTO, MANY, seed_number, whole
from engram.core.data.batches import Batches, Data
from engram.core.parameters import check_module, uncompiled
from engram.errors import ArgumentError
from engram.evidence.certificate import Certificate
from engram.evidence.correlation import Interval
from engram.evidence.difference import Draws, Estimated, corrected_mean, drawn
from engram.evidence.matching import check_outputs
from engram.evidence.ways import Request, chosen_way, truth_of, way_of
from engram.retraining.result import Retraining
from engram.retraining.retrain import FEWEST_REFITS, Train
from engram.sensitivity.metrics import classes_of
from engram.sensitivity.result import Result, check_result

FEWEST_A_STRATUM = 2  # draws, below which their spread is not known


def certify(
    model: nn.Module,
    data: Data,
    result: Result,
    *,
    train: Train = AUTO,
    refits: int = 32,
    strata: int = 4,
    folder: str | Path | None = None,
    trust_folder: bool = False,
    seed: int = 0,
    progress: bool = True,
) -> Certificate:
    r"""The mean leave-one-out loss, and accuracy, with an interval that refits answer for.

    .. math:: \frac{1}{N} \sum_i \hat\ell_i +
        \frac{1}{m} \sum_k \frac{\ell_k^{\setminus k} - \hat\ell_k}{N p_k}

    The estimate of all N leave-one-out losses is corrected by what it is off by on m examples that
    are really left out. They are drawn with a probability p in proportion to their estimated loss,
    plus a floor. Right on average however wrong the estimate is, and narrow where that is good.

    Args:
        model: the one that the result is about; it is not changed.
        data: its training data.
        result: from :func:`engram.sensitivities`.
        train: how to train again. ``"auto"`` is the recipe ``newton`` for a model at a minimum. For
            others pass the record of their training, of ``engram.record(..., replay=True)``, or
            ``engram.recipes.FromStart(fit, Net)``; see :func:`engram.retrain` for all.
        refits: m, draws; one that comes twice is trained once. There is a training with nothing
            left out besides, or two.
        strata: parts of equal total size that the examples are divided into and drawn from.
        folder, trust_folder, seed, progress: as in :func:`engram.retrain`. With a function all
            trainings have one seed, with and without an example, so that seeds make no difference
            between them; the interval is about trainings with that seed.

    Returns:
        ``loo_nll``, ``interval`` (low, high) and ``accuracy``; the refits in ``truth``; ``way``.

    Example:
        >>> from engram import laplace, sensitivities
        >>> _ = torch.manual_seed(0)
        >>> x, model = torch.randn(50, 3).double(), nn.Linear(3, 1, bias=False).double()
        >>> data = (x, x.sum(1, keepdim=True) + torch.randn(50, 1).double())
        >>> solution = torch.linalg.solve(x.T @ x + torch.eye(3).double(), x.T @ data[1])
        >>> _ = model.weight.data.copy_(solution.T)
        >>> posterior = laplace(model, data, likelihood="gaussian", prior_precision=1.0)
        >>> rough = sensitivities(model, data, posterior, estimator="linear")
        >>> exact = sensitivities(model, data, posterior, estimator="corrected")
        >>> found = certify(model, data, rough, refits=16)
        >>> found.interval[0] < exact.loo_nll < found.interval[1]
        True
    """
    check_result(result)
    check_module(model)
    batches, seed = Batches(data, 1), seed_number(seed)
    result.check_data(batches.num_data)
    _check_counts(refits, strata)
    train = chosen_way(train, result)
    way = way_of(train)
    check_outputs(result, uncompiled(model), batches)
    chosen, draws = drawn_from(result, refits, strata, seed)
    request = Request(train, FEWEST_REFITS, folder, trust_folder, seed, progress)
    truth = truth_of(model, data, result, result.indices[chosen], request)
    return certified(result, truth, chosen, draws, way)


def drawn_from(result: Result, refits: int, strata: int, seed: int) -> tuple[Tensor, Draws]:
    """Which rows of a result are retrained, and the draws as positions among them."""
    some = (result.counts > 0).nonzero()[:, 0]  # rows that stand for an example
    guess = _guess(result)[some]
    draws = drawn(guess - guess.min(), result.counts[some], refits, strata, seed)
    chosen, rows = some[draws.positions].unique(return_inverse=True)
    return chosen, replace(draws, positions=rows)


def certified(
    result: Result, truth: Retraining, chosen: Tensor, draws: Draws, way: str
) -> Certificate:
    """The certificate from draws and the truth of the rows that they are among."""
    return Certificate(
        loss=_loss(result, truth, chosen, draws).interval(),
        accuracy=_accuracy(result, truth, chosen, draws),
        estimated_loss=result.loo_nll,
        estimated_accuracy=_estimated_accuracy(result),
        train_loss=result.train_nll,
        refit_train_loss=_mean(result, _refit_loss(result, truth)),
        positions=draws.positions,
        guesses=_guess(result)[chosen],
        weights=draws.weights,
        strata=draws.strata,
        truth=truth,
        way=way,
        num_data=result.num_data,
    )


def _guess(result: Result) -> Tensor:
    """The estimated losses without each example; the training loss where one is lost, [N]."""
    return torch.where(result.loo_loss.isfinite(), result.loo_loss, result.loss).double()


def _loss(result: Result, truth: Retraining, chosen: Tensor, draws: Draws) -> Estimated:
    """The mean loss; what another training changes in every loss is part of the guess."""
    guess = _guess(result) + _refit_loss(result, truth) - result.loss.double()
    errors = truth.loo_loss.double() - guess[chosen]
    return corrected_mean(_mean(result, guess), errors[draws.positions], draws)


def _refit_loss(result: Result, truth: Retraining) -> Tensor:
    """Of the result's examples under the training with nothing left out, [N]."""
    assert truth.refit_loss is not None  # of a run that is just over
    return truth.refit_loss[result.indices].double()


def _mean(result: Result, values: Tensor) -> float:
    """Over examples, a row for as many as it stands for."""
    return float((result.counts * values).sum() / result.counts.sum())


def _hits(result: Result, predictions: Tensor, rows: Tensor) -> Tensor | None:
    """Whether the likeliest class is the label, for predictions of some rows; None if no class."""
    likelihood = result.basis.known_likelihood
    labels = likelihood.labels(result.outputs, result.targets)
    if labels is None:
        return None
    return (classes_of(predictions).argmax(1) == labels[rows]).double()


def _estimated_hits(result: Result) -> Tensor | None:
    means = result.basis.known_likelihood.mean(result.outputs) + result.prediction_deviation
    return _hits(result, means, torch.arange(result.num_data))


def _estimated_accuracy(result: Result) -> float | None:
    hits = _estimated_hits(result)
    return None if hits is None else _mean(result, hits)


def _accuracy(result: Result, truth: Retraining, chosen: Tensor, draws: Draws) -> Interval | None:
    """The accuracy; one more draw in which the two disagree is counted even where all agree."""
    guess = _estimated_hits(result)
    means = result.basis.known_likelihood.mean(truth.outputs + truth.deviation)
    hits = _hits(result, means, chosen)
    if guess is None or hits is None:
        return None
    errors = (hits - guess[chosen])[draws.positions]
    found = corrected_mean(_mean(result, guess), errors, draws, least=1.0).interval()
    return Interval(*(min(max(value, 0.0), 1.0) for value in (found.value, found.low, found.high)))


def _check_counts(refits: int, strata: int) -> None:
    parts = whole("number of strata", strata, 1, MANY, "use strata=4")
    count = whole("number of refits", refits, 1, MANY, "use refits=32")
    if count < FEWEST_A_STRATUM * parts:
        raise ArgumentError(
            f"at least {FEWEST_A_STRATUM} refits for each of {parts:,} strata, "
            f"{FEWEST_A_STRATUM * parts:,} in all",
            f"{count:,}",
            "use more refits, or fewer strata",
        )
