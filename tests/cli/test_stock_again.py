"""``engram verify`` and ``engram certify`` of an audit whose model was trained for its user."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

import engram
from command_line import call
from engram.auditing.trained_again import trained_again


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    place = tmp_path_factory.mktemp("stock")
    generator = np.random.default_rng(0)
    x = np.concatenate([generator.normal(m, 1, (40, 2)) for m in (-1, 1)])
    labels = np.array(["left"] * 40 + ["right"] * 40)
    pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "side": labels}).to_csv(place / "data.csv")
    found = call("audit", place / "data.csv", place / "run", "--label", "side", "--epochs", "5")
    assert found.exit_code == 0, found.output
    return place


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    place = tmp_path_factory.mktemp("stock")
    generator = np.random.default_rng(0)
    images = generator.integers(0, 100, (60, 12, 12), dtype=np.uint8)
    labels = np.arange(60) % 2
    images[labels == 1, 3:6] += 120
    np.savez(place / "data.npz", x=images, y=labels)
    found = call("audit", place / "data.npz", place / "run", "--epochs", "2", "--minimal")
    assert found.exit_code == 0, found.output
    return place


def test_the_training_comes_out_as_it_did(table, pictures):
    for place in (table, pictures):
        model, data, _ = trained_again(place / "run", progress=False)
        run = engram.load(place / "run")
        for name, weight in model.state_dict().items():
            torch.testing.assert_close(weight, run.weights[name])
        assert len(data[0]) == len(run.result.loss)


def test_verified_without_a_line_of_code(table):
    found = call("verify", table / "run", "--sample", "4", "--json", "--quiet")
    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout)
    assert set(told) >= {"score", "increase", "sentence"}
    assert (table / "run" / "verification").is_dir()


def test_certified_without_a_line_of_code(table):
    found = call("certify", table / "run", "--refits", "8", "--json", "--quiet")
    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout)
    assert told["low"] <= told["loo_loss"] <= told["high"]


def test_pictures_are_trained_from_the_start_with_views(pictures):
    found = call("verify", pictures / "run", "--sample", "3", "--json", "--quiet")
    assert found.exit_code == 0, found.output


def test_a_model_without_its_data(table):
    found = call("verify", table / "run", "--model", "nets:make")
    assert found.exit_code != 0
    assert "--data missing" in found.output.replace("\n", " ")


def test_data_that_are_others_now(table):
    frame = pd.read_csv(table / "data.csv", index_col=0)
    frame.iloc[:50].to_csv(table / "data.csv")
    found = call("verify", table / "run", "--sample", "4")
    frame.to_csv(table / "data.csv")
    assert found.exit_code != 0
    assert "put the data back" in " ".join(found.output.split())


def test_an_audit_of_data_in_memory_has_nothing_to_read_again(tmp_path):
    x = np.random.default_rng(0).normal(size=(40, 2))
    engram.audit(
        (x, (x[:, 0] > 0).astype(int)), tmp_path / "run", epochs=2, minimal=True, progress=False
    )
    found = call("verify", tmp_path / "run", "--sample", "4")
    assert found.exit_code != 0
    assert "in memory" in found.output
    assert "in Python: engram.verify" in " ".join(found.output.split())


def test_a_training_that_comes_out_otherwise_is_not_what_was_audited(table, monkeypatch):
    monkeypatch.setattr("engram.auditing.trained_again.SAME", -1.0)
    found = call("certify", table / "run", "--refits", "8")
    assert found.exit_code != 0
    assert "ends with the loss of the run" in " ".join(found.output.split())
