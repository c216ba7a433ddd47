"""A posterior in a folder: its fields, and its blocks with the name of their kind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from engram.core.errors import EngramError, PosteriorError, StorageError
from engram.core.storage.folder import read_folder, write_folder
from engram.core.storage.values import init_fields, read_fields, wrong
from engram.likelihoods.remembered import described, read_likelihood
from engram.linalg.block import Block
from engram.linalg.dense import DenseBlock
from engram.linalg.diagonal import DiagonalBlock
from engram.linalg.kronecker import KroneckerBlock
from engram.linalg.low_rank import LowRankBlock
from engram.posteriors.whole import check_blocks, check_mean

FORMAT = 3
KIND = "kind"
KINDS: dict[str, type[Any]] = {
    "diagonal": DiagonalBlock,
    "kronecker": KroneckerBlock,
    "dense": DenseBlock,
    "low_rank": LowRankBlock,
}


def content_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What is written of the fields of a posterior."""
    blocks = fields["blocks"]
    if not isinstance(blocks, tuple | list):
        raise wrong("a posterior", "blocks", blocks)
    parts = [{KIND: _kind(block)} | init_fields(block) for block in blocks]
    own = {"blocks": parts, "likelihood": described(fields["likelihood"])}
    return dict(fields) | own


def write(folder: str | Path, content: Mapping[str, Any]) -> Path:
    """Write what :func:`content_of` gave."""
    return write_folder(folder, "posterior", FORMAT, content)


def read(folder: str | Path, device: torch.device) -> Any:
    """What :func:`write` wrote."""
    return read_folder(folder, "posterior", FORMAT, str(device))


def checked(content: Any, kind: type[Any]) -> dict[str, Any]:
    """The fields of a posterior from what was read.

    Args:
        content: that was read.
        kind: the posterior's class, for the types of its fields.
    """
    fields = read_fields(
        kind, content, "posterior.json", {"blocks": _blocks, "likelihood": read_likelihood}
    )
    check_mean(fields["mean"])
    check_blocks(fields["blocks"], fields["mean"])
    return fields


def _kind(block: Block) -> str:
    for name, kind in KINDS.items():
        if type(block) is kind:
            return name
    raise PosteriorError(
        f"blocks of the kinds {', '.join(KINDS)}",
        type(block).__name__,
        "save the posterior that engram.laplace or engram.posterior_of returned",
    )


def _blocks(values: Any, where: str) -> tuple[Block, ...]:
    if not isinstance(values, list):
        raise wrong(where, "a list", values)
    return tuple(_block(value, f"{where}[{number}]") for number, value in enumerate(values))


def _block(value: Any, where: str) -> Block:
    if not isinstance(value, dict) or value.get(KIND) not in list(KINDS):
        raise wrong(where, f"an object of the kind {' or '.join(KINDS)}", value)
    kind = KINDS[value.pop(KIND)]
    parts = read_fields(kind, value, where)
    try:
        block: Block = kind(**parts)
    except (
        EngramError,
        RuntimeError,
        ValueError,
    ) as error:  # tensors of a wrong shape
        raise StorageError(
            f"a positive-definite precision in {where}", str(error), "fit and save it again"
        ) from error
    return block
