r"""How each kind of optimizer is read: one short function a rule, and one line in ``OPTIMIZERS``.

==========================  =======================================  ==========================
optimizer                   state used                               precision S
==========================  =======================================  ==========================
SGD                         none                                     identity
RMSprop                     ``square_avg`` (minus ``grad_avg`` ^ 2   N sqrt(s) + delta
                            where centered)
Adam, AdamW, NAdam, RAdam   ``exp_avg_sq`` (``max_exp_avg_sq`` with  N sqrt(s_hat) + delta,
                            AMSGrad)                                 s_hat = s / (1 - beta2^t)
Adamax                      ``exp_inf``                              N u + delta
Adagrad                     ``sum``                                  N sqrt(sum / t) + delta
DiagonalOnlineNewton,       ``precision``                            s
DiagonalVON
Adafactor                   row and column means of squares          N sqrt(r c' / mean r) + delta
Adam8bit, AdamW8bit, ...    ``state2``, unpacked                     as Adam
AdamWScheduleFree, RAdam... ``exp_avg_sq``, at the average weights   as Adam
SGDScheduleFree             none, at the average weights             identity
Lion                        ``exp_avg``, as noise of c               N sd(c) sqrt(pi / 2) + delta
Muon                        ``momentum_buffer`` M = U s V'           U (N s / step(s) + delta) U'
SOAP                        ``exp_avg_sq`` in its basis ``Q``        Q (N sqrt(v_hat) + delta) Q'
Shampoo                     ``pre_cond`` of every axis               N (L (x) R / t^2)^1/4 + delta
==========================  =======================================  ==========================

A root is taken to be no smaller than the optimizer's own ``eps``, which bounds its steps as well:
an entry that never had a gradient and has no weight decay would otherwise have a precision of zero.

The paper's row for RMSprop and Adam is N sqrt(s) with s as the optimizer keeps it; its authors add
delta. Adam's s starts at zero, so at step t that is sqrt(1 - beta2^t) of the root above: a
fourteenth at step 5 with beta2 = 0.999. ``Reading.as_kept`` asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from engram.core.parameters import Layout
from engram.core.state.sharded import gathered
from engram.errors import PosteriorError
from engram.linalg.block import Block
from engram.linalg.dense import DenseBlock
from engram.linalg.diagonal import DiagonalBlock
from engram.linalg.kronecker import KroneckerBlock
from engram.optimizers.ivon import check_restored
from engram.optimizers.structures import SHARED
from engram.training.factored_squares import root_of_factors
from engram.training.kronecker_roots import EigenRoot, root_of_shampoo, root_of_soap
from engram.training.metrics import BITSANDBYTES
from engram.training.normalised_steps import noise_of_lion, root_of_muon
from engram.training.step_rules import root_of_average, root_of_rmsprop


@dataclass(frozen=True)
class Reading:
    """What an adapter sees of one parameter: its group's settings, its state, scale and delta."""

    parameter: Tensor
    group: Mapping[str, Any]
    state: Mapping[str, Any]
    scale: float  # N for a loss averaged over the batch, N / batch size for a sum
    prior_precision: float
    as_kept: bool = False  # a running average as it stands: no correction of its start, no floor

    def scaled(self, root: Tensor) -> Tensor:
        """N root + delta, for gradients of the mean loss."""
        return self.scale * root + self.prior_precision

    def floored(self, root: Tensor, share: float = 1.0) -> Tensor:
        """No smaller than the group's eps, or a share of it, where it has one."""
        if self.as_kept:
            return root
        return root.clamp(min=share * float(self.group.get("eps", 0.0)))


# The precision of a parameter's entries; or a root in an eigenbasis, which is scaled there
Adapter = Callable[[Reading], Tensor | EigenRoot]


def identity(reading: Reading) -> Tensor:
    """1: the step is the gradient; needs no state."""
    return torch.ones_like(reading.parameter)


def _steps(reading: Reading) -> float:
    return float(reading.state["step"])


def _rmsprop(reading: Reading) -> Tensor:
    return reading.scaled(reading.floored(root_of_rmsprop(reading.group, reading.state)))


def _adam(reading: Reading) -> Tensor:
    steps = math.inf if reading.as_kept else _steps(reading)
    root = root_of_average(reading.group, reading.state, steps)
    return reading.scaled(reading.floored(root))


def _adamax(reading: Reading) -> Tensor:
    return reading.scaled(reading.state["exp_inf"])


def _adagrad(reading: Reading) -> Tensor:
    steps = _steps(reading)
    root = (reading.state["sum"] / steps).sqrt()
    return reading.scaled(reading.floored(root, share=steps**-0.5))


def _own(reading: Reading) -> Tensor:
    return reading.state["precision"]


def _adafactor(reading: Reading) -> Tensor:
    return reading.scaled(root_of_factors(reading.group, reading.state))


def _averaged(reading: Reading) -> None:
    """PosteriorError unless the weights are the average that schedule-free evaluates."""
    if reading.group["train_mode"]:
        raise PosteriorError(
            "a schedule-free optimizer in eval mode, with the average x in the model",
            "one in train mode, with the y at which gradients are taken",
            "call optimizer.eval() before, and optimizer.train() to go on",
        )


def _averaged_adam(reading: Reading) -> Tensor:
    _averaged(reading)
    root = root_of_average(reading.group, reading.state, float(reading.group["k"]))
    return reading.scaled(reading.floored(root))


def _averaged_identity(reading: Reading) -> Tensor:
    _averaged(reading)
    return identity(reading)


def _lion(reading: Reading) -> Tensor:
    noise = noise_of_lion(reading.group, reading.state["exp_avg"])
    return reading.scaled(noise * math.sqrt(math.pi / 2))


def _muon(reading: Reading) -> EigenRoot:
    left, right, root = root_of_muon(reading.state["momentum_buffer"], reading.group)
    rows, columns = reading.parameter.shape
    if rows <= columns:
        return EigenRoot(root[:, None].expand(rows, columns), left, None)
    return EigenRoot(root.expand(rows, columns), None, right)


def _soap(reading: Reading) -> EigenRoot:
    found = root_of_soap(reading.group, reading.state, reading.parameter.shape)
    return EigenRoot(reading.floored(found.values), found.rows, found.columns)


def _shampoo(reading: Reading) -> EigenRoot:
    steps = float(reading.group["step"])
    return root_of_shampoo(reading.state, reading.parameter.shape, steps)


@dataclass(frozen=True)
class Source:
    """An optimizer with the scale and priors that turn its state into a precision.

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
    found = list(kind_of(source.optimizer).read(source))
    if not found:
        raise PosteriorError(
            "an optimizer that has taken a step",
            f"{type(source.optimizer).__name__} without state",
            "call it after training",
        )
    order = {name: place for place, name in enumerate(source.parameters)}
    return tuple(sorted(found, key=lambda block: order[block.names[0]]))


def kind_of(optimizer: Optimizer) -> Kind:
    """The adapter of an optimizer; PosteriorError where there is none for its class."""
    for base in type(optimizer).__mro__:
        if base.__name__ in OPTIMIZERS:
            return OPTIMIZERS[base.__name__]
    raise PosteriorError(
        f"one of {', '.join(OPTIMIZERS)}, or a registered optimizer",
        type(optimizer).__name__,
        "teach it with engram.posteriors.optimizer_state.register(name, adapter)",
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
            kept = {key: gathered(value) for key, value in state.items()}
            given = (group, kept, source.scale, source.prior[name], source.as_kept)
            reading = Reading(gathered(parameter.detach()), *given)
            found = _read(reading, adapter, source.optimizer)
            if isinstance(found, EigenRoot):
                yield _turned(name, reading, found, source.tolerance)
            else:
                yield DiagonalBlock.of(name, found.detach(), source.tolerance)


def _turned(name: str, reading: Reading, root: EigenRoot, tolerance: float) -> Block:
    """N root + delta in the root's eigenbasis."""
    shape, dtype = reading.parameter.shape, reading.parameter.dtype
    layout = Layout((name,), (shape,))
    precision = reading.scaled(root.values).to(dtype)
    if root.rows is None and root.columns is None:
        return DiagonalBlock.of(name, precision.reshape(shape), tolerance)
    if root.rows is not None and len(shape) == 1:
        return DenseBlock.factorise(layout, root.rows * precision[:, 0] @ root.rows.mT)
    rows, columns = (None if q is None else q.to(dtype)[None] for q in (root.rows, root.columns))
    return KroneckerBlock(layout, precision[None].contiguous(), rows, columns)


def _read(reading: Reading, adapter: Adapter, optimizer: Optimizer) -> Tensor | EigenRoot:
    try:
        return adapter(reading)
    except KeyError as missing:
        raise PosteriorError(
            f"a {type(optimizer).__name__} with {missing} in its state or settings",
            f"one with {', '.join(map(str, reading.state))} in its state",
            "register an adapter for this kind with engram.posteriors.optimizer_state.register",
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


@dataclass(frozen=True)
class Kind:
    """How one kind of optimizer is read.

    Args:
        entries: the precision of each parameter by itself; None where the state is no state of
            single parameters.
        blocks: all blocks, where ``entries`` is None.
        squares: whether the state is an average of squared gradients of batches.
        in_paper: whether it has the paper's row of RMSprop and Adam.
        decoupled: whether weight decay shrinks the weights whatever the scale of the loss.
    """

    entries: Adapter | None = None
    blocks: Reader | None = None
    squares: bool = False
    in_paper: bool = False
    decoupled: bool = False

    @property
    def is_identity(self) -> bool:
        """Whether the precision is the identity, of which a prior is no part."""
        return self.entries in (identity, _averaged_identity)

    def read(self, source: Source) -> Iterator[Block]:
        """The blocks of the precision."""
        if self.entries is not None:
            return _entries(source, self.entries)
        assert self.blocks is not None
        return self.blocks(source)


# Every optimizer that is read, by the name of its class; subclasses are read in the same way.
OPTIMIZERS: dict[str, Kind] = {
    "SGD": Kind(identity),
    "RMSprop": Kind(_rmsprop, squares=True, in_paper=True),
    "Adam": Kind(_adam, squares=True, in_paper=True),
    "AdamW": Kind(_adam, squares=True, in_paper=True, decoupled=True),
    "NAdam": Kind(_adam, squares=True, in_paper=True),
    "RAdam": Kind(_adam, squares=True, in_paper=True),
    "Adamax": Kind(_adamax),
    "Adagrad": Kind(_adagrad, squares=True),
    "DiagonalOnlineNewton": Kind(_own),
    "DiagonalVON": Kind(_own),
    "IVON": Kind(blocks=_ivon),
    "Newton": Kind(blocks=_dense),
    "OnlineNewton": Kind(blocks=_dense),
    "VON": Kind(blocks=_dense),
    "Adafactor": Kind(_adafactor, squares=True, decoupled=True),
    "Lion": Kind(_lion, decoupled=True),
    "Muon": Kind(_muon, decoupled=True),
    "SOAP": Kind(_soap, squares=True, decoupled=True),
    "Shampoo": Kind(_shampoo, squares=True),
    "AdamWScheduleFree": Kind(_averaged_adam, squares=True, decoupled=True),
    "RAdamScheduleFree": Kind(_averaged_adam, squares=True, decoupled=True),
    "SGDScheduleFree": Kind(_averaged_identity),
    **dict.fromkeys(BITSANDBYTES, Kind(_adam, squares=True, decoupled=True)),
}


def register(
    name: str, adapter: Adapter, *, squares: bool = False, decoupled: bool = False
) -> None:
    """Teach :func:`engram.posterior_of` another optimizer, by the name of its class.

    Args:
        name: of the class; subclasses are read in the same way.
        adapter: from a :class:`Reading` of one parameter to the precision of each of its entries,
            or to an :class:`engram.training.kronecker_roots.EigenRoot`, which is scaled in its
            eigenbasis.
        squares: whether its state is an average of squared gradients of batches, as Adam's, so
            that ``second_moment="example"`` means something.
        decoupled: whether its weight decay shrinks the weights by themselves, as AdamW's.

    Example:
        >>> register("MyAdam", lambda reading: reading.scaled(reading.state["v"].sqrt()))
        >>> _ = OPTIMIZERS.pop("MyAdam")
    """
    OPTIMIZERS[name] = Kind(adapter, squares=squares, decoupled=decoupled)
