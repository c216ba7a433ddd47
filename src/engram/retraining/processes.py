"""Work that forked processes of this machine share, one piece after the other.

A process that is forked has everything that its parent has, so that nothing has to be sent to it
but numbers, and training functions of a notebook work as they are. The thread pool of torch does
not outlive a fork, so each process computes on one thread.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from engram.core.state.process import restored
from engram.errors import ArgumentError, EngramError, TrainingError, brief

PARENT_SECONDS = 1.0  # between two looks of a process whether its parent is still there
Work = Callable[[int], None]


def check_processes(count: int, device: torch.device) -> None:
    """ArgumentError where several processes cannot be forked for a model on this device."""
    if count == 1:
        return
    got = f"a model on {device}, which forked processes cannot use" if device.type != "cpu" else ""
    if "fork" not in multiprocessing.get_all_start_methods():
        got = "a system that cannot fork processes"
    if got:
        raise ArgumentError(
            f"a model on the CPU for workers={count}",
            got,
            "use workers=1; processes that torchrun starts share the work through a folder",
        )


def in_processes(
    numbers: Sequence[int], work: Work, count: int, report: Callable[[], None]
) -> None:
    """Do a piece of work for every number, each in whichever process is free.

    Args:
        numbers: of the pieces.
        work: one piece; what it makes has to be written somewhere.
        count: of processes.
        report: called here after each finished piece.
    """
    left = list(reversed(numbers))
    with _forked(work, min(count, len(numbers))) as workers:
        busy = workers
        for worker in busy:
            worker.connection.send(left.pop())
        while busy:
            ready = wait([worker.connection for worker in busy])
            for worker in [worker for worker in busy if worker.connection in ready]:
                worker.check_answer()
                report()
                if left:
                    worker.connection.send(left.pop())
                else:
                    busy = [other for other in busy if other is not worker]


@dataclass(frozen=True, eq=False)
class Worker:
    """A process, and what it is told and answers through."""

    process: BaseProcess
    connection: Connection

    def check_answer(self) -> None:
        """Raise what the piece of work has raised, or where the process is gone."""
        try:
            failure = self.connection.recv()
        except EOFError as error:
            self.process.join()
            raise TrainingError(
                "processes that run until all trainings are done",
                f"one that ended with code {self.process.exitcode}",
                "use fewer workers if memory is short; with a folder the same call goes on",
            ) from error
        if failure is not None:
            raise failure


@contextmanager
def _forked(work: Work, count: int) -> Iterator[list[Worker]]:
    """Processes that wait for numbers; none is left afterwards."""
    context, workers = multiprocessing.get_context("fork"), list[Worker]()
    with restored([lambda: _end(workers)]):
        for _ in range(count):
            here, there = context.Pipe()
            ours = [*(worker.connection for worker in workers), here]
            process = context.Process(target=_serve, args=(work, there, ours, os.getpid()))
            workers.append(Worker(process, here))
            with warnings.catch_warnings():  # threads are there, but none that a child would need
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            there.close()  # so that reading here ends when the process does
        yield workers


def _end(workers: Sequence[Worker]) -> None:
    """End what is left of them; may be called twice."""
    begun = [worker for worker in workers if worker.process.pid is not None]
    for worker in workers:
        worker.connection.close()
    for worker in begun:
        worker.process.terminate()
    for worker in begun:
        worker.process.join()


def _serve(work: Work, there: Connection, ours: Sequence[Connection], parent: int) -> None:
    """Of a process: pieces of work until it is ended, or nobody is left to tell it of more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told by Ctrl-C, and ends it
    for connection in ours:
        connection.close()  # the parent's alone: where it closes them, reading there ends
    torch.set_num_threads(1)
    while (number := _told(there, parent)) is not None:
        failure: EngramError | None = None
        try:
            work(number)
        except EngramError as error:
            failure = error
        except BaseException as error:  # whatever a training function raises
            traceback.print_exc()
            failure = TrainingError(
                "a training function that ends without an error",
                f"{brief(error)} (training {number})",
                "the traceback is in the output of the process; workers=1 raises it here",
            )
        there.send(failure)


def _told(there: Connection, parent: int) -> int | None:
    """The next number; None where none will come."""
    while not there.poll(PARENT_SECONDS):
        if os.getppid() != parent:
            return None
    try:
        number: int = there.recv()
    except EOFError:
        return None
    return number
