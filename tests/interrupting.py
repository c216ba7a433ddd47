"""Ctrl-C at a chosen moment: at the n-th time that a Python function is entered or left."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import checkpoint

GUARDS = ("__enter__", "__exit__", "__init__", "__setattr__")  # where state changes hands


def watched(call: Callable[[], object], at: int | None = None) -> tuple[list[str], bool]:
    """Functions entered and left during a call, and whether a Ctrl-C at one moment came out."""
    seen: list[str] = []

    def trace(frame: Any, event: str, argument: Any) -> Any:
        frame.f_trace_lines = False
        if event in ("call", "return"):
            seen.append(frame.f_code.co_name)
            if len(seen) - 1 == at:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return seen, True
    finally:
        sys.settrace(None)
    return seen, False


def moments(call: Callable[[], object], spread: int, guards: int) -> list[int]:
    """Moments all over a call, and some of those at which state changes hands."""
    call()  # what is done once a process is done
    seen, _ = watched(call)
    critical = [n for n, name in enumerate(seen) if name in GUARDS]
    chosen = {len(seen) * k // spread for k in range(spread)}
    return sorted(chosen | {critical[len(critical) * k // guards] for k in range(guards)})


def surroundings() -> tuple[Any, ...]:
    """Everything of the process that a call must leave as it was."""
    cuda, name, keys, *rest = torch.backends.cuda, *np.random.get_state()  # type: ignore[misc]
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_anomaly_enabled(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        torch._C._autograd._saved_tensors_hooks_is_enabled(),
        (cuda.math_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled()),
        (torch.autocast.__enter__, checkpoint.CheckpointFunction),
        random.getstate(),
        (name, keys.tobytes(), *rest),
        torch.get_rng_state().numpy().tobytes(),
    )


def condition(model: nn.Module) -> tuple[Any, ...]:
    """Everything of a model that a call must leave as it was, the very objects included."""
    return (
        [(n, id(p), p.requires_grad, p.grad is None) for n, p in model.named_parameters()],
        [(n, t.numpy().tobytes()) for n, t in model.state_dict().items()],
        [(m.training, len(m._forward_hooks), sorted(vars(m))) for m in model.modules()],
    )
