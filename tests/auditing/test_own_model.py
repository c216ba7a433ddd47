"""The user's own model, weights and training; what is wrong with them is said."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import engram
from auditing_tables import blobs
from engram.errors import ArgumentError, ModelMismatchError, StorageError


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def one_logit(examples):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def train(model, data):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    training = engram.record(optimizer, model)
    for _ in range(60):
        optimizer.zero_grad()
        outputs = model(data[0])
        nn.functional.cross_entropy(outputs, data[1]).backward()
        optimizer.step()
    return training


@pytest.fixture
def module(tmp_path, monkeypatch):
    text = (
        "import torch\nfrom torch import nn\n"
        "def make():\n    return nn.Linear(3, 2)\n"
        "def broken():\n    raise RuntimeError('my own mistake')\n"
        "def number():\n    return 3\n"
        "def three():\n    return nn.Linear(3, 3)\n"
    )
    (tmp_path / "my_audited_net.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    return "my_audited_net"


def test_a_function_that_is_named_makes_the_model(module):
    frame, _ = blobs(60)
    found = engram.audit(frame, model=f"{module}:make", epochs=3, progress=False)
    assert found.facts["model"] == "Linear"


def test_a_function_that_fails_shows_its_own_traceback(module):
    frame, _ = blobs(60)
    with pytest.raises(RuntimeError, match="my own mistake"):
        engram.audit(frame, model=f"{module}:broken", progress=False)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("my_audited_net", r'named as "package\.module:function"'),
        ("my_audited_net:nothing", "a function 'nothing' in my_audited_net"),
        ("no_such_module:make", "a module 'no_such_module' that can be imported"),
        ("my_audited_net:number", r"a torch\.nn\.Module from my_audited_net:number"),
    ],
)
def test_what_is_no_model_is_refused(module, name, words):
    frame, _ = blobs(60)
    with pytest.raises(ArgumentError, match=words):
        engram.audit(frame, model=name, progress=False)


def test_a_model_of_other_classes_is_refused(module):
    frame, _ = blobs(60)
    with pytest.raises(ModelMismatchError, match="2 outputs, as the labels have it; got 3"):
        engram.audit(frame, model=f"{module}:three", progress=False)


def test_weights_are_loaded_and_not_trained(tmp_path):
    frame, wrong = blobs(120)
    model = make()
    plain = engram.audit(frame, model=lambda: model, train=train, progress=False)
    save_file(model.state_dict(), tmp_path / "net.safetensors")
    torch.save(model.state_dict(), tmp_path / "net.pt")
    for name in ("net.safetensors", "net.pt"):
        found = engram.audit(frame, model=make, weights=tmp_path / name, progress=False)
        assert np.allclose(found.result.outputs, plain.result.outputs)
        assert set(found.issues["loo_loss"].nlargest(3).index) == set(wrong)


def test_wrong_weights_are_refused(tmp_path):
    frame, _ = blobs(60)
    save_file(nn.Linear(5, 5).state_dict(), tmp_path / "other.safetensors")
    with pytest.raises(ModelMismatchError, match="weights of Sequential"):
        engram.audit(frame, model=make, weights=tmp_path / "other.safetensors", progress=False)
    torch.save(make(), tmp_path / "whole.pt")
    with pytest.raises(StorageError, match="weights alone"):
        engram.audit(frame, model=make, weights=tmp_path / "whole.pt", progress=False)
    with pytest.raises(StorageError, match="which is not there"):
        engram.audit(frame, model=make, weights=tmp_path / "none.pt", progress=False)
    with pytest.raises(ArgumentError, match="model= with weights="):
        engram.audit(frame, weights=tmp_path / "none.pt", progress=False)


def test_one_logit_is_two_classes():
    frame, _ = blobs(60)
    found = engram.audit(frame, model=one_logit, epochs=5, progress=False)
    assert found.loo_probabilities.shape == (60, 2)


def test_a_training_of_ones_own_is_used_with_its_record():
    frame, wrong = blobs(120)
    found = engram.audit(frame, model=make, train=train, progress=False)
    assert found.result.basis.estimator == "trajectory"
    assert set(found.issues["label_score"].nsmallest(3).index) == set(wrong)
    with pytest.raises(ArgumentError, match=r"the record of engram\.record, the optimizer or"):
        engram.audit(frame, model=make, train=lambda model, data: "done", progress=False)
