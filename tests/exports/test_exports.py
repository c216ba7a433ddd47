"""Results and audits in other tools, each the real one where it is installed."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import engram
from engram import exports
from engram.errors import ArgumentError


def result(regression=False):
    torch.manual_seed(0)
    x = torch.randn(12, 3)
    y = x.sum(1, keepdim=True) if regression else torch.arange(12) % 3
    model = nn.Linear(3, 1 if regression else 3)
    likelihood = "gaussian" if regression else "categorical"
    posterior = engram.laplace(model, (x, y), likelihood=likelihood, prior_precision=1.0)
    return engram.sensitivities(model, (x, y), posterior)


@pytest.fixture(scope="module")
def audit():
    generator = np.random.default_rng(0)
    x = np.concatenate([generator.normal(m, 1, (20, 2)) for m in (-3, 3)])
    labels = ["<b>left|"] * 20 + ["right"] * 20
    return engram.audit((x, labels), epochs=2, minimal=True, progress=False)


def test_fields_of_a_classifier_and_a_regression():
    found = result()
    frame = exports.fields(found)
    assert frame["label_score"].iloc[4] == pytest.approx(float(found.loo_probabilities[4, 1]))
    assert frame["given_label"].tolist() == (np.arange(12) % 3).tolist()
    assert list(exports.fields(result(True)).columns) == ["score", "loss", "loo_loss", "trust"]


def test_fields_of_an_audit_are_its_issues(audit):
    assert exports.fields(audit) is audit.issues


def test_what_is_neither_is_refused():
    with pytest.raises(ArgumentError, match="an audit or a result; got 3"):
        exports.fields(3)


def test_spotlight_gets_the_users_table_with_ours_beside_it():
    data = pd.DataFrame({"file": [f"{n}.png" for n in range(12)]}, index=range(5, 17))
    found = result()
    frame = exports.to_spotlight(found, data)
    assert list(frame.columns[:2]) == ["file", "engram_given_label"]
    assert frame["engram_loo_loss"].to_numpy() == pytest.approx(found.loo_loss.numpy())
    assert exports.to_spotlight(found).columns[0] == "engram_given_label"
    with pytest.raises(ArgumentError, match="a table with the 12 examples"):
        exports.to_spotlight(found, data.head(3))


def test_spotlight_takes_the_table(audit):
    spotlight = pytest.importorskip("renumics.spotlight")
    viewer = spotlight.show(exports.to_spotlight(audit), no_browser=True, wait=False)
    viewer.close()


def test_fiftyone_gets_fields(audit):
    fiftyone = pytest.importorskip("fiftyone")
    try:
        dataset = fiftyone.Dataset()
    except fiftyone.core.config.FiftyOneConfigError as error:
        pytest.skip(f"FiftyOne without its database: {error}")
    dataset.add_samples([fiftyone.Sample(filepath=f"{n}.png") for n in range(40)])
    names = exports.to_fiftyone(audit, dataset)
    assert "engram_loo_loss" in names
    assert dataset.values("engram_loo_loss") == pytest.approx(audit.issues["loo_loss"].tolist())
    dataset.delete()


def test_fiftyone_of_other_length_is_refused():
    with pytest.raises(ArgumentError, match=r"a dataset with the 12 examples.*; got 3"):
        exports.to_fiftyone(result(), [1, 2, 3])


def test_tensorboard_has_numbers_and_a_table(audit, tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        exports.to_tensorboard(audit, writer, step=3, top=5)
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    (scalar,) = events.Scalars("engram/loo_loss")
    assert scalar.step == 3
    assert scalar.value == pytest.approx(audit.result.loo_nll, rel=1e-5)
    assert "engram/loo_accuracy" in events.Tags()["scalars"]
    (text,) = events.Tensors("engram/examples/text_summary")
    content = text.tensor_proto.string_val[0].decode()
    assert content.count("\n") == 6
    assert "<b>" not in content
    assert "&#60;b&#62;left&#124;" in content


def test_wandb_offline(audit, tmp_path):
    wandb = pytest.importorskip("wandb")
    run = wandb.init(mode="offline", dir=str(tmp_path), project="engram")
    try:
        exports.to_wandb(audit, run, top=7)
        assert run.summary["engram/loo_loss"] == pytest.approx(audit.result.loo_nll)
    finally:
        run.finish()
    assert list(tmp_path.rglob("*.table.json"))
