"""Metrics under leave-one-out and suspect labels, against hand computations and scikit-learn's."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest
import torch
from sklearn import metrics as sk
from torch import Tensor, nn

import engram
from engram.errors import ArgumentError, LikelihoodError
from engram.likelihoods import Bernoulli, Categorical, Gaussian, SampleWeighted, from_loss
from engram.sensitivity import metrics
from refusal import Refusal

QUIET = {"progress": False}
ONES = torch.ones(200)


def drawn(classes: int) -> tuple[Tensor, Tensor]:
    """Probabilities and labels that agree with them."""
    generator = torch.Generator().manual_seed(0)
    probabilities = (2 * torch.randn(200, classes, generator=generator).double()).softmax(1)
    return probabilities, torch.multinomial(probabilities, 1, generator=generator)[:, 0]


@pytest.mark.parametrize("classes", [2, 5])
def test_of_classes(classes: int) -> None:
    p, y = drawn(classes)
    hot = torch.nn.functional.one_hot(y, classes)
    brier = float((p - hot).square().sum(1).mean()) / (2 if classes == 2 else 1)
    assert metrics.accuracy(p, y, ONES) == pytest.approx(sk.accuracy_score(y, p.argmax(1)))
    assert metrics.brier_score(p, y, ONES) == pytest.approx(brier)
    if classes == 2:
        assert brier == pytest.approx(sk.brier_score_loss(y, p[:, 1]))
        assert metrics.auroc(p, y, ONES) == pytest.approx(sk.roc_auc_score(y, p[:, 1]))


def test_calibration_error_by_hand() -> None:
    """Two bins: confidence 0.9 and 0.6, accuracy 3/4 and 1/2."""
    first = torch.tensor([0.9, 0.9, 0.9, 0.9, 0.6, 0.6]).double()
    p, y = torch.stack([first, 1 - first], 1), torch.tensor([0, 0, 0, 1, 0, 1])
    expected = (4 * abs(0.75 - 0.9) + 2 * abs(0.5 - 0.6)) / 6
    assert metrics.calibration_error(p, y, torch.ones(6)) == pytest.approx(expected)


def test_calibration_error_against_a_loop() -> None:
    p, y = drawn(5)
    total = 0.0
    for low in range(metrics.BINS):
        confidence = p.max(1).values
        chosen = (confidence > low / metrics.BINS) & (confidence <= (low + 1) / metrics.BINS)
        if chosen.any():
            right = (p.argmax(1) == y)[chosen].double().mean()
            total += float(chosen.sum() * (right - confidence[chosen].mean()).abs()) / len(y)
    assert metrics.calibration_error(p, y, ONES) == pytest.approx(total)


def test_ties_and_single_classes_of_the_auroc() -> None:
    half = torch.full((4, 2), 0.5)
    assert metrics.auroc(half, torch.tensor([0, 1, 0, 1]), torch.ones(4)) == 0.5
    assert math.isnan(metrics.auroc(half, torch.ones(4).long(), torch.ones(4)))


def test_counts_are_repeated_rows() -> None:
    p, y = drawn(2)
    counts = torch.arange(200) % 3
    rows = torch.arange(200).repeat_interleave(counts)
    ones = torch.ones(len(rows))
    for metric in (*metrics.CLASSIFIER.values(), metrics.auroc):
        assert metric(p, y, counts) == pytest.approx(metric(p[rows], y[rows], ones))


def test_of_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(200, 2, generator=generator).double()
    p = y + 0.4 * torch.randn(200, 2, generator=generator).double()
    assert metrics.r_squared(p, y, ONES) == pytest.approx(sk.r2_score(y, p))
    found = metrics.root_mean_square_error(p, y, ONES)
    assert found == pytest.approx(math.sqrt(sk.mean_squared_error(y, p)))


X = torch.randn(60, 4, generator=torch.Generator().manual_seed(1)).double()
Y = (X[:, 0] + 0.5 * X[:, 1] > 0).long()
WRONG = (X[:, 0] + 0.5 * X[:, 1]).abs().argsort(descending=True)[:3].tolist()  # none at the edge
Y[WRONG] = 1 - Y[WRONG]


def result_of(outputs: int, likelihood: object, targets: Tensor) -> engram.Result:
    torch.manual_seed(0)
    model = nn.Linear(4, outputs).double()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=200)

    def closure() -> Tensor:
        optimizer.zero_grad()
        prepared = likelihood.prepare(model(X), targets)  # type: ignore[attr-defined]
        loss = likelihood.loss(model(X), prepared).sum()  # type: ignore[attr-defined]
        loss = loss + sum(p.square().sum() for p in model.parameters()) / 2
        loss.backward()
        return loss

    optimizer.step(closure)
    posterior = engram.laplace(
        model,
        (X, targets),
        likelihood=likelihood,  # type: ignore[arg-type]
        prior_precision=1.0,
        **QUIET,  # type: ignore[arg-type]
    )
    return engram.sensitivities(model, (X, targets), posterior, **QUIET)  # type: ignore[arg-type]


def test_left_out_probabilities_are_those_of_the_moved_outputs() -> None:
    result = result_of(2, Categorical(), Y)
    expected = (result.outputs + result.deviation).softmax(1)
    torch.testing.assert_close(result.loo_probabilities, expected)
    torch.testing.assert_close(expected.sum(1), torch.ones(60).double())
    own = -result.loo_probabilities.gather(1, Y[:, None])[:, 0].log()
    torch.testing.assert_close(own, result.loo_loss)


def test_one_logit_has_two_classes() -> None:
    result = result_of(1, Bernoulli(), Y.double())
    share = (result.outputs + result.deviation).sigmoid()
    torch.testing.assert_close(result.loo_probabilities, torch.cat([1 - share, share], 1))
    assert torch.equal(result.labels, Y)


def test_metrics_of_a_classifier_beside_each_other() -> None:
    result = result_of(1, Bernoulli(), Y.double())
    frame = result.metrics()
    left_out = result.loo_probabilities
    assert frame.loc["loss"].tolist() == [result.train_nll, result.loo_nll]
    expected = sk.accuracy_score(Y, left_out.argmax(1))
    assert frame.loc["accuracy", "leave_one_out"] == pytest.approx(expected)
    expected = sk.roc_auc_score(Y, left_out[:, 1])
    assert frame.loc["auroc", "leave_one_out"] == pytest.approx(expected)
    share = result.outputs.sigmoid()[:, 0]
    assert frame.loc["auroc", "training"] == pytest.approx(sk.roc_auc_score(Y, share))
    expected = sk.brier_score_loss(Y, left_out[:, 1])
    assert frame.loc["brier_score", "leave_one_out"] == pytest.approx(expected)
    assert frame.loc["brier_score", "training"] < frame.loc["brier_score", "leave_one_out"]


def test_metrics_of_a_regression_are_those_of_refits() -> None:
    """Linear regression: leaving out is exact, so R2 and RMSE are those of 60 refits."""
    y = X[:, :1] - 0.4 * X[:, 1:2] ** 2
    frame = result_of(1, Gaussian(), y).metrics()
    design = torch.cat([X, torch.ones(60, 1).double()], 1)
    left_out = []
    for i in range(60):
        kept = torch.arange(60) != i
        matrix = design[kept].T @ design[kept] + torch.eye(5).double()
        left_out.append(design[i] @ torch.linalg.solve(matrix, design[kept].T @ y[kept]))
    moved = torch.stack(left_out)
    assert list(frame.index) == ["loss", "r_squared", "rmse"]
    assert frame.loc["r_squared", "leave_one_out"] == pytest.approx(sk.r2_score(y, moved), rel=1e-4)
    expected = math.sqrt(sk.mean_squared_error(y, moved))
    assert frame.loc["rmse", "leave_one_out"] == pytest.approx(expected, rel=1e-4)


def test_weighted_targets_are_taken_apart() -> None:
    weights = torch.linspace(0.5, 2, 60).double()
    result = result_of(2, SampleWeighted(), torch.stack([Y.double(), weights], 1))
    assert torch.equal(result.labels, Y)
    assert 0.5 < result.metrics().loc["accuracy", "leave_one_out"] < 1
    y = torch.cat([X[:, :1], weights[:, None]], 1)
    assert result_of(1, SampleWeighted(Gaussian()), y).metrics().loc["rmse", "training"] < 0.1


def test_label_issues_put_wrong_labels_first() -> None:
    result = result_of(2, Categorical(), Y)
    frame = engram.label_issues(result)
    assert len(frame) == 60
    assert set(frame.index[:3]) == set(WRONG)
    assert frame["loo_loss"].is_monotonic_decreasing
    assert frame.loc[WRONG, "contradicted"].all()
    first = frame.iloc[0]
    index = int(frame.index[0])
    assert first["given"] == int(Y[index])
    assert first["predicted"] == 1 - int(Y[index])
    assert first["loo_probability"] == pytest.approx(math.exp(-float(result.loo_loss[index])))
    pd.testing.assert_frame_equal(engram.label_issues(result, count=5), frame.head(5))
    assert list(result.top(60, by="loo_loss").index) == list(frame.index)


def test_a_saved_result_has_them_too(tmp_path: Path) -> None:
    result = result_of(2, Categorical(label_smoothing=0.1), Y)
    loaded = engram.load(result.save(tmp_path))
    pd.testing.assert_frame_equal(loaded.metrics(), result.metrics())
    pd.testing.assert_frame_equal(engram.label_issues(loaded), engram.label_issues(result))


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def test_of_a_loss_of_ones_own() -> None:
    with_mean = from_loss(cross_entropy, mean=lambda f: f.softmax(1))
    pd.testing.assert_frame_equal(
        engram.label_issues(result_of(2, with_mean, Y)),
        engram.label_issues(result_of(2, Categorical(), Y)),
    )
    without = result_of(2, from_loss(cross_entropy), Y)
    assert list(without.metrics().index) == ["loss"]
    with Refusal(LikelihoodError, "a classifier", "mean= to from_loss"):
        engram.label_issues(without)


def test_no_labels() -> None:
    result = result_of(1, Gaussian(), X[:, :1])
    for ask in (lambda: engram.label_issues(result), lambda: result.loo_probabilities):
        with Refusal(LikelihoodError, "a classifier", "gaussian", "result.metrics()"):
            ask()
    with pytest.raises(ArgumentError, match="a result of"):
        engram.label_issues(X)  # type: ignore[arg-type]


def test_pages_rank_by_the_question(tmp_path: Path) -> None:
    result = result_of(2, Categorical(), Y)
    page = result.report(tmp_path / "page.html", top=3).read_text()
    assert page.count("contradicted label") > 1
    assert "calibration error" in page
    page = result_of(1, Gaussian(), X[:, :1]).report(tmp_path / "page.html", top=3).read_text()
    assert "r squared" in page
    assert page.count("contradicted label") == 1  # in the script, which knows the word
