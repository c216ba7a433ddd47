"""A run that was interrupted goes on; a folder that is another's is refused."""

import os
import subprocess
import sys

import pytest
import torch

import engram
from auditing_tables import blobs
from engram.auditing import fitting, run_lock
from engram.errors import RunFolderError, StorageError


def audited(folder, frame, **settings):
    return engram.audit(frame, folder, epochs=4, progress=False, **settings)


def test_after_an_interrupt_the_same_call_goes_on(tmp_path, monkeypatch):
    frame, _ = blobs(60)
    whole = audited(tmp_path / "whole", frame)
    monkeypatch.setattr(run_lock, "KEPT_EVERY", 0.0)
    plain, epochs = fitting._Loop.epoch, []

    def interrupted(loop):
        if len(epochs) == 2:
            raise KeyboardInterrupt
        plain(loop)
        epochs.append(loop.done)

    monkeypatch.setattr(fitting._Loop, "epoch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        audited(tmp_path / "run", frame)
    assert (tmp_path / "run" / "progress.json").exists()
    assert not (tmp_path / "run" / ".lock").exists()
    monkeypatch.setattr(
        fitting._Loop, "epoch", lambda loop: (epochs.append(loop.done), plain(loop))
    )
    again = audited(tmp_path / "run", frame)
    assert epochs == [1, 2, 2, 3]
    assert torch.equal(again.result.outputs, whole.result.outputs)
    assert torch.allclose(again.result.loo_loss, whole.result.loo_loss, rtol=0.1)
    assert [point["train"] for point in again.curve] == [point["train"] for point in whole.curve]
    assert not list((tmp_path / "run").glob("progress*"))


def test_a_finished_run_is_read_and_another_refused(tmp_path):
    frame, _ = blobs(60)
    first = audited(tmp_path / "run", frame)
    assert audited(tmp_path / "run", frame).issues.equals(first.issues)
    with pytest.raises(RunFolderError, match="of another one: seed 0 there, 1 here"):
        audited(tmp_path / "run", frame, seed=1)
    with pytest.raises(RunFolderError, match="the same settings, on other data"):
        audited(tmp_path / "run", frame.iloc[1:])


def test_a_folder_with_other_things_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("important")
    frame, _ = blobs(60)
    with pytest.raises(RunFolderError, match=r"an empty folder.*thesis\.tex"):
        audited(tmp_path, frame)
    with pytest.raises(RunFolderError, match="a folder for the run"):
        audited(tmp_path / "thesis.tex", frame)


def test_a_folder_in_use_is_refused(tmp_path):
    pytest.importorskip("fcntl")
    hold = (
        "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.read()"
    )
    (tmp_path / ".lock").touch()
    other = subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path / ".lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout.readline() == "held\n"
        frame, _ = blobs(60)
        with pytest.raises(RunFolderError, match="no other run is using"):
            audited(tmp_path, frame)
    finally:
        other.communicate("")


def test_a_disk_without_room_is_said(tmp_path):
    """A limit on the size of files, as a full disk has it."""
    resource = pytest.importorskip("resource")
    import signal

    frame, _ = blobs(400)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
        with pytest.raises(StorageError, match="free space"):
            audited(tmp_path / "run", frame)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not (tmp_path / "run" / "run.json").exists()
    assert audited(tmp_path / "run", frame).findings.num_data == 400
    assert os.listdir(tmp_path / "run")
