"""Which rule an operation has, and the names of its arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from engram.engine.layers import Convolution, Linear, TransposedConvolution
from engram.engine.norms import ChannelNorm, Embedding, TrailingNorm
from engram.engine.rules import Bound, Function, Rule

_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")

SIGNATURES: dict[Function, tuple[str, ...]] = {
    functional.linear: ("input", "weight", "bias"),
    torch.conv1d: _CONVOLUTION,
    torch.conv2d: _CONVOLUTION,
    torch.conv3d: _CONVOLUTION,
    torch.conv_transpose2d: (
        *("input", "weight", "bias", "stride"),
        *("padding", "output_padding", "groups", "dilation"),
    ),
    functional.embedding: (
        *("input", "weight", "padding_idx", "max_norm"),
        *("norm_type", "scale_grad_by_freq", "sparse"),
    ),
    functional.layer_norm: ("input", "normalized_shape", "weight", "bias", "eps"),
    functional.rms_norm: ("input", "normalized_shape", "weight", "eps"),
    functional.group_norm: ("input", "num_groups", "weight", "bias", "eps"),
    functional.batch_norm: (
        *("input", "running_mean", "running_var", "weight"),
        *("bias", "training", "momentum", "eps"),
    ),
}

RULES: dict[Function, Rule] = {
    function: rule
    for rule in (
        Linear(),
        Convolution(),
        TransposedConvolution(),
        TrailingNorm(),
        ChannelNorm(),
        Embedding(),
    )
    for function in rule.functions
}


def bind(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound | None:
    """The call's arguments by meaning, or None where no rule holds."""
    rule = RULES.get(function)
    if rule is None:
        return None
    arguments = dict(zip(SIGNATURES[function], args, strict=False)) | kwargs
    return rule.bind(arguments | {"function": function})
