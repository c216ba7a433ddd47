"""Kronecker blocks of a model's layers, dense, from each layer's own input and output gradient.

A weight applied once per example, as a linear map, a convolution or an embedding, has a block;
everything else (applied twice, used otherwise as well, not in such a map) has none.

A block has per example n positions t and, for each column r of the curvature's root, a gradient
matrix G_nr = sum_t rows_t cols_t'. One side is the layer's input (*activation*), the other the
gradient at its output. With A and G the sums of outer products of the two sides,

    block = (1 / (N T)) * rows' factor (x) columns' factor.

Positions that no gradient reaches at any layer with as many of them, such as padding, count neither
in A nor in T, where a layer's inputs are rows of a matrix.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recorded_calls import CONVOLUTIONS, Call, record
from single_examples import one_example

BY_ROWS = ("linear", "__matmul__", "embedding")
CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@dataclass(frozen=True)
class LayerBlock:
    """Both sides of one matrix of parameters.

    layout [rows, columns] holds the place in the flat vector of each entry of the matrix;
    activations is [N, T, .], gradients [N, R, T, .]; `activation_rows` says which side the
    activation is on; `axis_aligned` that its factor is diagonal by construction; `share` is that of
    the positions that count.
    """

    layout: Tensor
    activations: Tensor
    gradients: Tensor
    activation_rows: bool = False
    axis_aligned: bool = False
    share: float = 1.0

    def at(self, counted: Tensor) -> "LayerBlock":
        """The block of these positions alone, [N, T]."""
        share = float(counted.double().mean())
        return replace(self, activations=self.activations * counted[:, :, None], share=share)

    def matrices(self) -> Tensor:
        """G_nr, [N, R, rows, columns]."""
        equation = "nta,nrtg->nrag" if self.activation_rows else "nta,nrtg->nrga"
        return torch.einsum(equation, self.activations, self.gradients)

    def factors(self) -> tuple[Tensor, Tensor]:
        """(rows' factor, columns' factor), unnormalised sums of outer products."""
        activation = torch.einsum("nta,ntb->ab", self.activations, self.activations)
        gradient = torch.einsum("nrtg,nrth->gh", self.gradients, self.gradients)
        return (activation, gradient) if self.activation_rows else (gradient, activation)

    def kronecker(self, num_data: int) -> Tensor:
        rows, columns = self.factors()
        return torch.kron(rows, columns) / (num_data * self.share * self.activations.shape[1])

    @property
    def acts_once(self) -> bool:
        """Whether the layer meets every example at one position, its input as columns."""
        return self.activations.shape[1] == 1 and not self.activation_rows

    def ekfac(self) -> Tensor:
        """The factors' eigenvectors with the exact second moments in that basis."""
        bases = [torch.linalg.eigh(factor).eigenvectors for factor in self.factors()]
        if self.axis_aligned:
            bases[0] = torch.eye(len(bases[0])).double()
        rotated = bases[0].T @ self.matrices() @ bases[1]
        moments = rotated.square().sum((0, 1)).reshape(-1)
        basis = torch.kron(bases[0].contiguous(), bases[1].contiguous())
        return basis @ torch.diag(moments) @ basis.T


def layer_blocks(
    model: nn.Module,
    inputs: Any,
    places: dict[str, Tensor],
    columns: Tensor,
    jacobian: Tensor,
) -> list[LayerBlock]:
    """Blocks of all weights applied once whose two sides explain their whole gradient."""
    rows = torch.einsum("nkp,nkr->nrp", jacobian, columns)
    blocks = []
    every = _all_sides(model, inputs, columns, set(places))
    counted = _counted(every)
    for sides in every:
        for block in _blocks_of(sides, places):
            if sides.calls[0].function in BY_ROWS:
                block = block.at(counted[block.activations.shape[1]])
            if torch.allclose(block.matrices(), rows[:, :, block.layout], rtol=1e-8, atol=1e-10):
                blocks.append(block)
    return blocks


@dataclass
class Sides:
    """One weight's applications to the N examples and the N x R gradients at their outputs."""

    calls: list[Call]
    gradients: list[list[Tensor]]

    @property
    def inputs(self) -> list[Tensor]:
        return [call.layer_input for call in self.calls]


def _all_sides(model: nn.Module, inputs: Any, columns: Tensor, names: set[str]) -> list[Sides]:
    """For each weight that every example meets exactly once."""
    sides: dict[str, Sides] = {}
    for n in range(len(columns)):
        calls, f = record(model, one_example(inputs, n), names)
        gradients = [
            torch.autograd.grad(
                f @ column,
                [call.output for call in calls],
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            for column in columns[n].T
            if calls
        ]
        for position, call in enumerate(calls):
            side = sides.setdefault(call.weight, Sides([], []))
            side.calls.append(call)
            side.gradients.append([of_column[position] for of_column in gradients])
    return [side for side in sides.values() if len(side.calls) == len(columns)]


def _counted(every: list[Sides]) -> dict[int, Tensor]:
    """Positions [N, T] that gradients reach at some layer, by T; all of an example without any."""
    found: dict[int, Tensor] = {}
    for sides in every:
        if sides.calls[0].function in BY_ROWS:
            reached = _stack(sides.gradients).abs().sum((1, 3)) > 0
            length = reached.shape[1]
            found[length] = reached | found.get(length, torch.zeros_like(reached))
    return {length: mask | ~mask.any(1, keepdim=True) for length, mask in found.items()}


def _blocks_of(sides: Sides, places: dict[str, Tensor]) -> Iterator[LayerBlock]:
    call = sides.calls[0]
    own = {"weight": places[call.weight]}
    if call.bias is not None:
        own["bias"] = places[call.bias]
    if call.function == "linear":
        yield _linear(own, sides.inputs, sides.gradients)
    elif call.function == "__matmul__":
        activations = torch.stack([a.reshape(-1, a.shape[-1]) for a in sides.inputs])
        yield LayerBlock(own["weight"], activations, _stack(sides.gradients), activation_rows=True)
    elif call.function == "embedding":
        yield _embedding(own, sides.inputs, sides.gradients)
    elif call.function in CONVOLUTIONS:
        yield from _convolution(call.settings, own, sides.inputs, sides.gradients)
    else:
        yield from _transposed(call.settings, own, sides.inputs, sides.gradients)


def _stack(gradients: list[list[Tensor]]) -> Tensor:
    """[N, R, T, out] of gradients whose last dimension is the layer's output."""
    return torch.stack(
        [torch.stack([g.reshape(-1, g.shape[-1]) for g in of_example]) for of_example in gradients]
    )


def _with_bias(
    own: dict[str, Tensor], layout: Tensor, activations: Tensor
) -> tuple[Tensor, Tensor]:
    """The bias as the last column of the matrix, its input the constant 1."""
    if "bias" not in own:
        return layout, activations
    ones = torch.ones(*activations.shape[:-1], 1).double()
    return torch.cat([layout, own["bias"][:, None]], 1), torch.cat([activations, ones], -1)


def _linear(own: dict[str, Tensor], inputs: list[Tensor], grads: list[list[Tensor]]) -> LayerBlock:
    activations = torch.stack([a.reshape(-1, a.shape[-1]) for a in inputs])
    layout, activations = _with_bias(own, own["weight"], activations)
    return LayerBlock(layout, activations, _stack(grads))


def _embedding(
    own: dict[str, Tensor], inputs: list[Tensor], grads: list[list[Tensor]]
) -> LayerBlock:
    tokens = torch.stack([a.reshape(-1) for a in inputs])
    activations = F.one_hot(tokens, len(own["weight"])).double()
    return LayerBlock(
        own["weight"], activations, _stack(grads), activation_rows=True, axis_aligned=True
    )


def patches(image: Tensor, kernel: tuple[int, ...], settings: dict[str, Any]) -> Tensor:
    """[T, C * kernel] what a convolution sees at each position, by convolving with one-hots."""
    channels, size = image.shape[1], torch.Size(kernel).numel()
    one_hot = torch.eye(channels * size).double().reshape(channels * size, channels, *kernel)
    moves = {name: settings[name] for name in ("stride", "padding", "dilation")}
    return CONVOLVE[len(kernel)](image, one_hot, **moves)[0].flatten(1).T


def _convolution(
    settings: dict[str, Any],
    own: dict[str, Tensor],
    inputs: list[Tensor],
    grads: list[list[Tensor]],
) -> Iterator[LayerBlock]:
    channels_last = _stack([[g.movedim(1, -1) for g in of_example] for of_example in grads])
    groups, kernel = settings["groups"], own["weight"].shape[2:]
    for group in range(groups):
        parts = {role: place.chunk(groups)[group] for role, place in own.items()}
        seen = [patches(a.chunk(groups, 1)[group], kernel, settings) for a in inputs]
        layout, activations = _with_bias(parts, parts["weight"].flatten(1), torch.stack(seen))
        yield LayerBlock(layout, activations, channels_last.chunk(groups, -1)[group])


def _transposed(
    settings: dict[str, Any],
    own: dict[str, Tensor],
    inputs: list[Tensor],
    grads: list[list[Tensor]],
) -> Iterator[LayerBlock]:
    """Rows are input channels, columns the output gradient unfolded to the input's positions."""
    groups, kernel = settings["groups"], own["weight"].shape[2:]
    for group in range(groups):
        seen = torch.stack([a.chunk(groups, 1)[group][0].flatten(1).T for a in inputs])
        unfolded = [
            [patches(g.chunk(groups, 1)[group], kernel, settings) for g in of_example]
            for of_example in grads
        ]
        layout = own["weight"].chunk(groups)[group].flatten(1)
        yield LayerBlock(layout, seen, _stack(unfolded), activation_rows=True)
