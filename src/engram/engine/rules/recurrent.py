"""Recurrent layers in plain operations: one linear layer per step, all with the same weights.

The fused kernels know neither second derivatives nor weights that differ between examples.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engram.engine.rules.base import Function, writes_out

State = tuple[Tensor, ...]
Cell = Callable[[Tensor, Tensor, State], State]


def _lstm_cell(from_input: Tensor, from_state: Tensor, state: State) -> State:
    inward, forget, candidate, outward = (from_input + from_state).chunk(4, dim=-1)
    memory = forget.sigmoid() * state[1] + inward.sigmoid() * candidate.tanh()
    return outward.sigmoid() * memory.tanh(), memory


def _gru_cell(from_input: Tensor, from_state: Tensor, state: State) -> State:
    reset_x, update_x, new_x = from_input.chunk(3, dim=-1)
    reset_h, update_h, new_h = from_state.chunk(3, dim=-1)
    update = (update_x + update_h).sigmoid()
    new = (new_x + (reset_x + reset_h).sigmoid() * new_h).tanh()
    return ((1 - update) * new + update * state[0],)


def _tanh_cell(from_input: Tensor, from_state: Tensor, state: State) -> State:
    return ((from_input + from_state).tanh(),)


def _relu_cell(from_input: Tensor, from_state: Tensor, state: State) -> State:
    return ((from_input + from_state).relu(),)


CELLS: dict[Function, Cell] = {
    torch.lstm: _lstm_cell,
    torch.gru: _gru_cell,
    torch.rnn_tanh: _tanh_cell,
    torch.rnn_relu: _relu_cell,
}


@writes_out(*CELLS)
def written_out(
    function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """The call in plain operations, where they cover it."""
    return partial(run, function, args) if _covered(args) else None


def _covered(args: tuple[Any, ...]) -> bool:
    """Padded batches without dropout and without a projection of the state."""
    if len(args) != 9 or not isinstance(args[3], bool):
        return False
    data, _, weights, has_biases, layers, dropout, train, two_way, _ = args
    per_direction = 4 if has_biases else 2
    plain = len(weights) == per_direction * layers * (2 if two_way else 1)
    return data.dim() == 3 and plain and not (train and dropout > 0)


def run(function: Function, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """What the fused function returns, from the same arguments."""
    data, state, weights, has_biases, layers, _, _, two_way, batch_first = args
    states: State = tuple(state) if isinstance(state, (tuple, list)) else (state,)
    x = data.transpose(0, 1) if batch_first else data
    directions = 2 if two_way else 1
    size = 4 if has_biases else 2
    finals: list[State] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            which = layer * directions + direction
            own = weights[which * size : (which + 1) * size]
            start = tuple(s[which] for s in states)
            sequence, final = _run_direction(CELLS[function], x, start, own, direction == 1)
            outputs.append(sequence)
            finals.append(final)
        x = torch.cat(outputs, dim=-1) if directions == 2 else outputs[0]
    stacked = tuple(torch.stack(parts) for parts in zip(*finals, strict=True))
    return (x.transpose(0, 1) if batch_first else x, *stacked)


def _run_direction(
    cell: Cell, x: Tensor, state: State, weights: list[Tensor], backwards: bool
) -> tuple[Tensor, State]:
    input_weight, state_weight = weights[:2]
    input_bias, state_bias = weights[2:] if len(weights) == 4 else (None, None)
    from_input = functional.linear(x, input_weight, input_bias).unbind(0)
    steps: list[Tensor] = []
    for part in reversed(from_input) if backwards else from_input:
        state = cell(part, functional.linear(state[0], state_weight, state_bias), state)
        steps.append(state[0])
    return torch.stack(steps[::-1] if backwards else steps), state
