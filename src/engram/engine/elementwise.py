"""Operations on two tensors, entry by entry, with one copy of a parameter per example.

Broadcasting puts every example's copy beside its data; nothing has to be mapped over examples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engram.engine.rules import Function

FUNCTIONS: set[Function] = {
    *(torch.add, torch.sub, torch.mul, torch.div, torch.max, torch.min),
    *(torch.maximum, torch.minimum, Tensor.maximum, Tensor.minimum, Tensor.max, Tensor.min),
    *(Tensor.add, Tensor.sub, Tensor.mul, Tensor.div, Tensor.__rsub__, Tensor.__rdiv__),
}
FIRST = (0, 1)  # examples are counted by the first dimension, one entry each


def beside_data(
    args: Sequence[object],
    scales: Sequence[tuple[int, int] | None],
    per_example: Callable[[Tensor], Tensor | None],
) -> tuple[Tensor, Tensor] | None:
    """Data and copies of a parameter with dimensions that line up; None where they do not.

    Args:
        args: of the operation.
        scales: which dimension counts examples, for each tensor.
        per_example: a parameter once per example, [B, *shape]; None for data.
    """
    if len(args) != 2 or not all(isinstance(value, Tensor) for value in args):
        return None
    first, second = args
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    if scales[0] == FIRST and scales[1] is None:
        copies = _lined_up(second, first, per_example)
        return None if copies is None else (first, copies)
    if scales[1] == FIRST and scales[0] is None:
        copies = _lined_up(first, second, per_example)
        return None if copies is None else (copies, second)
    return None


def _lined_up(
    parameter: Tensor, data: Tensor, per_example: Callable[[Tensor], Tensor | None]
) -> Tensor | None:
    """[B, *shape] with the parameter's dimensions at the data's last ones."""
    shape = parameter.shape
    if len(shape) == data.dim() and shape[0] == 1:
        shape = shape[1:]
    missing = data.dim() - 1 - len(shape)
    copies = per_example(parameter) if missing >= 0 else None
    return None if copies is None else copies.reshape(len(copies), *[1] * missing, *shape)
