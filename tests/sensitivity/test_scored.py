"""Scores in a folder: those of the sensitivities, whoever writes them and whatever stops them."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import engram
from engram.errors import ArgumentError, RunFolderError, StorageError

N = 53


def problem(structure="kronecker"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    data = (torch.randn(N, 4, dtype=torch.float64), torch.arange(N) % 3)
    return model, data, engram.laplace(model, data, structure=structure, prior_precision=2.0)


def assert_same(frame, result):
    expected = result.to_frame()
    assert list(frame.index) == list(expected.index)
    for column in ("loss", "loo_loss", "score"):
        assert (frame[column] - expected[column]).abs().max() < 1e-12


@pytest.mark.parametrize("part", [7, 20, 100])
@pytest.mark.parametrize("structure", ["kronecker", "full"])
def test_the_numbers_are_those_of_the_sensitivities(part, structure, tmp_path):
    model, data, posterior = problem(structure)
    scores = engram.score(model, data, posterior, tmp_path, part=part)
    result = engram.sensitivities(model, data, posterior)
    assert scores.missing == []
    assert_same(scores.to_frame(), result)
    assert abs(scores.loo_nll - result.loo_nll) < 1e-12 > abs(scores.train_nll - result.train_nll)
    assert list(scores.top(3).index) == list(result.top(3, by="loo_loss").index)
    assert f"Scores of 53 examples in {tmp_path}" in repr(scores)


def test_shares_of_several_processes_come_together(tmp_path):
    model, data, posterior = problem()
    first = engram.score(model, data, posterior, tmp_path, part=5, share=(0, 3))
    assert first.missing == [n for n in range(11) if n % 3]
    with pytest.raises(RunFolderError, match=r"all 11 parts.*7 missing \(1, 2, 4, 5, 7, \.\.\.\)"):
        first.to_frame()
    assert len(first.to_frame(partial=True)) == 20  # of the parts 0, 3, 6 and 9
    engram.score(model, data, posterior, tmp_path, part=5, share=(2, 3))
    last = engram.score(model, data, posterior, tmp_path, part=5, share=(1, 3))
    assert_same(last.to_frame(), engram.sensitivities(model, data, posterior))


def test_the_environment_says_which_share(tmp_path, monkeypatch):
    model, data, posterior = problem()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert engram.score(model, data, posterior, tmp_path, part=20).missing == [0, 2]


def test_what_is_there_is_not_computed_again_and_what_is_damaged_is(tmp_path):
    model, data, posterior = problem()
    scores = engram.score(model, data, posterior, tmp_path, part=20)
    before = {n: file.stat().st_mtime_ns for n, file in scores.parts.items()}
    scores.parts[1].write_bytes(scores.parts[1].read_bytes()[:-9])
    assert engram.Scores(tmp_path).missing == [1]
    again = engram.score(model, data, posterior, tmp_path, part=20)
    after = {n: file.stat().st_mtime_ns for n, file in again.parts.items()}
    assert [n for n in before if before[n] != after[n]] == [1]
    assert_same(again.to_frame(), engram.sensitivities(model, data, posterior))


def test_a_recorded_training_is_brought_to_its_level_over_all_parts(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    data = (torch.randn(60, 4), torch.arange(60) % 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    training = engram.record(optimizer, model)
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data[0]), data[1]).backward()
        optimizer.step()
    posterior = engram.laplace(model, data, training=training, structure="kronecker")
    scores = engram.score(model, data, posterior, tmp_path, part=25)
    expected = engram.sensitivities(model, data, posterior)
    found = torch.tensor(scores.to_frame()["loo_loss"].to_numpy())
    torch.testing.assert_close(found, expected.loo_loss, rtol=1e-4, atol=1e-5)


def test_a_folder_of_another_run_is_refused(tmp_path):
    model, data, posterior = problem()
    engram.score(model, data, posterior, tmp_path, part=20)
    with pytest.raises(RunFolderError, match="other part"):
        engram.score(model, data, posterior, tmp_path, part=10)
    with pytest.raises(RunFolderError, match="other estimator"):
        engram.score(model, data, posterior, tmp_path, part=20, estimator="iterated")
    other = (data[0].flip(0), data[1])
    with pytest.raises(RunFolderError, match="other examples"):
        engram.score(model, other, posterior, tmp_path, part=20)
    with pytest.raises(ArgumentError, match="share="):
        engram.score(model, data, posterior, tmp_path, share=(2, 2))
    (tmp_path / "scores.json").write_text("{}")
    with pytest.raises(StorageError, match="says nothing"):
        engram.Scores(tmp_path)


SCRIPT = """
import sys, torch
from torch import nn
import engram
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 3))
data = (torch.randn(20000, 20), torch.arange(20000) % 3)
settings = {"structure": "diagonal", "curvature": "fisher", "prior_precision": 2.0}
posterior = engram.laplace(model, data, **settings)
print("ready", flush=True)
engram.score(model, data, posterior, sys.argv[1], part=200, batch_size=50, progress=False)
"""


def test_a_kill_costs_a_part_at_the_most(tmp_path):
    run = tmp_path / "run"
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(run)]
    paths = os.pathsep.join(p for p in sys.path if p)
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        process.stdout.readline()
        while len(list(Path(run).glob("part-*.parquet"))) < 5 and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    scores = engram.Scores(run)
    done = len(scores.parts)
    assert done >= 5  # and all of them whole
    assert len(scores.to_frame(partial=True)) == 200 * done
    assert scores.missing == list(range(done, 100))
