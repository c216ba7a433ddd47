"""Commands on a user's own model, data and training, named as package.module:function."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import save_file

import engram
from command_line import call

MODULE = """
import torch
from torch import nn


def make():
    return nn.Linear(3, 2, bias=False).double()


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=generator, dtype=torch.float64)
    return x, (x[:, 0] + 0.5 * torch.randn(60, generator=generator) > 0).long()


def fit(model, data):
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=200, tolerance_grad=1e-9)

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data[0]), data[1], reduction="sum")
        loss = loss + 0.5 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        return loss

    optimizer.step(closure)


def held(model, data):
    # goes on only while nobody holds it, or little is done
    import pathlib
    import time

    while pathlib.Path("hold").exists() and len(list(pathlib.Path("kept").rglob("*.safe*"))) >= 2:
        pathlib.Path("waiting").touch()
        time.sleep(0.02)
    fit(model, data)


def fails(model, data):
    raise ZeroDivisionError("my batch is empty")


def no_model():
    return 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's module, the weights of its model, and a run with result and posterior."""
    place = tmp_path_factory.mktemp("user")
    (place / "my_nets.py").write_text(MODULE)
    namespace: dict = {}
    exec(MODULE, namespace)
    torch.manual_seed(0)
    model, data = namespace["make"](), namespace["data"]()
    namespace["fit"](model, data)
    save_file(model.state_dict(), place / "net.safetensors")
    torch.save(model.state_dict(), place / "net.pt")
    posterior = engram.laplace(model, data, structure="kronecker", prior_precision=1.0)
    engram.sensitivities(model, data, posterior, estimator="linear").save(place / "run")
    posterior.save(place / "run")
    return place


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "my_nets", raising=False)
    return folder


NET = ("--model", "my_nets:make", "--weights", "net.safetensors", "--data", "my_nets:data")


def test_verify_with_the_users_training(here):
    found = call("verify", "run", *NET, "--train", "my_nets:fit", "--sample", "5", "-q", "--json")
    assert found.exit_code == 0, found.output
    saved = engram.load(here / "run" / "verification")
    assert json.loads(found.stdout)["sentence"] == saved.sentence
    assert len(saved.strata) == 5
    assert sys.path.count(str(here)) == 0


def test_certify_with_a_recipe(here):
    found = call("certify", "run", *NET, "--train", "newton", "--refits", "8", "-q", "--json")
    assert found.exit_code == 0, found.output
    numbers = json.loads(found.stdout)
    assert numbers["low"] < numbers["loo_loss"] < numbers["high"]


def test_refine_with_the_posterior_of_the_run(here):
    found = call("refine", "run", *NET, "-q")
    assert found.exit_code == 0, found.output
    assert engram.load(here / "run" / "refined").num_data == 60


def test_report_writes_the_page(here):
    found = call("report", "run", "-o", "page.html")
    assert found.exit_code == 0, found.output
    assert (here / "page.html").read_text().lstrip().lower().startswith("<!doctype html")


def test_plan_for_programs(here):
    found = call("plan", "--model", "my_nets:make", "--data", "my_nets:data", "--json")
    assert found.exit_code == 0, found.output
    rows = {row["step"]: row for row in json.loads(found.stdout)["steps"]}
    assert rows["fit"]["seconds"] > 0
    assert rows["pass"]["disk"] > 0


def test_score_goes_on_with_the_posterior_that_it_kept(here):
    given = ("score", "scores", *NET, "--part", "25", "--structure", "full", "--json", "-q")
    given = (*given, "--prior-precision", "1")
    found = call(*given)
    assert found.exit_code == 0, found.output
    first = json.loads(found.stdout)
    assert len(first["top"]) == 10
    kept = engram.load(here / "scores" / "posterior")
    assert kept.structure == "full"
    next((here / "scores").glob("part-000001-*")).unlink()
    again = json.loads(call(*given).stdout)
    assert again == first
    assert again["missing"] == []


def test_weights_of_torch_and_of_another_model(here):
    weights = ("--weights", "net.pt")
    found = call("certify", "run", *NET[:2], *weights, *NET[4:], "--refits", "8", "-q")
    assert found.exit_code == 0, found.output
    save_file({"bias": torch.zeros(2)}, here / "other.safetensors")
    found = call("certify", "run", *NET[:2], "--weights", "other.safetensors", *NET[4:])
    assert found.exit_code == 1
    assert "expected weights of Linear" in found.stderr
    (here / "broken.pt").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    found = call("certify", "run", *NET[:2], "--weights", "broken.pt", *NET[4:])
    assert "expected weights alone: safetensors" in found.stderr
    assert not (here / "ran").exists()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("my_nets", 'expected a function named as "package.module:function"'),
        ("my_net:make", "expected a module 'my_net'"),
        ("my_nets:mak", "what to do: did you mean make?"),
        ("my_nets:no_model", "expected a torch.nn.Module from my_nets:no_model"),
    ],
)
def test_names_that_are_wrong(here, model, words):
    found = call("plan", "--model", model, "--data", "my_nets:data")
    assert found.exit_code == 1
    assert words in found.stderr
    assert "Traceback" not in found.stderr


def test_a_training_that_fails_shows_its_own_traceback(here):
    found = call("verify", "run", *NET, "--train", "my_nets:fails", "--folder", "f", "-q")
    assert found.exit_code == 1
    assert "my batch is empty" in found.stderr
    assert "my_nets.py" in found.stderr
    assert "engram/retraining" not in found.stderr


def _heeds_ctrl_c():
    """Whatever started the tests: what a shell puts into the background ignores Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_stopped_by_ctrl_c_it_goes_on(here):
    arguments = ["verify", "run", *NET, "--train", "my_nets:held", "--folder", "kept", "-q"]
    command = [sys.executable, "-m", "engram", *arguments, "--sample", "5"]
    settings = os.environ | {"OMP_NUM_THREADS": "1"}
    (here / "hold").touch()
    process = subprocess.Popen(
        command,
        cwd=here,
        env=settings,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_heeds_ctrl_c,
    )
    while not (here / "waiting").exists():  # a training is done, and the next has begun
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, words = process.communicate(timeout=60)
    assert process.returncode == 130, words
    assert words.strip() == "engram: stopped. The same command goes on where it can."
    (here / "hold").unlink()
    found = call(*arguments, "--sample", "5")
    assert found.exit_code == 0, found.output


RECORDED = """
import numpy as np
import torch
from torch import nn

import engram


def arrays():
    generator = np.random.default_rng(0)
    labels = np.arange(60) % 2
    return generator.normal(size=(60, 2)) + 2 * labels[:, None], labels


def make():
    return nn.Linear(2, 2)


def data():
    inputs, labels = arrays()
    scaled = (inputs - inputs.mean(0)) / inputs.std(0)
    return torch.from_numpy(scaled).float(), torch.from_numpy(labels)


def fit(model, data):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = engram.record(optimizer, model)
    for _ in range(20):
        for batch in torch.randperm(len(data[1])).split(20):
            training.note(batch)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data[0][batch]), data[1][batch]).backward()
            optimizer.step()
    training.stop()
    return training
"""


def test_an_audits_run_is_certified_with_its_own_weights_and_training(tmp_path, monkeypatch):
    (tmp_path / "recorded_nets.py").write_text(RECORDED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    import numpy as np
    from recorded_nets import arrays

    inputs, labels = arrays()
    np.savez("data.npz", x=inputs, y=labels)
    own = ("--model", "recorded_nets:make", "--train", "recorded_nets:fit")
    assert call("audit", "data.npz", "run", *own, "--quiet").exit_code == 0
    subject = (*own, "--data", "recorded_nets:data", "--refits", "8", "--json")
    found = call("certify", "run", *subject)
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["low"] < json.loads(found.stdout)["high"]
