"""Named tensors and the flat vector they make: the one place that computes offsets."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from engram.core.dtypes import wide
from engram.errors import ArgumentError, EngineError, NonFiniteError

Named = dict[str, Tensor]


def uncompiled(model: nn.Module) -> nn.Module:
    """The model itself where ``torch.compile``, DDP or DataParallel wrapped it.

    They have no passes of ours, and weights under other names.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> uncompiled(torch.compile(model)) is uncompiled(model) is model
        True
    """
    if isinstance(model, (DistributedDataParallel, nn.DataParallel)):
        return uncompiled(model.module)
    inner = getattr(model, "_orig_mod", None)
    return uncompiled(inner) if isinstance(inner, nn.Module) else model


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that require gradients; a tied weight appears once, under its first name."""
    return {n: p for n, p in uncompiled(model).named_parameters() if p.requires_grad}


def frozen(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that do not require gradients: fixed, whatever data is left out."""
    return {n: p for n, p in uncompiled(model).named_parameters() if not p.requires_grad}


def hold_all_but(model: nn.Module, names: Collection[str]) -> dict[str, nn.Parameter]:
    """Have all other parameters require no gradients; those that did, by name.

    What is computed from them alone then keeps nothing for a backward pass. Call inside
    :func:`engram.core.state.model.state_preserved`, which takes it back.
    """
    held = {name: p for name, p in trainable(model).items() if name not in names}
    for parameter in held.values():
        parameter.requires_grad_(False)
    return held


def count(parameters: Iterable[Tensor]) -> int:
    """Number of entries in all of them."""
    return sum(p.numel() for p in parameters)


def square_norm(vectors: Mapping[str, Tensor]) -> float:
    """Squared Euclidean norm of a named vector."""
    return float(sum((wide(v) ** 2).sum() for v in vectors.values()))


def inner(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """Inner product of two named vectors."""
    return float(sum((wide(left[name]) * wide(right[name])).sum() for name in left))


def check_module(model: nn.Module) -> None:
    """Raise unless it is a module with real weights in memory."""
    if not isinstance(model, nn.Module):
        got = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise ArgumentError("a model that is a torch.nn.Module", got, "pass the model itself")
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise EngineError(
                "a model whose layers know their sizes",
                f"{name!r} of a lazy layer that has not seen data",
                "run the model on one batch before, and train it",
            )
        if parameter.is_meta:
            raise EngineError(
                "a model with its weights in memory",
                f"{name!r} on the meta device",
                "load the weights onto a device",
            )
        if parameter.is_inference():
            raise EngineError(
                "a model that can be differentiated",
                f"{name!r} made under torch.inference_mode()",
                "make or load the model outside of it",
            )
        if parameter.is_complex():
            raise EngineError(
                "real parameters", f"complex numbers in {name!r}", "split them in two"
            )


def check_one_type(model: nn.Module) -> None:
    """EngineError where trainable parameters have several types, which no precision fits."""
    first = {p.dtype: name for name, p in reversed(trainable(model).items())}
    if len(first) > 1:
        found = ", ".join(f"{kind} in {name!r}" for kind, name in first.items())
        raise EngineError(
            "trainable parameters of one type",
            found,
            "convert the model with .float() or .double()",
        )


def check_finite_weights(model: nn.Module) -> None:
    """NonFiniteError if a weight is NaN or infinite."""
    check_module(model)
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter.detach()).all():
            raise NonFiniteError(
                "finite weights",
                f"NaN or infinity in the parameter {name!r}",
                "restore an earlier checkpoint, or lower the learning rate",
            )


@dataclass(frozen=True)
class Layout:
    """Where each named tensor stands in the flat vector theta in R^P.

    Example:
        >>> layout = Layout.of({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)})
        >>> layout.num_params
        8
        >>> flat = layout.flatten({"weight": torch.ones(5, 2, 3), "bias": torch.zeros(5, 2)})
        >>> flat.shape, layout.unflatten(flat)["weight"].shape
        (torch.Size([5, 8]), torch.Size([5, 2, 3]))
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Layout:
        """Layout of these tensors, in their order."""
        return cls(tuple(tensors), tuple(t.shape for t in tensors.values()))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Entries of each tensor."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def num_params(self) -> int:
        """P, the length of the flat vector."""
        return sum(self.sizes)

    def flatten(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """[..., *shape] per name -> [..., P]."""
        parts = []
        for name, shape in zip(self.names, self.shapes, strict=True):
            vector = vectors[name]
            lead = vector.shape[: vector.dim() - len(shape)]
            parts.append(vector.reshape(*lead, math.prod(shape)))
        return torch.cat(parts, dim=-1)

    def unflatten(self, flat: Tensor) -> Named:
        """[..., P] -> [..., *shape] per name."""
        parts = flat.split(self.sizes, dim=-1)
        return {
            name: part.reshape((*flat.shape[:-1], *shape))
            for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }
