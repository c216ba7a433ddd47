"""Commands that read the folders of runs: compare, check, show."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import engram
from command_line import call


def result(columns, seed=0, num_data=150):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_data, 3, generator=generator)
    y = (x + 0.5 * torch.randn(num_data, 3, generator=generator)).argmax(1)
    torch.manual_seed(seed)
    model, data = nn.Linear(columns, 3), (x[:, :columns], y)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=60)

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data[0]), y, reduction="sum")
        loss = loss + 0.5 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        return loss

    optimizer.step(closure)
    posterior = engram.laplace(model, data, structure="full", prior_precision=1.0, progress=False)
    return engram.sensitivities(model, data, posterior, progress=False)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, columns in (("small", 1), ("large", 3)):
        result(columns).save(folder / name)
    result(3, num_data=80).save(folder / "other")
    return folder


def test_compare_says_which_is_better(runs):
    found = call("compare", runs / "small", runs / "large")
    assert found.exit_code == 0, found.stderr
    assert "worse with" in found.stdout
    assert found.stdout.index("large") < found.stdout.index("small")
    assert "accuracy" in found.stdout
    assert max(map(len, found.stdout.splitlines())) <= 80


def test_compare_for_programs(runs):
    found = json.loads(call("compare", runs / "small", runs / "large", "--json").stdout)
    assert found["best"] == "large"
    models = {row["model"]: row for row in found["models"]}
    small, large = (engram.load(runs / name) for name in ("small", "large"))
    assert models["small"]["difference"] == pytest.approx(small.loo_nll - large.loo_nll)
    assert call("compare", runs / "small", runs / "large", "--quiet").stdout == "large\n"


def test_folders_of_one_name_are_told_apart(runs, tmp_path):
    engram.load(runs / "large").save(tmp_path / "small")
    found = json.loads(call("compare", runs / "small", tmp_path / "small", "--json").stdout)
    assert found["best"] == str(tmp_path / "small")


def test_compare_refuses_other_data_and_single_runs(runs):
    found = call("compare", runs / "small", runs / "other")
    assert found.exit_code == 1
    assert "engram: expected results on the same data: 'small' has 150 examples" in found.stderr
    assert "        got 'other' with 80" in found.stderr
    assert "        what to do: compare results on the same data" in found.stderr
    assert "Traceback" not in found.stderr
    assert call("compare", runs / "small").exit_code == 2
    assert call("compare", runs / "small", runs / "small").exit_code == 2


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        (["--max-loo-loss", "10"], 0),
        (["--max-loo-loss", "0.001"], 1),
        (["--max-label-issues", "100%"], 0),
        (["--max-label-issues", "150"], 0),
        (["--max-label-issues", "0"], 1),
        (["--max-label-issues", "0.1%", "--max-loo-loss", "10"], 1),
        (["--min-verdict", "unreliable"], 0),
        ([], 2),
        (["--max-label-issues", "few"], 2),
        (["--max-label-issues", "-1%"], 2),
        (["--max-loo-loss", "low"], 2),
        (["--min-verdict", "excellent"], 2),
    ],
)
def test_check_has_exit_codes(runs, limits, code):
    assert call("check", runs / "large", *limits).exit_code == code


def test_check_of_what_is_no_run(tmp_path):
    found = call("check", tmp_path, "--max-loo-loss", "1")
    assert found.exit_code == 2
    assert "expected a folder written by result.save" in found.stderr


def test_check_says_what_was_found(runs):
    found = call("check", runs / "large", "--max-loo-loss", "0.001", "--max-label-issues", "90%")
    loss = engram.load(runs / "large").loo_nll
    assert f"FAIL  leave-one-out loss: {loss:.4f} (at most 0.001 nats per example)" in found.stdout
    assert "ok    labels that leave-one-out contradicts" in found.stdout
    quiet = call(
        "check", runs / "large", "--max-loo-loss", "0.001", "--max-label-issues", "90%", "-q"
    )
    assert quiet.stdout.startswith("FAIL  leave-one-out loss")
    assert "ok" not in quiet.stdout
    rows = json.loads(call("check", runs / "large", "--max-loo-loss", "9", "--json").stdout)
    assert rows["kept"] is True
    assert rows["limits"][0]["name"] == "leave-one-out loss"


def test_check_by_the_verdict(runs):
    level = engram.load(runs / "large").verdict.level
    assert call("check", runs / "large", "--min-verdict", level).exit_code == 0
    if level != "good":
        assert call("check", runs / "large", "--min-verdict", "good").exit_code == 1


def test_show_for_programs(runs):
    found = json.loads(call("show", runs / "large", "--json", "--top", "3").stdout)
    expected = engram.load(runs / "large")
    assert found["loo_loss"] == pytest.approx(expected.loo_nll)
    assert [row["example"] for row in found["top"]] == list(expected.top(3).index)
    assert found["verdict"]["level"] == expected.verdict.level
    assert "verdict" not in call("show", runs / "large", "--quiet").stdout


def run(*arguments, **environment):
    """A real process; its output is a pipe, not a terminal."""
    return subprocess.run(
        [sys.executable, "-m", "engram", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )


def test_a_pipe_gets_no_colours_and_the_shell_the_exit_code(runs):
    found = run("check", runs / "large", "--max-loo-loss", "0.001", FORCE_COLOR="", NO_COLOR="1")
    assert found.returncode == 1
    assert found.stdout.startswith("FAIL")
    assert "\x1b" not in found.stdout
    assert found.stderr == ""


def test_a_misspelt_command_is_suggested():
    found = call("comapre")
    assert found.exit_code == 2
    assert "compare" in found.stderr
