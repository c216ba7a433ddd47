"""From an optimizer to the blocks of its precision: entry by entry, or as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from engram.core.errors import PosteriorError
from engram.core.parameters import Layout
from engram.linalg.block import Block
from engram.linalg.dense import DenseBlock
from engram.linalg.diagonal import DiagonalBlock
from engram.optimizers.ivon import check_restored
from engram.optimizers.structures import SHARED
from engram.posteriors.adapters import ADAPTERS, IN_PAPER, SQUARED, Adapter, Reading, identity


@dataclass(frozen=True)
class Source:
    """An optimizer whose precision is asked for.

    Args:
        optimizer: as it is now.
        parameters: the model's trainable ones, by name.
        scale: N for a loss averaged over the batch, N / batch size for a sum.
        prior: delta by name.
        tolerance: how far gains of a diagonal precision may be off, for speed.
        as_kept: take running averages as they stand; see :class:`Reading`.
    """

    optimizer: Optimizer
    parameters: Mapping[str, Tensor]
    scale: float
    prior: Mapping[str, float]
    tolerance: float
    as_kept: bool = False

    @property
    def names(self) -> dict[int, str]:
        """Names of the model's parameters by identity."""
        return {id(p): name for name, p in self.parameters.items()}


Reader = Callable[[Source], Iterator[Block]]


def blocks_of(source: Source) -> tuple[Block, ...]:
    """The precision of every parameter that has been stepped, in the order of the model."""
    found = list(_reader(source.optimizer)(source))
    if not found:
        raise PosteriorError(
            "an optimizer that has taken a step",
            f"{type(source.optimizer).__name__} without state",
            "call it after training",
        )
    order = {name: place for place, name in enumerate(source.parameters)}
    return tuple(sorted(found, key=lambda block: order[block.names[0]]))


def check_known(optimizer: Optimizer) -> None:
    """PosteriorError where nobody has said how such an optimizer is read."""
    _reader(optimizer)


def takes_mean_loss(optimizer: Optimizer) -> bool:
    """Whether the algorithm itself is defined for the mean loss of a batch."""
    return any("ess" in group or "num_data" in group for group in optimizer.param_groups)


def keeps_squares(optimizer: Optimizer) -> bool:
    """Whether the state is an average of squared gradients of batches."""
    return _is_one_of(optimizer, SQUARED)


def in_paper(optimizer: Optimizer) -> bool:
    """Whether it has the paper's row of RMSprop and Adam."""
    return _is_one_of(optimizer, IN_PAPER)


def is_identity(optimizer: Optimizer) -> bool:
    """Whether the precision is the identity, of which a prior is no part."""
    kinds = [base.__name__ for base in type(optimizer).__mro__]
    known = next((kind for kind in kinds if kind in WHOLE or kind in ADAPTERS), None)
    return ADAPTERS.get(known or "") is identity


def _is_one_of(optimizer: Optimizer, kinds: set[str]) -> bool:
    return any(base.__name__ in kinds for base in type(optimizer).__mro__)


def _reader(optimizer: Optimizer) -> Reader:
    for base in type(optimizer).__mro__:
        if base.__name__ in WHOLE:
            return WHOLE[base.__name__]
        if base.__name__ in ADAPTERS:
            adapter = ADAPTERS[base.__name__]
            return lambda source: _entries(source, adapter)
    raise PosteriorError(
        f"one of {', '.join([*ADAPTERS, *WHOLE])}, or a registered optimizer",
        type(optimizer).__name__,
        "teach it with engram.posteriors.adapters.register(name, adapter)",
    )


def _entries(source: Source, adapter: Adapter) -> Iterator[Block]:
    """Parameter by parameter; without a step there is no precision, except for SGD."""
    names = source.names
    for group in source.optimizer.param_groups:
        for parameter in group["params"]:
            name, state = names.get(id(parameter)), source.optimizer.state.get(parameter, {})
            young = not state or float(state.get("step", 1)) == 0
            if name is None or (young and adapter is not identity):
                continue
            given = (group, state, source.scale, source.prior[name], source.as_kept)
            reading = Reading(parameter.detach(), *given)
            precision = _read(reading, adapter, source.optimizer).detach()
            yield DiagonalBlock.of(name, precision, source.tolerance)


def _read(reading: Reading, adapter: Adapter, optimizer: Optimizer) -> Tensor:
    try:
        return adapter(reading)
    except KeyError as missing:
        raise PosteriorError(
            f"a {type(optimizer).__name__} with {missing} in its state or settings",
            f"one with {', '.join(map(str, reading.state))} in its state",
            "register an adapter for this kind with engram.posteriors.adapters.register",
        ) from missing


def _dense(source: Source) -> Iterator[Block]:
    """The matrix that our own full-matrix optimizers share between their parameters."""
    shared = dict(source.optimizer.state)[SHARED]  # type: ignore[index]
    if "precision" not in shared:
        return
    names = source.names
    trained = [
        p for group in source.optimizer.param_groups for p in group["params"] if p.requires_grad
    ]
    strange = sum(p.numel() for p in trained if id(p) not in names)
    if strange or len(shared["precision"]) != sum(p.numel() for p in trained):
        raise PosteriorError(
            "a matrix over parameters of this model only, as they were trained",
            f"{strange:,} entries of others among {len(shared['precision']):,}",
            "make the optimizer with the parameters of one model, and do not freeze any later",
        )
    layout = Layout.of({names[id(p)]: p for p in trained})
    yield DenseBlock.factorise(layout, shared["precision"])


def _ivon(source: Source) -> Iterator[Block]:
    """ess h + delta; IVON keeps one flat h per group, frozen parameters included."""
    optimizer, names = source.optimizer, source.names
    check_restored(optimizer)
    if not getattr(optimizer, "current_step", 0):
        return
    for group in optimizer.param_groups:
        parts = group["hess"].split([p.numel() for p in group["params"]])
        for parameter, part in zip(group["params"], parts, strict=True):
            name = names.get(id(parameter))
            if name is not None:
                precision = group["ess"] * part + source.prior[name]
                shaped = precision.reshape(parameter.shape)
                yield DiagonalBlock.of(name, shaped, source.tolerance)


WHOLE: dict[str, Reader] = {"IVON": _ivon, "Newton": _dense, "OnlineNewton": _dense, "VON": _dense}
