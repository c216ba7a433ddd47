"""Follow a model while it trains: an estimate of the test loss from the training data alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.optim import Optimizer

from engram.batches import Batches, Data, call
from engram.engine.prepare import device_of, undisturbed
from engram.errors import ArgumentError, NonFiniteError, PosteriorError
from engram.likelihoods import Likelihood, resolve
from engram.posteriors.gaussian import Posterior
from engram.posteriors.laplace import STRUCTURES, laplace
from engram.posteriors.optimizers import posterior_of
from engram.sensitivity.examples import sensitivities
from engram.sensitivity.result import Result
from engram.tracking.figures import loss_figure, score_figure
from engram.tracking.history import History, Record

VALIDATION_BATCH = 1024


class Tracker:
    """Sensitivities of the training data at chosen times, and what follows from them.

    Args:
        model: the model in training.
        optimizer: whose state gives the posterior.
        data: the training data, in fixed order.
        likelihood: a name or an object.
        prior_precision: delta; taken from the optimizer's weight decay if not given.
        posterior: ``optimizer`` reads it off the optimizer; a structure such as ``kronecker`` or
            ``diagonal`` fits it at every update, for instance with SGD.
        estimator: as in :func:`engram.sensitivities`.
        validation: data whose loss is recorded beside the estimate; never used for it.
        patience: updates without a better estimate before ``should_stop``.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> data = (torch.randn(40, 3), torch.randint(0, 2, (40,)))
        >>> optimizer = torch.optim.Adam(model.parameters(), weight_decay=0.1)
        >>> tracker = Tracker(model, optimizer, data)
        >>> for epoch in range(3):
        ...     nn.functional.cross_entropy(model(data[0]), data[1]).backward()
        ...     _ = optimizer.step()
        ...     _ = tracker.update(step=epoch)
        >>> len(tracker.history), tracker.should_stop
        (3, False)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        data: Data,
        *,
        likelihood: str | Likelihood = "categorical",
        prior_precision: float | None = None,
        posterior: str = "optimizer",
        estimator: str = "linear",
        validation: Data | None = None,
        patience: int = 5,
    ) -> None:
        known = ("optimizer", *STRUCTURES)
        if posterior not in known:
            raise ArgumentError(
                f"posterior to be one of {', '.join(known)}", repr(posterior), 'use "optimizer"'
            )
        if posterior != "optimizer" and prior_precision is None:
            raise ArgumentError(
                f"a prior_precision with posterior={posterior!r}", "none", "pass prior_precision"
            )
        if patience < 1:
            raise ArgumentError("patience of at least 1", repr(patience), "use 5")
        self.model, self.optimizer, self.data = model, optimizer, data
        self.likelihood = resolve(likelihood)
        self.prior_precision, self.kind, self.estimator = prior_precision, posterior, estimator
        self.validation, self.patience = validation, patience
        self.num_data = Batches(data, 1).num_data
        self.history = History()

    def update(self, step: int | None = None, **settings: Any) -> Result | None:
        """Estimate now; the result is also added to the history.

        A loss or weight that is not finite is recorded as such and gives None: training is not
        interrupted by its observer.

        Args:
            step: epoch or iteration; counted from 0 if not given.
            settings: further arguments of :func:`engram.sensitivities`.
        """
        number = len(self.history) if step is None else step
        chosen: dict[str, Any] = {"estimator": self.estimator, "progress": False} | settings
        try:
            result = sensitivities(
                self.model, self.data, self.posterior(), likelihood=self.likelihood, **chosen
            )
        except (NonFiniteError, PosteriorError):
            if all(torch.isfinite(p).all() for p in self._watched()):
                raise
            nothing = torch.full((self.num_data,), math.nan)
            self.history.add(Record(number, math.nan, math.nan), nothing)
            return None
        record = Record(number, result.train_nll, result.loo_nll, self._validation_loss())
        self.history.add(record, result.score)
        return result

    def _watched(self) -> Iterator[Tensor]:
        """Weights and optimizer state, wherever training may have lost its way."""
        yield from self.model.parameters()
        for state in self.optimizer.state.values():
            if isinstance(state, dict):
                yield from (v for v in state.values() if isinstance(v, Tensor))

    def posterior(self) -> Posterior:
        """The posterior at the present weights."""
        if self.kind == "optimizer":
            return posterior_of(
                self.optimizer,
                self.model,
                num_data=self.num_data,
                prior_precision=self.prior_precision,
            )
        assert self.prior_precision is not None
        return laplace(
            self.model,
            self.data,
            likelihood=self.likelihood,
            structure=self.kind,
            prior_precision=self.prior_precision,
            progress=False,
        )

    def _validation_loss(self) -> float:
        if self.validation is None:
            return math.nan
        total, count = 0.0, 0
        with undisturbed(self.model), torch.no_grad():
            for batch in Batches(self.validation, VALIDATION_BATCH):
                here = batch.to(device_of(self.model))
                outputs = call(self.model, here.inputs)
                targets = self.likelihood.prepare(outputs, here.targets)
                total += float(self.likelihood.loss(outputs, targets).double().sum())
                count += len(batch)
        return total / count

    @property
    def best_step(self) -> int | None:
        """The step with the lowest estimate of the test loss; None before the first update."""
        best = self.history.best
        return None if best is None else best.step

    @property
    def should_stop(self) -> bool:
        """Whether the estimate has not improved for ``patience`` updates."""
        return len(self.history) > 0 and self.history.updates_since_best() >= self.patience

    def figure(self) -> Figure:
        """Estimate, training loss and validation loss against the step."""
        return loss_figure(self.history)

    def score_figure(self, groups: int = 60) -> Figure:
        """How the sensitivities evolve: examples sorted by the last update, in groups."""
        return score_figure(self.history, groups)

    def save(self, folder: str | Path) -> Path:
        """Write the history; no pickle."""
        return self.history.save(folder)

    def resume(self, folder: str | Path) -> None:
        """Go on with a history that was saved, for instance beside a checkpoint."""
        self.history = History.load(folder)
