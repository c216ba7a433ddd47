"""Attention and recurrence written out in plain operations give what the library's calls give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from engram.engine.rules import plain_form


class WrittenOut(TorchFunctionMode):
    """Runs what has a plain form by it, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        plain = plain_form(function, args, kwargs or {})
        if plain is None:
            return function(*args, **(kwargs or {}))
        self.count += 1
        return plain()


def compared(module: nn.Module, *args: Any, **kwargs: Any) -> int:
    """How many calls were written out; their results are the library's."""
    expected = module(*args, **kwargs)
    with WrittenOut() as mode:
        found = module(*args, **kwargs)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    return mode.count


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_layers": 2, "bidirectional": True, "batch_first": True},
        {"bias": False, "num_layers": 2},
    ],
)
def test_recurrence(kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    assert compared(kind(3, 4, **options).double(), drawn(5, 2, 3)) == 1


def test_recurrence_with_relu() -> None:
    assert compared(nn.RNN(3, 4, nonlinearity="relu").double(), drawn(5, 2, 3)) == 1


def test_recurrence_that_is_left_as_it_is() -> None:
    """One whose state is projected."""
    assert compared(nn.LSTM(3, 4, proj_size=2).double(), drawn(5, 2, 3)) == 0


PADDING = torch.tensor([[False, False, True], [False, False, False]])
ABOVE = torch.triu(torch.ones(3, 3, dtype=torch.bool), 1)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"need_weights": False},
        {"average_attn_weights": False},
        {"key_padding_mask": PADDING},
        {"attn_mask": ABOVE, "key_padding_mask": PADDING},
        {"attn_mask": drawn(4, 3, 3)},
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_attention(given: dict[str, Any], bias: bool) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(4, 2, bias=bias, batch_first=True).double()
    x, other = drawn(2, 3, 4), drawn(2, 3, 4).cos()
    assert compared(module, x, x, x, **given) == 1
    assert compared(module, x, other, other.sin(), **given) == 1


@pytest.mark.parametrize(
    "options", [{"add_zero_attn": True}, {"add_bias_kv": True}, {"kdim": 3, "vdim": 3}]
)
def test_attention_that_is_left_as_it_is(options: dict[str, Any]) -> None:
    module = nn.MultiheadAttention(4, 2, **options).double()
    other = drawn(3, 2, 3 if "kdim" in options else 4)
    assert compared(module, drawn(3, 2, 4), other, other) == 0
