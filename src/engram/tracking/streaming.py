"""Streaming: the sensitivity of every example, at the step of the training that visited it.

A streamed step reads layer inputs and output gradients from the user's forward and backward pass
and adds one tangent pass. With the weights theta_t of that step and the precision S_t that the
optimizer held, example i deviates by J_i S_t^-1 J_i' e_i.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engram.core.arguments import AUTO
from engram.core.parameters import trainable
from engram.core.processes.meeting import together
from engram.core.state.model import state_preserved
from engram.core.storage.values import objects, read_fields, typed, wrong
from engram.engine.prepare import Engine, prepare
from engram.engine.session import keep_freed_memory
from engram.engine.streaming.tape import Tape
from engram.errors import (
    ArgumentError,
    DataError,
    ModelMismatchError,
    NonFiniteError,
    PosteriorError,
)
from engram.optimizers.base import BayesianOptimizer
from engram.optimizers.ivon import at_mean
from engram.sensitivity.estimators.base import displaced
from engram.tracking.history import Record
from engram.tracking.sources import Source, training_lost
from engram.tracking.training_steps import Training, TrainingStep
from engram.training.metrics import unwrapped

if TYPE_CHECKING:
    import pandas as pd

UNSEEN, LOSS_ONLY, COMPLETE = 0, 1, 2  # what is known of an example
COLUMNS = ("loss", "loo_loss", "score", "visited", "visits", "status")  # of an epoch
Identity = tuple[str, int, torch.dtype]  # of a parameter: its name, which one, its type


@dataclass(frozen=True)
class Visit:
    """Estimates of one step for its examples, each [B]; NaN where there was no posterior yet."""

    loss: Tensor
    loo_loss: Tensor
    score: Tensor
    complete: bool


@dataclass
class Epoch:
    """Every example as it was last visited; losses in nats per example.

    Attributes:
        loss: of each example at its visit, [N].
        loo_loss: the same without the example, [N].
        score: L1 norm of the deviation of its prediction, [N].
        visited: number of the streamed step that visited it last, -1 if none did, [N].
        visits: how often it was visited, [N].
        status: 0 not visited, 1 loss only (the optimizer had no state yet), 2 complete, [N].
    """

    loss: Tensor
    loo_loss: Tensor
    score: Tensor
    visited: Tensor
    visits: Tensor
    status: Tensor

    def __repr__(self) -> str:
        count, known = len(self.status), int((self.status == COMPLETE).sum())
        again = int((self.visits > 1).sum())
        return (
            f"Epoch({self.seen:,} of {count:,} examples visited, {again:,} more than once, "
            f"{known:,} with an estimate)"
        )

    @classmethod
    def empty(cls, num_data: int) -> Epoch:
        """Nothing visited yet."""
        with torch.inference_mode(False):  # written to in whatever mode a step runs
            nothing = torch.full((num_data,), torch.nan, dtype=torch.float32)
            losses = (nothing, nothing.clone(), nothing.clone())
            visited = torch.full((num_data,), -1, dtype=torch.int64)
            visits = torch.zeros(num_data, dtype=torch.int64)
            status = torch.zeros(num_data, dtype=torch.int8)
        return cls(*losses, visited, visits, status)

    def add(self, indices: Tensor, visit: Visit, step: int) -> None:
        """Write a step's examples; a later visit replaces an earlier one."""
        for name in ("loss", "loo_loss", "score"):
            getattr(self, name)[indices] = getattr(visit, name).to("cpu", torch.float32)
        self.visited[indices] = step
        self.visits[indices] += 1
        self.status[indices] = COMPLETE if visit.complete else LOSS_ONLY

    @property
    def seen(self) -> int:
        """How many examples were visited."""
        return int((self.status > UNSEEN).sum())

    @property
    def all_seen(self) -> bool:
        """Whether every example was visited."""
        return bool((self.status > UNSEEN).all())

    @property
    def estimated(self) -> int:
        """How many examples have a leave-one-out loss, which :attr:`loo_nll` is the mean of."""
        return int(self.loo_loss[self.status == COMPLETE].isfinite().sum())

    @property
    def train_nll(self) -> float:
        """Mean loss of the visited examples at their visits."""
        return float(self.loss[self.status > UNSEEN].double().mean())

    @property
    def loo_nll(self) -> float:
        """Mean leave-one-out loss at the visits, which estimates the test loss."""
        return float(self.loo_loss[self.status == COMPLETE].double().mean())

    def to_frame(self) -> pd.DataFrame:
        """One row per example, indexed by its position in the data."""
        import pandas as pd

        columns = {name: getattr(self, name).numpy() for name in COLUMNS}
        return pd.DataFrame(columns).rename_axis("example")

    def record(self, step: int, validation: float, ranks: int) -> Record:
        """What the history keeps of it."""
        losses = (self.train_nll, self.loo_nll, validation)
        return Record(step, *losses, streamed=True, examples=self.estimated, ranks=ranks)

    def state(self) -> dict[str, Tensor]:
        """Copies of the columns."""
        return {name: getattr(self, name).clone() for name in COLUMNS}

    @classmethod
    def of_state(cls, state: Any, num_data: int) -> Epoch:
        """What :meth:`state` gave, for as many examples."""
        columns = read_fields(cls, state, "a saved epoch")
        if columns["status"].shape != (num_data,):
            raise DataError(
                f"a saved epoch of {num_data:,} examples",
                f"one of {columns['status'].numel():,}",
                "resume with the data that the run was started with",
            )
        like = cls.empty(num_data)
        for name, column in columns.items():
            wanted = getattr(like, name)
            if column.shape != wanted.shape or column.dtype != wanted.dtype:
                raise wrong(f"a saved epoch: {name}", f"{wanted.dtype} [N]", column)
        if not set(columns["status"].unique().tolist()) <= {UNSEEN, LOSS_ONLY, COMPLETE}:
            raise wrong("a saved epoch: status", "0, 1 or 2", columns["status"])
        return cls(**{name: column.cpu().clone() for name, column in columns.items()})


def ended(done: Record | None, step: int | None, told: bool) -> Record:
    """The record of the epoch that ended by itself, if it may have this step.

    Args:
        done: that record, if there is one.
        step: asked for; None for any.
        told: whether others know of the step under which it was recorded.
    """
    if done is None:
        raise DataError(
            "at least one streamed step", "none", "run steps inside `with tracker.step(...)`"
        )
    if told and step is not None and step != done.step:
        raise ArgumentError(
            f"step {done.step}, under which the epoch was recorded when its last example came",
            f"step {step}",
            "pass epoch= to tracker.step, or leave step out",
        )
    return done


def whole_epoch(epoch: Epoch, model: nn.Module, across_ranks: bool) -> Epoch:
    """What all processes have seen, the same on each: the latest visit of every example."""
    said = {"number of examples": len(epoch.status)}
    with together(across_ranks, model, None, "finish_epoch", said, buffers=False) as peers:
        if peers.alone:
            return epoch
        own = {name: getattr(epoch, name)[None] for name in COLUMNS}
        every = peers.joined("visits", own)
    # the latest visit; of several in one step the most complete; then the lowest rank
    latest = (3 * every["visited"] + every["status"]).argmax(0, keepdim=True)
    chosen = {name: value.gather(0, latest)[0] for name, value in every.items()}
    return Epoch(**{**chosen, "visits": every["visits"].sum(0)})


class Stream:
    """Takes the user's steps and fills the present epoch.

    Args:
        training: whose steps they are.
        source: of the posterior.
    """

    def __init__(self, training: Training, source: Source) -> None:
        self.training, self.source = training, source
        self.epoch = Epoch.empty(training.batches.num_data)
        self.steps = 0
        self.way = "none yet"
        self._engine: Engine | None = None
        self._trained: list[Identity] = []  # when the passes were planned

    def begin_step(self) -> None:
        """Plan the passes; before the first step of an epoch, make its posterior."""
        self._prepared()
        if self.epoch.seen:
            return
        try:
            with at_mean(unwrapped(self.training.optimizer)):
                self.source.begin_epoch()
        except (NonFiniteError, PosteriorError) as error:
            if not training_lost(error, self.training.model, self.training.optimizer):
                raise

    def tape(self, num_examples: int) -> Tape:
        """What takes down the operations of a step with so many examples."""
        assert self._engine is not None
        return Tape(self._engine, num_examples)

    def take(self, step: TrainingStep) -> None:
        """Add what the step says about its examples to the epoch."""
        self.epoch.add(step.indices, self._visit(step), self.steps)
        self.way = step.call.way
        self.steps += 1

    def _visit(self, step: TrainingStep) -> Visit:
        nothing = torch.full_like(step.loss, torch.nan)
        try:
            posterior = self.source.at_step(self.steps)
        except (NonFiniteError, PosteriorError) as error:
            if not training_lost(error, self.training.model, self.training.optimizer):
                raise
            return Visit(nothing, nothing, nothing, complete=True)
        if step.residual is None:
            return Visit(step.loss, nothing, nothing, complete=True)
        if posterior is None:
            return Visit(step.loss, nothing, nothing, complete=False)
        deviation = step.call.deviation(step.residual, posterior, step.factor)
        change, loo_loss = displaced(
            self.training.likelihood, step.call.outputs, step.prepared, deviation
        )
        return Visit(step.loss, loo_loss, change.abs().sum(1), complete=True)

    def _prepared(self) -> Engine:
        """The plan of the passes, made again when other parameters are trained."""
        found = [(name, id(p), p.dtype) for name, p in trainable(self.training.model).items()]
        if self._engine is None or found != self._trained:
            if self.epoch.seen and self._trained:
                raise _changed(self._trained, found)
            with state_preserved(self.training.model):
                keep_freed_memory()
                self._engine = prepare(self.training.model, self.training.batches)
            self._trained = found
        return self._engine

    def begin_epoch(self) -> None:
        """Begin a new, empty epoch."""
        self.epoch = Epoch.empty(self.training.batches.num_data)

    def state_dict(self) -> dict[str, Any]:
        """The state of the unfinished epoch."""
        return {"epoch": self.epoch.state(), "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the middle of an epoch."""
        found = objects(state, "a saved stream", ("epoch", "steps"))
        steps = typed(int, found["steps"], "a saved stream: steps")
        self.epoch = Epoch.of_state(found["epoch"], self.training.batches.num_data)
        self.steps = steps


def _changed(known: Sequence[Identity], found: Sequence[Identity]) -> ModelMismatchError:
    names = sorted({name for name, *_ in set(known) ^ set(found)})
    return ModelMismatchError(
        "the same trainable parameters from the first to the last step of a streamed epoch",
        f"{', '.join(names[:3])}{' and others' if len(names) > 3 else ''} frozen, unfrozen, "
        "replaced or of another type in the middle of one",
        "call tracker.finish_epoch() before, and change them between epochs",
    )


def check_streamable(optimizer: Optimizer, estimator: str, samples: int) -> None:
    """ArgumentError for settings that need :meth:`Tracker.update`."""
    if isinstance(unwrapped(optimizer), BayesianOptimizer):
        raise ArgumentError(
            "an optimizer whose step comes after the backward pass",
            f"{type(optimizer).__name__}, which runs the model in its own step",
            "use tracker.update() at chosen times instead",
        )
    if estimator not in (AUTO, "linear"):
        raise ArgumentError(
            'estimator="linear" for streaming', repr(estimator), "use tracker.update()"
        )
    if samples:
        raise ArgumentError("samples=0 for streaming", repr(samples), "use tracker.update()")
