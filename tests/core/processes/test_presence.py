"""A process that is killed while others wait for it, and one that does not come."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
# Signs of life are looked at more often than usual, so that the test is short.
SCRIPT = """
import os, signal, sys, torch, torch.distributed as dist
from torch import nn
import engram
from engram.core.processes import presence

presence.BEAT_SECONDS, presence.SILENT_SECONDS = 0.2, 6.0
rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=3)


class Deadly(torch.utils.data.Dataset):
    def __len__(self):
        return 30

    def __getitem__(self, index):
        if rank == 2 and index == 25:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((4,), float(index)), torch.tensor(index % 3)


torch.manual_seed(0)
model = nn.Linear(4, 3)
asked = {"prior_precision": 1.0, "structure": "diagonal", "batch_size": 2, "progress": False}
for patience in (60.0, 0.5):  # one that is killed; then one that does not come
    presence.JOIN_SECONDS = patience
    try:
        engram.laplace(model, Deadly(), across_ranks=True, **asked)
    except engram.errors.EngineError as error:
        print(error)
    sys.stdout.flush()
    if rank == 1:
        break
os._exit(7)  # the group of a dead process is not taken down
"""


def outputs(folder: Path) -> list[tuple[int, str]]:
    """Exit code and output of three processes."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(folder)],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        return [(process.wait(timeout=400), process.communicate()[0]) for process in started]
    finally:
        for process in started:
            process.kill()


def test_the_others_name_who_was_killed_and_who_does_not_come(tmp_path: Path) -> None:
    first, second, dead = outputs(tmp_path)
    assert dead[0] == -signal.SIGKILL
    for code, text in (first, second):
        assert code == 7
        assert "no sign of life of process 2" in text
        assert "start all of them again" in text
    assert "no sign of process 1 within" in first[1]  # it makes no second call
    assert "on every rank" in first[1]
