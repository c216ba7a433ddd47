"""Every linear map, convolution and embedding that a model applies, with what went in and out.

Seen at `torch.nn.functional`, where layers, attention and a user's own code all pass; products
`x @ W` at the tensor.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch.nn.functional as F
from torch import Tensor, nn

from single_examples import outputs_of

CONVOLUTIONS = {"conv1d": 1, "conv2d": 2, "conv3d": 3}
TRANSPOSED = {"conv_transpose1d": 1, "conv_transpose2d": 2, "conv_transpose3d": 3}
_STRIDE = {"bias": None, "stride": 1, "padding": 0}
DEFAULTS: dict[str, dict[str, Any]] = {
    "linear": {"bias": None},
    "embedding": {},
    "__matmul__": {},
    **dict.fromkeys(CONVOLUTIONS, _STRIDE | {"dilation": 1, "groups": 1}),
    **dict.fromkeys(TRANSPOSED, _STRIDE | {"output_padding": 0, "groups": 1, "dilation": 1}),
}
"""What follows (input, weight) in each function's arguments."""


@dataclass(frozen=True)
class Call:
    """One application: the function's name, its input, its output and its settings.

    `weight` and `bias` are names of trained parameters; bias is None where it is not one.
    """

    function: str
    weight: str
    bias: str | None
    layer_input: Tensor
    output: Tensor
    settings: dict[str, Any] = field(default_factory=dict)


def record(model: nn.Module, example: Any, names: set[str]) -> tuple[list[Call], Tensor]:
    """All calls whose weight is one of the named parameters, and the outputs [K]."""
    name_of = {id(p): name for name, p in model.named_parameters() if name in names}
    calls: list[Call] = []
    with _recording(name_of, calls):
        outputs = outputs_of(model, example)
    return calls, outputs


@contextmanager
def _recording(name_of: dict[int, str], calls: list[Call]) -> Iterator[None]:
    with ExitStack() as stack:
        for function in DEFAULTS:
            owner = Tensor if function == "__matmul__" else F
            recorder = _recorder(function, getattr(owner, function), name_of, calls)
            stack.enter_context(patch.object(owner, function, recorder))
        yield


def _recorder(
    function: str, original: Callable[..., Tensor], name_of: dict[int, str], calls: list[Call]
) -> Callable[..., Tensor]:
    def recorded(layer_input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output = original(layer_input, weight, *args, **kwargs)
        if id(weight) not in name_of or isinstance(layer_input, nn.Parameter):
            return output
        settings = DEFAULTS[function] | dict(zip(DEFAULTS[function], args, strict=False)) | kwargs
        bias = name_of.get(id(settings.pop("bias", None)))
        before = layer_input.detach().clone()
        calls.append(Call(function, name_of[id(weight)], bias, before, output, settings))
        # A later in-place operation then changes the copy, not what was recorded.
        return output.clone()

    return recorded
