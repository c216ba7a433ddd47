"""One example of a batch of inputs, and the model's outputs on it as a vector [K]."""

from typing import Any

from torch import Tensor, nn


def select(inputs: Any, indices: Any) -> Any:
    """The inputs of some examples, of a tensor, a tuple of them or a dict of them."""
    if isinstance(inputs, dict):
        return {name: value[indices] for name, value in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(value[indices] for value in inputs)
    return inputs[indices]


def one_example(inputs: Any, n: int) -> Any:
    """Example n as a batch of one."""
    return select(inputs, slice(n, n + 1))


def raw_outputs(model: nn.Module, inputs: Any) -> Tensor:
    """Call a model on a tensor, a tuple (positional) or a dict (by name)."""
    if isinstance(inputs, dict):
        outputs = model(**inputs)
    elif isinstance(inputs, tuple):
        outputs = model(*inputs)
    else:
        outputs = model(inputs)
    return outputs if isinstance(outputs, Tensor) else outputs.logits


def outputs_of(model: nn.Module, inputs: Any) -> Tensor:
    return raw_outputs(model, inputs).reshape(-1)
