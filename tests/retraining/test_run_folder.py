"""Runs that are killed, damaged, mixed up or shared go on with what is good."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import engram
from engram.errors import ArgumentError, FormatError, RunFolderError, StorageError
from engram.retraining.run_folder import Ranks
from retraining_problems import PRIOR_PRECISION, RIDGE, ridge_fit, ridge_problem

HERE = Path(__file__).parent.parent
SOURCE = HERE.parent / "src"
INDICES = [0, 3, 4, 8, 9]

SCRIPT = """
import sys, time
import torch
import engram
from retraining_problems import RIDGE, ridge_fit, ridge_problem

torch.set_num_threads(1)
model, x, y = ridge_problem()

def fit(own, data):
    time.sleep(float(sys.argv[2]))
    with torch.no_grad():
        own.weight.copy_(ridge_fit(*data).T)

truth = engram.retrain(
    model, (x, y), [0, 3, 4, 8, 9], train=fit, likelihood=RIDGE, folder=sys.argv[1], progress=False
)
line = f"indices {truth.indices.tolist()} {float(truth.deviation.abs().sum())}\\n"
sys.stdout.write(line)  # in one piece: two processes write to one pipe
"""


def environment() -> dict[str, str]:
    paths = os.pathsep.join([str(SOURCE), str(HERE)])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


def counting(calls):
    def fit(own, data):
        calls.append(len(data[0]))
        with torch.no_grad():
            own.weight.copy_(ridge_fit(*data).T)

    return fit


def run(folder, train, indices=INDICES, **settings):
    model, x, y = ridge_problem()
    return engram.retrain(
        model, (x, y), indices, train=train, likelihood=RIDGE,
        prior_precision=PRIOR_PRECISION, folder=folder, progress=False, **settings,
    )  # fmt: skip


def copies(folder) -> list[Path]:
    return sorted(Path(folder).glob("copies-*.safetensors"))


def test_a_finished_run_is_only_read(tmp_path):
    calls = []
    first = run(tmp_path, counting(calls))
    assert len(calls) == 3 + len(INDICES)
    calls.clear()  # the function closes over it, and is another where it holds something else
    second = run(tmp_path, counting(calls))
    assert calls == []
    assert torch.equal(first.deviation, second.deviation)


def test_a_killed_run_goes_on(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    folder = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, script, folder, "0.3"], env=environment(), stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while len(copies(folder)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    kept = len(copies(folder))
    assert 2 <= kept < len(INDICES)
    names = {path.name for path in copies(folder)}
    again = subprocess.run(
        [sys.executable, script, folder, "0"],
        env=environment(), capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    assert f"indices {INDICES}" in again.stdout
    assert names <= {path.name for path in copies(folder)}
    assert len(copies(folder)) == len(INDICES)


def test_a_stack_is_resumed_with_what_is_missing(tmp_path):
    whole = run(tmp_path / "whole", "newton")
    run(tmp_path / "part", "newton")
    copies(tmp_path / "part")[0].unlink()
    assert torch.allclose(run(tmp_path / "part", "newton").deviation, whole.deviation, atol=1e-9)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_file_is_set_aside_and_trained_again(tmp_path, damage):
    calls = []
    first = run(tmp_path, counting(calls))
    victim = copies(tmp_path)[2]
    content = victim.read_bytes()
    changed = bytes([content[-1] ^ 255])
    new = {"cut": content[:-9], "flipped": content[:-1] + changed, "empty": b""}[damage]
    victim.write_bytes(new)
    calls.clear()
    with pytest.warns(UserWarning, match="damaged"):
        second = run(tmp_path, counting(calls))
    assert calls == [13]
    assert torch.equal(first.deviation, second.deviation)
    assert victim.with_name(victim.name + ".damaged").exists()


def test_a_damaged_manifest_is_written_again(tmp_path):
    calls = []
    run(tmp_path, counting(calls))
    (tmp_path / "manifest.json").write_text("{ half")
    calls.clear()
    with pytest.warns(UserWarning, match="manifest"):
        run(tmp_path, counting(calls))
    assert calls == []


def test_leftovers_of_a_kill_while_writing_are_ignored(tmp_path):
    calls = []
    run(tmp_path, counting(calls))
    (tmp_path / ".copies-x.safetensors.part").write_bytes(b"half a file")
    calls.clear()
    run(tmp_path, counting(calls))
    assert calls == []


def test_a_damaged_manifest_of_another_run_is_not_taken_over(tmp_path):
    run(tmp_path, "newton")
    (tmp_path / "manifest.json").write_text("{ half")
    before = sorted(file.name for file in tmp_path.iterdir())
    with pytest.raises(RunFolderError, match="differs"):
        run(tmp_path, "newton", seed=1)
    assert sorted(file.name for file in tmp_path.iterdir()) == before


def test_a_folder_of_an_earlier_version_is_refused(tmp_path):
    (tmp_path / "manifest.json").write_text('{"format": 1, "fingerprint": "x", "settings": {}}')
    with pytest.raises(FormatError, match="format 1"):
        run(tmp_path, "newton")


def test_what_else_is_saved_in_the_folder_stays(tmp_path):
    first = run(tmp_path, "newton")
    first.save(tmp_path)
    again = run(tmp_path, "newton")
    assert torch.equal(engram.load(tmp_path).deviation, again.deviation)


def test_a_folder_that_cannot_be_one_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        run(tmp_path / "file", "newton")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "manifest.json").symlink_to(tmp_path / "theirs")
    with pytest.raises(StorageError, match="symbolic link"):
        run(tmp_path / "link", "newton")
    assert not (tmp_path / "theirs").exists()


def test_a_pipe_in_place_of_a_part_is_set_aside(tmp_path):
    first = run(tmp_path, "newton")
    victim = copies(tmp_path)[0]
    victim.unlink()
    os.mkfifo(victim)
    with pytest.warns(UserWarning, match="damaged"):
        second = run(tmp_path, "newton")
    assert torch.allclose(first.deviation, second.deviation, atol=1e-9)


def test_a_folder_of_another_run_is_refused(tmp_path):
    run(tmp_path, "newton")
    with pytest.raises(RunFolderError, match="left_out differs"):
        run(tmp_path, "newton", indices=[1])
    with pytest.raises(RunFolderError, match=r"train, code differ.*another folder"):
        run(tmp_path, "lbfgs")
    with pytest.raises(RunFolderError, match="seed differs"):
        run(tmp_path, "newton", seed=1)


def test_two_processes_share_the_work(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = ["torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script)]
    done = subprocess.run(
        [sys.executable, "-m", *command, str(tmp_path / "run"), "0.05"],
        env=environment(), capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("indices")]
    assert len(lines) == 2
    assert lines[0] == lines[1]
    assert str(INDICES) in lines[0]
    assert len(copies(tmp_path / "run")) == len(INDICES)  # nothing trained twice
    assert len(list((tmp_path / "run").glob("refits-*"))) == 1


def test_several_processes_need_a_folder(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ArgumentError, match="2 processes"):
        run(None, "newton")


def test_a_process_that_starts_late_leaves_no_gap():
    early, late = list(range(10)), [2, 3, 5, 7, 8, 9]  # 0, 1, 4 and 6 were done in between
    shares = [Ranks(0, 3).share(early), Ranks(1, 3).share(late), Ranks(2, 3).share(late)]
    assert {number for share in shares for number in share} >= set(late)
    assert sum(map(len, shares)) == len({number for share in shares for number in share})
