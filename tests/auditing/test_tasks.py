"""Several labels at once, numbers, images and texts, from data to a folder and back."""

import numpy as np
import pandas as pd
import pytest
import torch

import engram


def test_several_labels_at_once(tmp_path):
    generator = np.random.default_rng(0)
    x = generator.normal(0, 1, (200, 3))
    frame = pd.DataFrame(x, columns=["a", "b", "c"])
    frame["sun"], frame["sea"] = (x[:, 0] > 0).astype(int), (x[:, 1] > 0).astype(int)
    found = engram.audit(frame, tmp_path / "run", label=["sun", "sea"], epochs=20, progress=False)
    assert found.shown.task.name == "multi-label"
    assert set(found.issues["given_label"]) == {"none", "sun", "sea", "sun, sea"}
    assert engram.load(tmp_path / "run").issues.equals(found.issues)


def test_numbers(tmp_path):
    generator = np.random.default_rng(0)
    x = generator.normal(0, 1, (200, 3))
    price = 100 + 20 * x[:, 0] + generator.normal(0, 1, 200)
    price[17] += 200
    frame = pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "price": price})
    found = engram.audit(frame, tmp_path / "run", label="price", epochs=30, progress=False)
    assert found.shown.task.name == "regression"
    assert found.issues["label_score"].idxmin() == 17
    assert found.issues["is_label_issue"][17]
    assert abs(found.issues["given_label"][17] - price[17]) < 0.01
    page = found.page_data()
    assert np.allclose(page.examples.given, price, atol=0.01)
    error = np.abs(page.examples.predicted - price)
    assert np.allclose(page.examples.prediction_error, error, atol=0.05)
    assert page.metrics["rmse"][0] > 2  # of prices, whose standard deviation is 20
    assert np.allclose(found.issues["score"], price.std() * found.result.score, rtol=1e-4)
    assert engram.load(tmp_path / "run").issues.equals(found.issues)


def test_images(tmp_path):
    generator = np.random.default_rng(0)
    y = np.arange(60) % 2
    images = (100 * y[:, None, None] + generator.integers(0, 80, (60, 9, 9))).astype(np.uint8)
    y[7] = 1 - y[7]
    np.savez(tmp_path / "data.npz", images=images, labels=y)
    found = engram.audit(tmp_path / "data.npz", tmp_path / "run", epochs=8, progress=False)
    assert found.issues["label_score"].idxmin() == 7
    again = engram.load(tmp_path / "run")
    assert np.array_equal(again.shown.thumbnails, found.shown.thumbnails)
    assert again.shown.thumbnails.shape == (60, 9, 9, 1)


def test_texts():
    lines = ["good film", "fine film", "good music", "bad film", "poor film", "bad music"] * 10
    labels = ["up", "up", "up", "down", "down", "down"] * 10
    found = engram.audit((lines, labels), epochs=20, progress=False)
    assert found.shown.texts == tuple(lines)
    assert found.result.metrics().loc["accuracy", "training"] == 1
    assert found.findings.num_duplicates == 60
    assert found.issues["duplicate_of"][0] in range(6, 60, 6)


def test_test_data_say_what_groups_do():
    generator = np.random.default_rng(0)
    x = generator.normal(0, 1, (300, 2))
    frame = pd.DataFrame(x, columns=["a", "b"])
    frame["label"] = (x[:, 0] > 0).astype(int)
    frame["who"] = np.where(np.arange(300) % 5 == 0, "bad", "good")
    frame.loc[frame["who"] == "bad", "label"] = 1 - frame["label"]
    test = frame.assign(label=(x[:, 0] > 0).astype(int))
    found = engram.audit(frame, group_by="who", test=test, epochs=15, progress=False)
    assert found.test["accuracy"] > 0.8
    assert found.groups.loc["bad", "harm"] > 0
    assert found.groups.loc["bad", "hurts"]
    assert not found.groups.loc["good", "hurts"]
    with pytest.raises(engram.EngramError, match="test data like the training data"):
        engram.audit(frame, test=(["a", "b"], [0, 1]), progress=False)


def test_probabilities_drop_into_cleanlab():
    rank = pytest.importorskip("cleanlab.rank")
    generator = np.random.default_rng(0)
    x = np.concatenate([generator.normal(m, 1, (60, 2)) for m in (-3, 3)])
    y = np.repeat([0, 1], 60)
    y[7] = 1
    found = engram.audit((x, y), epochs=10, progress=False)
    scores = rank.get_label_quality_scores(y, found.loo_probabilities.numpy())
    assert int(np.argmin(scores)) == 7
    assert torch.allclose(found.loo_probabilities.sum(1), torch.ones(120), atol=1e-5)
