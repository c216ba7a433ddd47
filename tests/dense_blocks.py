"""Kronecker blocks of a model's layers, dense, from each layer's own input and output gradient.

A layer with a block has per example n positions t and, for each column r of the curvature's root,
a gradient matrix G_nr = sum_t rows_t cols_t'. One side is the layer's input (*activation*), the
other the gradient at its output. With A and G the sums of outer products of the two sides,

    block = (1 / (N T)) * rows' factor (x) columns' factor.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from single_examples import one_example, outputs_of

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS = (nn.Linear, nn.Embedding, *CONVOLUTIONS, *TRANSPOSED)
CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@dataclass(frozen=True)
class LayerBlock:
    """Both sides of one matrix of parameters.

    layout [rows, columns] holds the place in the flat vector of each entry of the matrix;
    activations is [N, T, .], gradients [N, R, T, .]; `activation_rows` says which side the
    activation is on; `axis_aligned` that its factor is diagonal by construction.
    """

    layout: Tensor
    activations: Tensor
    gradients: Tensor
    activation_rows: bool = False
    axis_aligned: bool = False

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
        return torch.kron(rows, columns) / (num_data * self.activations.shape[1])

    def ekfac(self) -> Tensor:
        """The factors' eigenvectors with the exact second moments in that basis."""
        bases = [torch.linalg.eigh(factor).eigenvectors for factor in self.factors()]
        if self.axis_aligned:
            bases[0] = torch.eye(len(bases[0])).double()
        rotated = bases[0].T @ self.matrices() @ bases[1]
        moments = rotated.square().sum((0, 1)).reshape(-1)
        basis = torch.kron(bases[0].contiguous(), bases[1].contiguous())
        return basis @ torch.diag(moments) @ basis.T


@dataclass(frozen=True)
class Trace:
    """What one layer saw of one example: its input and the output the rest was computed from."""

    layer_input: Tensor
    output: Tensor


def layer_blocks(
    model: nn.Module,
    inputs: Any,
    places: dict[str, Tensor],
    columns: Tensor,
    jacobian: Tensor,
) -> list[LayerBlock]:
    """Blocks of all layers that ran once and whose two sides explain their whole gradient."""
    rows = torch.einsum("nkp,nkr->nrp", jacobian, columns)
    blocks = []
    for name, (activations, gradients) in _sides(model, inputs, columns).items():
        layer = model.get_submodule(name)
        for block in _blocks_of(layer, _own_places(model, layer, places), activations, gradients):
            explained = block.matrices()
            expected = rows[:, :, block.layout]
            if torch.allclose(explained, expected, rtol=1e-8, atol=1e-10):
                blocks.append(block)
    return blocks


def _own_places(model: nn.Module, layer: nn.Module, places: dict[str, Tensor]) -> dict[str, Tensor]:
    """weight and bias -> places, for those of the layer's parameters that are trained."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    own = {own: names[id(p)] for own, p in layer.named_parameters(recurse=False)}
    return {role: places[name] for role, name in own.items() if name in places}


def _sides(
    model: nn.Module, inputs: Any, columns: Tensor
) -> dict[str, tuple[list[Tensor], list[list[Tensor]]]]:
    """Per layer that ran once per example: N inputs and N x R gradients at its output."""
    sides: dict[str, tuple[list[Tensor], list[list[Tensor]]]] = {}
    repeated: set[str] = set()
    for n in range(len(columns)):
        traces, f = _run(model, one_example(inputs, n))
        repeated |= {name for name, calls in traces.items() if len(calls) != 1}
        if not traces:
            return {}
        outputs = [calls[0].output for calls in traces.values()]
        gradients = [
            torch.autograd.grad(
                f @ column, outputs, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            for column in columns[n].T
        ]
        for position, (name, calls) in enumerate(traces.items()):
            layer_inputs, output_gradients = sides.setdefault(name, ([], []))
            layer_inputs.append(calls[0].layer_input)
            output_gradients.append([of_column[position] for of_column in gradients])
    return {name: side for name, side in sides.items() if name not in repeated}


def _run(model: nn.Module, example: Any) -> tuple[dict[str, list[Trace]], Tensor]:
    traces: dict[str, list[Trace]] = {}
    handles = []
    for name, layer in model.named_modules():
        if isinstance(layer, LAYERS):

            def record(_: nn.Module, args: Any, output: Tensor, name: str = name) -> Tensor:
                if not output.requires_grad:
                    return output
                trace = Trace(args[0].detach().clone(), output)
                traces.setdefault(name, []).append(trace)
                # A later in-place operation then changes the copy, not what was recorded.
                return output.clone()

            handles.append(layer.register_forward_hook(record))
    f = outputs_of(model, example)
    for handle in handles:
        handle.remove()
    return traces, f


def _blocks_of(
    layer: nn.Module,
    own: dict[str, Tensor],
    activations: list[Tensor],
    gradients: list[list[Tensor]],
) -> Iterator[LayerBlock]:
    if "weight" not in own:
        return
    if isinstance(layer, nn.Linear):
        yield _linear(own, activations, gradients)
    elif isinstance(layer, nn.Embedding):
        yield _embedding(layer, own, activations, gradients)
    elif isinstance(layer, CONVOLUTIONS):
        yield from _convolution(layer, own, activations, gradients)
    else:
        yield from _transposed(layer, own, activations, gradients)


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
    layer: nn.Embedding,
    own: dict[str, Tensor],
    inputs: list[Tensor],
    grads: list[list[Tensor]],
) -> LayerBlock:
    tokens = torch.stack([a.reshape(-1) for a in inputs])
    activations = F.one_hot(tokens, layer.num_embeddings).double()
    return LayerBlock(
        own["weight"], activations, _stack(grads), activation_rows=True, axis_aligned=True
    )


def patches(image: Tensor, kernel: tuple[int, ...], **settings: Any) -> Tensor:
    """[T, C * kernel] what a convolution sees at each position, by convolving with one-hots."""
    channels, size = image.shape[1], torch.Size(kernel).numel()
    one_hot = torch.eye(channels * size).double().reshape(channels * size, channels, *kernel)
    return CONVOLVE[len(kernel)](image, one_hot, **settings)[0].flatten(1).T


def _convolution(
    layer: nn.Conv2d, own: dict[str, Tensor], inputs: list[Tensor], grads: list[list[Tensor]]
) -> Iterator[LayerBlock]:
    settings = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}
    if layer.padding_mode != "zeros":
        mode, amounts = layer.padding_mode, layer._reversed_padding_repeated_twice
        inputs = [F.pad(a, amounts, mode=mode) for a in inputs]
        settings["padding"] = 0
    channels_last = _stack([[g.movedim(1, -1) for g in of_example] for of_example in grads])
    groups = layer.groups
    for group in range(groups):
        parts = {role: place.chunk(groups)[group] for role, place in own.items()}
        seen = [patches(a.chunk(groups, 1)[group], layer.kernel_size, **settings) for a in inputs]
        layout, activations = _with_bias(parts, parts["weight"].flatten(1), torch.stack(seen))
        yield LayerBlock(layout, activations, channels_last.chunk(groups, -1)[group])


def _transposed(
    layer: nn.ConvTranspose2d,
    own: dict[str, Tensor],
    inputs: list[Tensor],
    grads: list[list[Tensor]],
) -> Iterator[LayerBlock]:
    """Rows are input channels, columns the output gradient unfolded to the input's positions."""
    settings = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}
    groups = layer.groups
    for group in range(groups):
        seen = torch.stack([a.chunk(groups, 1)[group][0].flatten(1).T for a in inputs])
        unfolded = [
            [patches(g.chunk(groups, 1)[group], layer.kernel_size, **settings) for g in of_example]
            for of_example in grads
        ]
        layout = own["weight"].chunk(groups)[group].flatten(1)
        yield LayerBlock(layout, seen, _stack(unfolded), activation_rows=True)
