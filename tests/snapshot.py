"""Everything about a model and its surroundings that a call must leave alone."""

import random
from typing import Any

import numpy as np
import torch
from torch import nn

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
)


def snapshot(model: nn.Module) -> dict[str, Any]:
    """A comparable picture: values as bytes, objects by identity."""
    picture: dict[str, Any] = {}
    for name, tensor in model.state_dict().items():
        picture[f"value {name}"] = tensor.numpy().tobytes()
    for name, parameter in model.named_parameters():
        grad = None if parameter.grad is None else parameter.grad.numpy().tobytes()
        picture[f"grad {name}"] = grad
        picture[f"identity {name}"] = id(parameter)
        picture[f"requires_grad {name}"] = parameter.requires_grad
        picture[f"version {name}"] = parameter._version
        picture[f"tensor hooks {name}"] = len(parameter._backward_hooks or {})
    for name, module in model.named_modules():
        picture[f"mode {name}"] = module.training
        picture[f"attributes {name}"] = sorted(vars(module))
        picture[f"type {name}"] = type(module)
        picture[f"tensors {name}"] = _listed_tensors(module)
        for hooks in HOOKS:
            picture[f"{hooks} {name}"] = list(getattr(module, hooks))
    return picture | _surroundings()


def _listed_tensors(module: nn.Module) -> list[int]:
    """Recurrent layers keep their weights in a list beside the parameters."""
    lists = [value for value in vars(module).values() if isinstance(value, list)]
    return [id(t) for values in lists for t in values if isinstance(t, torch.Tensor)]


def _surroundings() -> dict[str, Any]:
    return {
        "torch generator": torch.get_rng_state().numpy().tobytes(),
        "numpy generator": repr(np.random.get_state()),
        "python generator": random.getstate(),
        "gradients enabled": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "attention fast path": torch.backends.mha.get_fastpath_enabled(),
        "fused attention": torch.backends.cuda.flash_sdp_enabled(),
        "efficient attention": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "math attention": torch.backends.cuda.math_sdp_enabled(),
        "global hooks": len(nn.modules.module._global_forward_hooks),
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    keys = before.keys() | after.keys()
    return sorted(key for key in keys if before.get(key) != after.get(key))
