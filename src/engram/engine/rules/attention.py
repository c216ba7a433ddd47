"""nn.MultiheadAttention in plain operations, so that its projections are seen one by one.

The library's own function is one call that hides four weights; written out, each projection is a
linear layer with a rule, and the products between them have derivatives of every order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engram.engine.rules.base import Function, writes_out

SIGNATURE = (
    *("query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight"),
    *("in_proj_bias", "bias_k", "bias_v", "add_zero_attn", "dropout_p", "out_proj_weight"),
    *("out_proj_bias",),
)


@writes_out(functional.multi_head_attention_forward)
def written_out(
    function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """The call in plain operations, where they cover it."""
    arguments = dict(zip(SIGNATURE, args, strict=False)) | kwargs
    return partial(multi_head_attention, arguments) if _covered(arguments) else None


def _covered(arguments: dict[str, Any]) -> bool:
    """Whether the plain form covers this call: batched, packed projections, no extra tokens."""
    extras = ("bias_k", "bias_v", "static_k", "static_v")
    return (
        arguments["query"].dim() == 3
        and not arguments.get("use_separate_proj_weight", False)
        and not arguments.get("add_zero_attn", False)
        and all(arguments.get(name) is None for name in extras)
        and not (arguments.get("training", True) and arguments.get("dropout_p", 0.0) > 0)
    )


def multi_head_attention(arguments: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """What ``torch.nn.functional.multi_head_attention_forward`` returns, from the same arguments.

    Shapes as there: query [T, B, E], key and value [S, B, E].
    """
    query, key = arguments["query"], arguments["key"]
    heads = arguments["num_heads"]
    projected = _project(arguments)
    length, batch, width = query.shape
    size = width // heads

    def split(x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], batch, heads, size).permute(1, 2, 0, 3)

    q, k, v = (split(x) for x in projected)
    scores = q @ k.mT / math.sqrt(size)
    mask = _mask(arguments, batch, heads, key.shape[0], scores.dtype)
    if mask is not None:
        scores = scores + mask
    weights = scores.softmax(-1)
    mixed = (weights @ v).permute(2, 0, 1, 3).reshape(length, batch, width)
    output = functional.linear(mixed, arguments["out_proj_weight"], arguments.get("out_proj_bias"))
    if not arguments.get("need_weights", True):
        return output, None
    return output, weights.mean(1) if arguments.get("average_attn_weights", True) else weights


def _project(arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    query, key, value = arguments["query"], arguments["key"], arguments["value"]
    weight, bias = arguments["in_proj_weight"], arguments.get("in_proj_bias")
    if query is key and key is value:
        return functional.linear(query, weight, bias).chunk(3, dim=-1)
    weights = weight.chunk(3)
    biases = (None, None, None) if bias is None else bias.chunk(3)
    return tuple(
        functional.linear(x, w, b)
        for x, w, b in zip((query, key, value), weights, biases, strict=True)
    )


def _mask(
    arguments: dict[str, Any], batch: int, heads: int, keys: int, dtype: torch.dtype
) -> Tensor | None:
    """Both masks as one additive term that broadcasts with the scores [B, H, T, S]."""
    total: Tensor | None = None
    attention, padding = arguments.get("attn_mask"), arguments.get("key_padding_mask")
    if attention is not None:
        shape = attention.shape
        total = _additive(attention, dtype)
        if attention.dim() == 3:
            total = total.reshape(batch, heads, shape[1], shape[2])
    if padding is not None:
        term = _additive(padding, dtype).reshape(batch, 1, 1, keys)
        total = term if total is None else total + term
    return total


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)
