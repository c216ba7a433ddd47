"""What belongs to the thread or the process and not to a call: the same after it, however it ends.

``with torch.no_grad():`` restores what it changed, but not where Ctrl-C comes while it is being
entered or left. So the calls that run for long restore everything themselves, last
(:func:`restored`): grad mode, modes of torch, flags, random numbers, and which kernels attention
takes (:class:`plain_attention`). :class:`RandomState` draws numbers again as they were drawn.
"""

from __future__ import annotations

import contextlib
import random
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engram.core.state.plain_forward import FORWARD
from engram.core.state.switches import Asked, Switches

Restore = Callable[[], object]
_ONE_THREAD = threading.RLock()  # seeds and flags are the whole process's: the others wait

_cuda, _encoder = torch.backends.cuda, torch.backends.mha
ATTENTION = Switches(
    (
        (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp, False),
        (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp, False),
        (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp, False),
        (_cuda.math_sdp_enabled, _cuda.enable_math_sdp, True),
        (_encoder.get_fastpath_enabled, _encoder.set_fastpath_enabled, False),
    )
)


@contextmanager
def kept_surroundings() -> Iterator[None]:
    """Random numbers, grad mode, default type, threads and flags of torch, as before afterwards.

    Example:
        >>> with kept_surroundings():
        ...     _ = torch.manual_seed(1), torch.set_grad_enabled(False)
        >>> torch.is_grad_enabled()
        True
    """
    with _ONE_THREAD, restored((*of_the_thread(), *_flags(), *random_states())):
        yield


@contextmanager
def restored(restores: Sequence[Restore]) -> Iterator[None]:
    """Run all of these at the end; each may be run twice.

    What Ctrl-C has left suspended in the frames below is ended before: closed by the garbage
    collector, after this, it would set its own state once more.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        end_suspended(error)
        raise
    finally:
        try:
            _run(restores)
        except BaseException:  # Ctrl-C while restoring: once more, and then it may go on
            _run(restores)
            raise


def end_suspended(error: BaseException) -> None:
    """Close what an error has left suspended in the frames that it came through."""
    traceback.clear_frames(error.__traceback__)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    frame = frames[-1].f_back if frames else None  # one that was just left is not in the traceback
    while frame is not None and frame not in frames:
        with contextlib.suppress(RuntimeError):  # still running
            frame.clear()
        frame = frame.f_back


def _run(restores: Sequence[Restore]) -> None:
    """All of them, also where one fails; the first failure is raised in the end."""
    failures: list[BaseException] = []
    for restore in restores:
        try:
            restore()
        except BaseException as failure:
            failures.append(failure)
    if failures:
        raise failures[0]


def of_the_thread() -> Iterator[Restore]:
    """Modes of this thread alone: others may run meanwhile, in modes of their own."""
    yield from stacks()
    grad = torch.is_grad_enabled()
    yield lambda: torch._C._set_grad_enabled(grad)  # in C: no Ctrl-C before its effect
    for kind in ("cpu", "cuda"):
        yield _setting(torch.set_autocast_enabled, kind, torch.is_autocast_enabled(kind))
    for switches in (ATTENTION, FORWARD):
        yield _setting(switches.reset, switches.times_asked())


def stacks() -> Iterator[Restore]:
    """Modes that are entered by pushing them: what was left on top is taken away."""
    functions, dispatches = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
    yield _popping(functions, functions(), torch._C._pop_torch_function_stack)
    yield _popping(dispatches, dispatches(), torch._C._pop_torch_dispatch_stack)
    transforms = torch._C._functorch.get_dynamic_layer_stack_depth()
    undo = torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth
    yield _setting(undo, transforms)
    yield from _saved_tensor_hooks()


def _saved_tensor_hooks() -> Iterator[Restore]:
    """What autograd calls with the tensors that it keeps, and whether it may."""
    autograd = torch._C._autograd
    before = autograd._top_saved_tensors_default_hooks(True)
    forbidden = autograd._saved_tensors_hooks_get_disabled_error_message()

    def restore() -> None:
        while (top := autograd._top_saved_tensors_default_hooks(True)) and top != before:
            autograd._pop_saved_tensors_default_hooks()
        if forbidden is None:
            autograd._saved_tensors_hooks_enable()
        else:
            autograd._saved_tensors_hooks_disable(forbidden)

    yield restore


def _popping(size: Callable[[], int], before: int, pop: Callable[[], object]) -> Restore:
    def restore() -> None:
        for _ in range(size() - before):
            pop()

    return restore


def _flags() -> Iterator[Restore]:
    """Default type, which algorithms torch may take, and on how many threads."""
    anomaly, checked = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    yield _setting(torch.set_default_dtype, torch.get_default_dtype())
    yield lambda: torch.set_anomaly_enabled(anomaly, checked)
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    precision = torch.get_float32_matmul_precision()
    yield lambda: torch.set_num_threads(threads) if torch.get_num_threads() != threads else None
    yield lambda: torch.use_deterministic_algorithms(strict, warn_only=warn_only)
    yield lambda: torch.set_float32_matmul_precision(precision)
    cudnn = torch.backends.cudnn
    for name in ("benchmark", "deterministic", "enabled"):
        yield _setting(setattr, cudnn, name, getattr(cudnn, name))
    if not ATTENTION.anybody:  # else they are not the user's to keep
        for read, write, _ in ATTENTION.switches:
            yield _setting(write, read())


def random_states() -> Iterator[Restore]:
    """Of Python, numpy and torch."""
    yield _setting(random.setstate, random.getstate())
    yield _setting(np.random.set_state, np.random.get_state())
    yield _setting(torch.set_rng_state, torch.get_rng_state())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        yield _setting(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())


def _setting(function: Callable[..., object], *values: object) -> Restore:
    return lambda: function(*values)


class plain_attention(Asked):  # noqa: N801 (read as the statement that it is)
    """Attention by plain operations while this lasts: the fused kernels have no second derivative.

    Example:
        >>> with plain_attention():
        ...     torch.backends.cuda.flash_sdp_enabled()
        False
        >>> torch.backends.cuda.flash_sdp_enabled()
        True
    """

    switches = ATTENTION


@dataclass(frozen=True)
class RandomState:
    """The state of torch's generators at one moment.

    Example:
        >>> state = RandomState.now([])
        >>> first = torch.rand(2)
        >>> with state.again():
        ...     second = torch.rand(2)
        >>> torch.equal(first, second)
        True
    """

    cpu: Tensor
    cuda: dict[int, Tensor]

    @classmethod
    def now(cls, devices: Iterable[torch.device]) -> RandomState:
        """The state on the CPU and on those of the devices that have one of their own."""
        numbers = {device.index or 0 for device in devices if device.type == "cuda"}
        return cls(torch.get_rng_state(), {n: torch.cuda.get_rng_state(n) for n in numbers})

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw as then; afterwards as if nothing had been drawn."""
        with torch.random.fork_rng(devices=list(self.cuda)):
            torch.set_rng_state(self.cpu)
            for number, state in self.cuda.items():
                torch.cuda.set_rng_state(state, number)
            yield
