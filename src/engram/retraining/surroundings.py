"""What belongs to the whole process and not to a call: the same after it, however it ends.

``with torch.no_grad():`` restores what it changed, but not where Ctrl-C comes while it is being
entered or left. So the calls that run for long restore everything themselves, last.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

Restore = Callable[[], object]


@contextmanager
def kept_surroundings() -> Iterator[None]:
    """Random numbers, grad mode, default type, threads and flags of torch, as before afterwards.

    Example:
        >>> with kept_surroundings():
        ...     _ = torch.manual_seed(1), torch.set_grad_enabled(False)
        >>> torch.is_grad_enabled()
        True
    """
    restores = (*_stacks(), *_modes(), *_flags(), *_random_states())
    try:
        yield
    finally:
        try:
            _run(restores)
        except BaseException:  # Ctrl-C while restoring: once more, and then it may go on
            _run(restores)
            raise


def _run(restores: tuple[Restore, ...]) -> None:
    for restore in restores:
        restore()


def _stacks() -> Iterator[Restore]:
    """Modes that are entered by pushing them: what was left on top is taken away."""
    functions, dispatches = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
    yield _popping(functions, functions(), torch._C._pop_torch_function_stack)
    yield _popping(dispatches, dispatches(), torch._C._pop_torch_dispatch_stack)
    transforms = torch._C._functorch.get_dynamic_layer_stack_depth()
    undo = torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth
    yield _setting(undo, transforms)


def _popping(size: Callable[[], int], before: int, pop: Callable[[], object]) -> Restore:
    def restore() -> None:
        for _ in range(size() - before):
            pop()

    return restore


def _modes() -> Iterator[Restore]:
    """Of autograd: in C, so that no Ctrl-C comes between the call and its effect."""
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    anomaly, checked = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    autocast = {kind: torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")}
    yield lambda: torch._C._set_grad_enabled(grad)
    yield lambda: torch.set_default_dtype(dtype)
    yield lambda: torch.set_anomaly_enabled(anomaly, checked)
    for kind, enabled in autocast.items():
        yield _setting(torch.set_autocast_enabled, kind, enabled)


def _flags() -> Iterator[Restore]:
    """Which algorithms torch may take, and on how many threads."""
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    precision = torch.get_float32_matmul_precision()
    yield lambda: torch.set_num_threads(threads) if torch.get_num_threads() != threads else None
    yield lambda: torch.use_deterministic_algorithms(strict, warn_only=warn_only)
    yield lambda: torch.set_float32_matmul_precision(precision)
    cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
    for name in ("benchmark", "deterministic", "enabled"):
        yield _setting(setattr, cudnn, name, getattr(cudnn, name))
    yield _setting(cuda.enable_math_sdp, cuda.math_sdp_enabled())
    yield _setting(cuda.enable_flash_sdp, cuda.flash_sdp_enabled())
    yield _setting(cuda.enable_mem_efficient_sdp, cuda.mem_efficient_sdp_enabled())
    yield _setting(cuda.enable_cudnn_sdp, cuda.cudnn_sdp_enabled())


def _random_states() -> Iterator[Restore]:
    yield _setting(random.setstate, random.getstate())
    yield _setting(np.random.set_state, np.random.get_state())
    yield _setting(torch.set_rng_state, torch.get_rng_state())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        yield _setting(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())


def _setting(function: Callable[..., object], *values: object) -> Restore:
    return lambda: function(*values)
