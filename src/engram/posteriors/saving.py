"""A posterior in a folder: its mean and the parts of its blocks by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engram.curvature.kinds import Curvature
from engram.errors import DataError, PosteriorError
from engram.folders import read_folder, write_folder
from engram.likelihoods.remembered import described, restored
from engram.parameters import Layout
from engram.posteriors.blocks import Block, DenseBlock, EigenBlock
from engram.posteriors.low_rank import LowRankBlock

FORMAT = 2
ABOUT = (
    *("structure", "prior_precision", "num_data", "settings", "prior_by_name"),
    *("curvature", "exact", "scale", "likelihood"),
)
KINDS: dict[str, type[Any]] = {
    "eigen": EigenBlock,
    "dense": DenseBlock,
    "low_rank": LowRankBlock,
}


def write(
    folder: Path, mean: Mapping[str, Tensor], blocks: Sequence[Block], about: Mapping[str, Any]
) -> None:
    """Write a posterior.

    Args:
        folder: is made where it is missing.
        mean: parameters by name.
        blocks: of the precision.
        about: everything else, which JSON can hold, under the names of ``ABOUT``.
    """
    kinds = [{"kind": _kind(block), **_described(block.layout)} for block in blocks]
    description = {"format": FORMAT, "names": list(mean), "blocks": kinds, **about}
    description["likelihood"] = described(about["likelihood"])
    write_folder(folder, "posterior", tensors_of(mean, blocks), description)


def tensors_of(mean: Mapping[str, Tensor], blocks: Sequence[Block]) -> dict[str, Tensor]:
    """Everything that a posterior's numbers come from, by name."""
    tensors = {f"mean {name}": value for name, value in mean.items()}
    for number, block in enumerate(blocks):
        tensors |= {f"block {number} {name}": part for name, part in _parts(block).items()}
    return tensors


def read(folder: Path, device: torch.device) -> dict[str, Any]:
    """What :func:`write` was given, by name."""
    tensors, description = read_folder(folder, "posterior", FORMAT, str(device))
    try:
        mean = {name: tensors[f"mean {name}"] for name in description["names"]}
        blocks = tuple(
            _block(number, kind, tensors) for number, kind in enumerate(description["blocks"])
        )
        about = {name: description[name] for name in ABOUT}
        about["curvature"] = Curvature(about["curvature"])
        about["likelihood"] = restored(about["likelihood"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            "an undamaged posterior", f"{folder} without {error}", "save it again"
        ) from error
    return {"mean": mean, "blocks": blocks, **about}


def _kind(block: Block) -> str:
    for name, kind in KINDS.items():
        if type(block) is kind:
            return name
    raise PosteriorError(
        f"blocks of the kinds {', '.join(KINDS)}",
        type(block).__name__,
        "save the posterior that engram.laplace or engram.posterior_of returned",
    )


def _described(layout: Layout) -> dict[str, Any]:
    return {"names": list(layout.names), "shapes": [list(shape) for shape in layout.shapes]}


def _parts(block: Block) -> dict[str, Tensor]:
    """Tensors of a block, and its numbers as tensors: JSON has no infinity."""
    found: dict[str, Tensor] = {}
    for name in _given(type(block)):
        value = getattr(block, name)
        if isinstance(value, float | int):
            value = torch.tensor(float(value), dtype=torch.float64)
        if value is not None:
            found[name] = value
    return found


def _given(kind: type[Any]) -> list[str]:
    """What a block is made of, its layout aside."""
    return [field.name for field in fields(kind) if field.init and field.name != "layout"]


def _block(number: int, described: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Block:
    kind = KINDS[described["kind"]]
    shapes = tuple(torch.Size(shape) for shape in described["shapes"])
    values: dict[str, Any] = {}
    for field in fields(kind):
        part = tensors.get(f"block {number} {field.name}")
        if part is not None:
            values[field.name] = float(part) if field.type == "float" else part
    block: Block = kind(layout=Layout(tuple(described["names"]), shapes), **values)
    return block
