"""Savers that are interrupted, killed or not alone leave one thing, whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engram.core.storage import files
from engram.core.storage import json_folder as storage
from engram.core.storage.json_folder import read_folder, write_folder

SOURCE = Path(__file__).parents[3] / "src"
SAVES = 30  # of each saver


def thing(number: float = 1.0) -> dict[str, Any]:
    return {"number": number, "column": torch.full((5,), number)}


def test_an_interrupt_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    """Every fourth line that the writer runs, as Ctrl-C would come there."""

    def interrupted_at(count: int, number: float) -> bool:
        left = count

        def local(frame: Any, event: str, _: Any) -> Any:
            nonlocal left
            if event == "line":
                left -= 1
                if left == 0:
                    raise KeyboardInterrupt
            return local

        def trace(frame: Any, event: str, _: Any) -> Any:
            return local if frame.f_code.co_filename in (storage.__file__, files.__file__) else None

        sys.settrace(trace)
        try:
            write_folder(tmp_path, "thing", 1, thing(number))
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    write_folder(tmp_path, "thing", 1, thing(1.0))
    line, old, replaced = 1, 1.0, set()
    while interrupted_at(line, old + 1):
        found = read_folder(tmp_path, "thing", 1)
        assert found["column"].eq(found["number"]).all()
        assert found["number"] in (old, old + 1)
        replaced.add(found["number"] > old)
        old = found["number"]
        line += 4
    assert replaced == {False, True}
    assert line > 50


def test_savers_and_readers_at_once(tmp_path: Path) -> None:
    write_folder(tmp_path, "thing", 1, thing(0.0))
    wrong: list[object] = []
    saved = threading.Event()

    def save(number: int) -> None:
        for _ in range(SAVES):
            try:
                write_folder(tmp_path, "thing", 1, thing(number))
            except Exception as error:
                wrong.append(error)

    def read() -> None:
        while not saved.is_set():
            try:
                found = read_folder(tmp_path, "thing", 1)
            except Exception as error:
                wrong.append(error)
            else:
                if not found["column"].eq(found["number"]).all():
                    wrong.append(found)

    savers = [threading.Thread(target=save, args=(n,)) for n in range(1, 4)]
    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in savers + readers:
        thread.start()
    for thread in savers:
        thread.join()
    saved.set()
    for thread in readers:
        thread.join()
    assert wrong == []
    assert read_folder(tmp_path, "thing", 1)["number"] in (1, 2, 3)


SCRIPT = """
import os, sys, torch
from engram.core.storage.json_folder import write_folder
torch.set_num_threads(1)
for _ in sys.stdin:
    child = os.fork()
    while child == 0:
        number = float(torch.rand(()))
        column = torch.full((99_999,), number)
        write_folder(sys.argv[1], "thing", 1, {"number": number, "column": column})
    print(child, flush=True)
    os.waitpid(child, 0)
    print("dead", flush=True)
"""


def test_a_saver_that_is_killed_leaves_a_whole_folder(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    write_folder(tmp_path, "thing", 1, thing())
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as parent:
        for moment in np.random.default_rng(0).uniform(0.0, 0.15, 12):
            parent.stdin.write("\n")
            parent.stdin.flush()
            child = int(parent.stdout.readline())
            time.sleep(moment)
            os.kill(child, signal.SIGKILL)
            assert parent.stdout.readline() == "dead\n"
            found = read_folder(tmp_path, "thing", 1)
            assert found["column"].eq(found["number"]).all()
        parent.stdin.close()
