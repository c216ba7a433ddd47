"""Streaming: the steps of an epoch, one after the other, and what came of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engram.core.data.batches import Batches, Data
from engram.core.errors import ArgumentError, ModelMismatchError, NonFiniteError, PosteriorError
from engram.core.parameters import trainable
from engram.core.state.model import state_preserved
from engram.core.state.process import of_the_thread, random_states, restored
from engram.core.storage.values import objects, typed
from engram.engine.prepare import Engine, prepare
from engram.engine.session import keep_freed_memory
from engram.engine.watch import Watch, mixing_layers
from engram.likelihoods import Likelihood
from engram.optimizers.base import BayesianOptimizer
from engram.optimizers.ivon import at_mean
from engram.posteriors.optimizer_state import unwrapped
from engram.tracking.announced import Announced, check_length
from engram.tracking.epoch import Epoch
from engram.tracking.followed import Followed
from engram.tracking.sources import Source, training_lost
from engram.tracking.visits import Indices, Visit, check_batch_indices, loss_factor, visit


def check_streamable(optimizer: Optimizer, estimator: str | None, samples: int) -> None:
    """ArgumentError for what only an update can do."""
    if isinstance(unwrapped(optimizer), BayesianOptimizer):
        raise ArgumentError(
            "an optimizer whose step comes after the backward pass",
            f"{type(optimizer).__name__}, which runs the model in its own step",
            "use tracker.update() at chosen times instead",
        )
    if estimator not in (None, "linear"):
        raise ArgumentError(
            'estimator="linear" for streaming', repr(estimator), "use tracker.update()"
        )
    if samples:
        raise ArgumentError("samples=0 for streaming", repr(samples), "use tracker.update()")


Identity = tuple[str, int, torch.dtype]  # of a parameter: its name, which one, its type


class Stream:
    """Watches the user's steps and fills the present epoch.

    Args:
        model, optimizer: in training.
        data: the training data, for its targets.
        likelihood: whose loss is trained with.
        source: of the posterior.
        reduction: of the user's loss over a batch, ``mean`` or ``sum``.
        followed: examples whose twin takes every step as well.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        data: Data,
        likelihood: Likelihood,
        source: Source,
        reduction: str,
        followed: Followed | None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.batches = Batches(data, 1)
        self.likelihood, self.source, self.reduction = likelihood, source, reduction
        self.followed = followed
        self.announced = Announced(self.batches)
        self.epoch = Epoch.empty(self.batches.num_data)
        self.steps = 0
        self.way = "none yet"
        self._engine: Engine | None = None
        self._mixing: list[nn.modules.batchnorm._BatchNorm] = []
        self._trained: list[Identity] = []  # when the passes were planned

    @contextmanager
    def step(self, indices: Indices, targets: Tensor | None, scale: float) -> Iterator[None]:
        """Watch the step that runs inside."""
        check_length(self.batches)
        chosen = check_batch_indices(indices, self.batches.num_data)
        factor = loss_factor(self.optimizer, scale, self.reduction, len(chosen))
        engine = self._prepared()
        if self.epoch.seen == 0:
            self._begin_epoch()
        if self.followed is not None:
            self.followed.twin.begin()
        watch = Watch(engine, self._mixing, len(chosen))
        try:
            with watch.watching():
                yield
            with restored((*of_the_thread(), *random_states())):
                watch.check()
                given = self.announced.targets(watch.witness, chosen, targets, self.steps)
                self.epoch.add(chosen, self._visit(watch, given, factor), self.steps)
                self.way = watch.way
                if self.followed is not None:
                    self.followed.learn(watch.witness, chosen, given, factor)
        finally:
            watch.release()
        self.steps += 1

    def _begin_epoch(self) -> None:
        try:
            with at_mean(unwrapped(self.optimizer)):
                self.source.begin_epoch()
        except (NonFiniteError, PosteriorError) as error:
            if not training_lost(error, self.model, self.optimizer):
                raise

    def _visit(self, watch: Watch, targets: Tensor, factor: float) -> Visit:
        try:
            posterior = self.source.at_step(self.steps)
        except (NonFiniteError, PosteriorError) as error:
            if not training_lost(error, self.model, self.optimizer):
                raise
            nothing = torch.full((watch.num_examples,), torch.nan)
            return Visit(nothing, nothing, nothing, complete=True)
        return visit(watch, targets, self.likelihood, posterior, factor)

    def _prepared(self) -> Engine:
        """The plan of the passes, made again when other parameters are trained."""
        found = [(name, id(p), p.dtype) for name, p in trainable(self.model).items()]
        if self._engine is None or found != self._trained:
            if self.epoch.seen and self._trained:
                raise _changed(self._trained, found)
            with state_preserved(self.model):
                keep_freed_memory()
                self._engine = prepare(self.model, self.batches)
            self._mixing, self._trained = mixing_layers(self.model), found
        return self._engine

    def begin(self) -> None:
        """A new epoch, of which nothing is known."""
        self.epoch = Epoch.empty(self.batches.num_data)

    def state_dict(self) -> dict[str, Any]:
        """The epoch under way."""
        return {"epoch": self.epoch.state(), "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the middle of an epoch."""
        found = objects(state, "a saved stream", ("epoch", "steps"))
        steps = typed(int, found["steps"], "a saved stream: steps")
        self.epoch = Epoch.of_state(found["epoch"], self.batches.num_data)
        self.steps = steps


def _changed(known: Sequence[Identity], found: Sequence[Identity]) -> ModelMismatchError:
    names = sorted({name for name, *_ in set(known) ^ set(found)})
    return ModelMismatchError(
        "the same trainable parameters from the first to the last step of a streamed epoch",
        f"{', '.join(names[:3])}{' and others' if len(names) > 3 else ''} frozen, unfrozen, "
        "replaced or of another type in the middle of one",
        "call tracker.finish_epoch() before, and change them between epochs",
    )
