"""How many of the labels that are called wrong are wrong: an interval that has the number."""

import math

import numpy as np
import pytest
import torch

from engram.auditing.called import Called
from engram.auditing.label_noise import label_noise


def test_half_a_right_label_is_taken_for_seen():
    found = Called.by(torch.ones(14))
    assert found.share == pytest.approx(7 / 7.5, abs=1e-4)
    assert found.high == 14
    assert found.low < 14


def test_few_labels_tell_little_and_none_nothing():
    widths = [Called.by(torch.full((n,), 0.8)) for n in (10, 100, 10_000)]
    relative = [(one.high - one.low) / one.count for one in widths]
    assert relative[0] > relative[1] > relative[2] > 0.15  # what is fitted is never known better
    nothing = Called.by(torch.empty(0))
    assert (nothing.count, nothing.low, nothing.high) == (0, 0, 0)
    assert math.isnan(nothing.share)


def test_the_interval_has_the_number_over_many_seeds():
    from sklearn.datasets import load_breast_cancer
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import cross_val_predict
    from sklearn.preprocessing import StandardScaler

    inputs, right = load_breast_cancer(return_X_y=True)
    inputs = StandardScaler().fit_transform(inputs)
    within, sure = [], []
    for seed in range(20):
        wrong = np.random.default_rng(seed).random(len(right)) < 0.075
        given = np.where(wrong, 1 - right, right)
        model = LogisticRegression(C=0.1)
        p = cross_val_predict(model, inputs, given, method="predict_proba")
        noise = label_noise(torch.from_numpy(p), torch.from_numpy(given))
        found, true = noise.called, int(wrong[noise.is_issue.numpy()].sum())
        within.append(found.low <= true <= found.high)
        sure.append(found.share)
    assert np.mean(within) >= 0.8
    assert max(sure) < 0.985
