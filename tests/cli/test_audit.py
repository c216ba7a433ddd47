"""``engram audit`` and ``engram RUN/run.json``, on a small table."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest

import engram
from command_line import call


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("audit")
    generator = np.random.default_rng(0)
    x = np.concatenate([generator.normal(m, 1, (40, 2)) for m in (-2, 2)])
    labels = np.array(["left"] * 40 + ["right"] * 40)
    labels[[7, 50]] = ["right", "left"]
    frame = pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "side": labels})
    frame.to_csv(place / "data.csv", index=False)
    found = call("audit", place / "data.csv", place / "run", "--label", "side", "--epochs", "5")
    assert found.exit_code == 0, found.output
    return place, found.stdout


def test_it_says_what_was_found_and_where_the_page_is(folder):
    place, words = folder
    assert "Audit of 80 examples (tabular, binary)" in words
    assert "likely wrong labels" in words
    assert "report.html" in words
    assert (place / "run" / "report.html").exists()
    assert engram.load(place / "run").findings.num_data == 80


def test_commands_on_its_folder(folder):
    place, _ = folder
    run = place / "run"
    assert call("show", run, "--top", "3").exit_code == 0
    wrong = engram.load(run).findings.num_label_issues
    assert call("check", run, "--max-label-issues", str(wrong)).exit_code == 0
    if wrong:
        found = call("check", run, "--max-label-issues", str(wrong - 1))
        assert found.exit_code == 1
        assert "labels that are likely wrong" in found.stdout
    assert call("report", run, "-o", place / "page.html").exit_code == 0


def test_again_with_its_own_file(folder):
    place, _ = folder
    found = call(place / "run" / "run.json")
    assert found.exit_code == 0, found.output
    first, second = engram.load(place / "run"), engram.load(place / "run-again")
    assert np.allclose(first.result.loo_loss, second.result.loo_loss, rtol=1e-4)
    assert first.settings == second.settings


def test_audit_for_programs(folder):
    place, _ = folder
    arguments = ("--label", "side", "--epochs", "2", "--minimal", "--json", "-q")
    found = json.loads(call("audit", place / "data.csv", place / "json", *arguments).stdout)
    assert found["findings"]["num_data"] == 80
    assert found["page"] == str(place / "json" / "report.html")


def test_a_column_that_is_not_there(folder):
    place, _ = folder
    found = call("audit", place / "data.csv", place / "no", "--label", "sdie")
    assert found.exit_code == 1
    assert "did you mean 'side'?" in found.stderr
    assert not (place / "no" / "run.json").exists()


def test_data_that_are_not_there(tmp_path):
    found = call("audit", tmp_path / "none.csv")
    assert found.exit_code == 1
    assert "which is not there" in found.stderr


def test_again_of_what_is_no_run(tmp_path):
    found = call(tmp_path / "run.json")
    assert found.exit_code == 1
    assert "engram: expected" in found.stderr


def test_a_model_of_the_users_own(folder, tmp_path, monkeypatch):
    place, _ = folder
    (tmp_path / "own_net.py").write_text(
        "from torch import nn\n\n\ndef make():\n    return nn.Linear(2, 2)\n\n\n"
        "def broken():\n    return 1 / 0\n"
    )
    monkeypatch.chdir(tmp_path)
    arguments = ("audit", place / "data.csv", tmp_path / "run", "--label", "side", "--epochs", "2")
    found = call(*arguments, "--model", "own_net:make", "-q")
    assert found.exit_code == 0, found.output
    found = call(*arguments, "--model", "own_net:broken", "-q")
    assert found.exit_code == 1
    assert "engram: this failed in your code:" in found.stderr
    assert "own_net.py" in found.stderr
    assert "own_model.py" not in found.stderr


def test_an_audit_that_was_stopped_while_it_wrote_is_made_again(folder, tmp_path):
    place, _ = folder
    half = tmp_path / "half"
    shutil.copytree(place / "run", half)
    (half / "run.json").unlink()  # which is written last
    arguments = ("--label", "side", "--epochs", "2", "--minimal", "-q")
    found = call("audit", place / "data.csv", half, *arguments)
    assert found.exit_code == 0, found.output
    (half / "run.json").unlink()
    (half / "letters.txt").write_text("somebody's")
    assert call("audit", place / "data.csv", half, *arguments).exit_code == 1
