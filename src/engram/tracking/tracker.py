"""Follow a model while it trains: an estimate of the test loss from the training data alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engram.core.arguments import AUTO, is_auto, path_of, whole
from engram.core.data.batches import Batches, Data
from engram.core.parameters import check_module, uncompiled
from engram.core.processes.group import Processes
from engram.errors import NonFiniteError, PosteriorError
from engram.likelihoods import Likelihood, resolve
from engram.posteriors.gaussian import Posterior
from engram.problem import Opener
from engram.sensitivity.estimators import check_estimator, default_estimator
from engram.sensitivity.leave_one_out import sensitivities_again
from engram.sensitivity.result import Result
from engram.sensitivity.sampling import Sampling
from engram.tracking.held_out import HeldOut, check_alone, check_given, check_whole
from engram.tracking.history import BoardWriter, History, Record
from engram.tracking.index_check import Indexed, Indices, check_length
from engram.tracking.looked_at import LookedAt
from engram.tracking.own_record import named_by_steps, own_record
from engram.tracking.saving import Resumable
from engram.tracking.source_settings import SourceSettings, check_optimizer, source_of
from engram.tracking.sources import training_lost
from engram.tracking.streaming import Epoch, Stream, check_streamable, ended, whole_epoch
from engram.tracking.tracing import InfluenceTrace
from engram.tracking.training_steps import Training, TrainingSteps
from engram.tracking.validation import validation_loss
from engram.training.record import recorded
from engram.training.training import Training as TrainingRecord


class Tracker(Resumable):
    """Sensitivities and an estimate of the test loss during training, from training data alone.

    Args:
        model, optimizer: in training.
        data: the training data, in fixed order.
        likelihood: a name or an object.
        prior_precision: delta; ``"auto"`` takes it from the optimizer's weight decay.
        posterior: ``"auto"`` fits Kronecker factors at every update and adds the training time that
            was recorded, S + N / C as :func:`engram.laplace` does with ``training=``; an optimizer
            of N examples, such as IVON, holds its posterior itself. ``optimizer`` reads it off
            every optimizer, as the paper does; that of streamed steps is read so with ``"auto"``
            too. A structure such as ``kronecker`` or ``diagonal`` is fitted at every update: with
            the recorded time, or with a ``prior_precision`` that is given as at a minimum.
        average: beta of a moving average of that curvature over updates, such as 0.9.
        estimator: as in :func:`engram.sensitivities`; ``"auto"`` is the one for the end of
            training, so that an update costs a fit and a pass, and ``trajectory`` walks along the
            checkpoints at every update. A streamed step and samples are ``linear``.
        examples: how many an update looks at, chosen at random once, such as 2000; all if not
            given. The estimate is then their mean, and its cost does not grow with the data.
        samples: weights drawn from the posterior for the expectation in the equation; 0 takes it
            at the mean.
        expectation: what is averaged over the samples: each example's ``gradient``, as the equation
            has it, J(m) S^-1 E[J' e], or its whole ``deviation`` J S^-1 J' e, with any estimator.
        reduction, training_batch_size, second_moment: of the training loss and of what the
            optimizer keeps of it, as in :func:`engram.posterior_of`; with Adam, pass the batch size
            and ``second_moment="example"`` for estimates that do not grow with the batch.
        validation: data whose loss is recorded beside the estimate; never used for it.
        held_out: how many examples a twin of the training leaves out, such as a tenth of the
            data; the history's estimate is then theirs; see :meth:`twin_step`.
        patience: updates without a better estimate before ``should_stop``.
        folder: where all scores are written; without one, in a temporary file once they are large.
        trace: test data; ``tracker.trace`` then adds up the influence of training examples on it
            over the steps, a term at every update with the posterior of the update
            (``posterior="optimizer"`` has the optimizer's own), see
            :class:`engram.tracking.tracing.InfluenceTrace`.
        trace_examples: positions of the training examples that are traced; all if not given.
        across_ranks: whether the processes of ``torch.distributed`` train this model together, as
            DDP does; False where each has a model of its own.

    Attributes:
        training: the record of the training: that of :func:`engram.record` where the user had
            called it, else one that the tracker keeps by itself until it is closed. With
            :meth:`step` it knows what the steps said about their examples. None for an optimizer
            that cannot be recorded.

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
        prior_precision: float | str = AUTO,
        posterior: str = AUTO,
        average: float | None = None,
        estimator: str = AUTO,
        examples: int | None = None,
        samples: int = 0,
        expectation: str = "gradient",
        reduction: str = "mean",
        training_batch_size: int | None = None,
        second_moment: str = "batch",
        validation: Data | None = None,
        held_out: int | None = None,
        patience: int = 5,
        folder: str | Path | None = None,
        across_ranks: bool = True,
        trace: Data | None = None,
        trace_examples: Sequence[int] | Tensor | None = None,
    ) -> None:
        patience = whole("patience", patience, remedy="use 5")
        check_estimator(estimator)
        self.estimator, self.sampling = estimator, Sampling.checked(samples, expectation)
        self.sampling.rule(estimator)
        check_module(model)
        self.model = model = uncompiled(model)
        self.optimizer, self.data = optimizer, data
        self.likelihood = resolve(likelihood)
        self.validation, self.patience, self.across_ranks = validation, patience, across_ranks
        self.folder = folder if self.peers.rank == 0 else None  # one process writes
        batches = Batches(data, 1)
        self.num_data = batches.num_data
        if validation is not None:
            Batches(validation, 1)  # complains about what it cannot read
        wanted = SourceSettings(
            posterior, prior_precision, average, reduction, training_batch_size, second_moment
        )
        wanted.check()
        check_optimizer(optimizer)
        self.looked_at = LookedAt.some(self.num_data, examples)
        self.looked_at.check(estimator)
        self.opener = Opener(self.looked_at.data(data), self.likelihood)
        training = Training(model, optimizer, batches, self.likelihood)
        self.held_out: HeldOut | None = None
        if held_out is not None:
            check_alone(self.peers)
            check_whole(examples)
            self.held_out = HeldOut(training, held_out)
        self.training = recorded(optimizer)
        self._records = self.training is None
        if self.training is None:
            how = (reduction, training_batch_size)
            self.training = own_record(optimizer, model, self.likelihood, *how)
        try:
            self.source = source_of(
                wanted, model, optimizer, self.opener, self.num_data, self.training
            )
        except BaseException:
            self._stop_recording()
            raise
        named = named_by_steps(self.training, self.likelihood, self.num_data)
        self.steps = TrainingSteps(training, reduction, named)
        self.stream = Stream(training, self.source)
        self.history = History(self.folder)
        self.trace: InfluenceTrace | None = None
        if trace is not None:
            self.trace = InfluenceTrace.of(self, trace, trace_examples)
        self.listeners: list[Callable[[Record, Tensor], None]] = []
        self.last_epoch: Epoch | None = None
        self._latest: Result | Epoch | None = None
        self._epoch_record: Record | None = None

    def __repr__(self) -> str:
        return f"Tracker({type(self.model).__name__}, {self.num_data:,} examples, {self.history!r})"

    def posterior(self) -> Posterior:
        """The posterior at the present weights."""
        return self.source.posterior()

    def update(
        self, step: int | None = None, *, samples: int | None = None, **settings: Any
    ) -> Result | None:
        """Estimate now, over all data, and add it to the history; None where it is not finite.

        Args:
            step: epoch or iteration, never an earlier one; if not given, counted from 0.
            samples: as for the tracker, for this update.
            settings: further arguments of :func:`engram.sensitivities`; with several processes
                ``across_ranks=True``, called on every one, divides the examples among them.
        """
        self.steps.check_outside("an update")
        number = self.history.number(step)
        check_length(self.stream.training.batches)
        chosen: dict[str, Any] = {"estimator": self.estimator, "progress": False} | settings
        sampling = self.sampling.drawing(samples)
        chosen["estimator"] = sampling.rule(chosen["estimator"])  # complain before the fit
        self.looked_at.check(chosen["estimator"])
        chosen |= {"samples": sampling.samples, "expectation": sampling.expectation}
        try:
            posterior = self.posterior()
            if is_auto(chosen["estimator"]):
                chosen["estimator"] = default_estimator(posterior)
            result = sensitivities_again(self.opener, self.model, posterior, **chosen)
            result = self.looked_at.placed(result)
        except (NonFiniteError, PosteriorError) as error:
            if not training_lost(error, self.model, self.optimizer):
                raise
            nothing = torch.full((self.num_data,), math.nan, dtype=torch.float32)
            lost = Record(number, math.nan, math.nan)
            self._tell(self._kept(lost, nothing, nothing, nothing), nothing)
            return None
        ranks = Processes.found(bool(chosen.get("across_ranks"))).count
        if self.trace is not None and self.trace.is_due:
            self.trace.add(posterior)
        record = Record.of_result(number, result, self._validation_loss(), ranks)
        columns = (result.score, result.loss, result.loo_loss)
        record = self._kept(record, *(self.looked_at.column(column) for column in columns))
        self._latest = result
        self._tell(record, result.score)
        return result

    @contextmanager
    def step(
        self,
        indices: Indices = None,
        targets: Tensor | None = None,
        *,
        scale: float = 1.0,
        epoch: int | None = None,
    ) -> Iterator[None]:
        r"""Stream: run the forward and backward pass of one training step inside this.

        .. math:: d_i = J_i S_t^{-1} J_i' e_i \quad \text{at the weights of the step}

        The user's gradients and weights are what they would be without it. When every example has
        been visited, the epoch is added to the history by itself; with a loader that drops or
        repeats examples, call :meth:`finish_epoch`. With dropout, the sensitivity is that of the
        thinned net that made the step.

        Args:
            indices: position of each example of the batch in the data.
            targets: of the batch, where they are not the data's or reading them again is slow.
            scale: factor on the loss before ``backward``, such as 1/4 with four accumulated
                batches, or that of a gradient scaler.
            epoch: the step of the history for an epoch that this step completes; else counted.

        Example:
            >>> model, x, y = nn.Linear(3, 2), torch.randn(40, 3), torch.randint(0, 2, (40,))
            >>> optimizer = torch.optim.Adam(model.parameters(), weight_decay=0.1)
            >>> tracker = Tracker(model, optimizer, (x, y))
            >>> for batch in torch.arange(80).remainder(40).split(10):
            ...     optimizer.zero_grad()
            ...     with tracker.step(batch):
            ...         nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            ...     _ = optimizer.step()
            >>> len(tracker.history), tracker.last_epoch.seen
            (2, 40)
        """
        check_streamable(self.optimizer, self.estimator, self.sampling.samples)
        number = self.history.number(epoch)
        listeners = (self.stream,) if self.held_out is None else (self.stream, self.held_out)
        with self.steps.step(indices, targets, scale, listeners, self.stream.tape):
            yield
        if self.stream.epoch.all_seen and self.peers.count == 1:
            self._record_epoch(self.stream.epoch, number)

    def twin_step(
        self, indices: Indices = None, targets: Tensor | None = None, scale: float = 1.0
    ) -> AbstractContextManager[None]:
        """Run the forward and backward pass of every step inside, if made with ``held_out``.

        The twin takes the step as well. :meth:`step` does the same and streams; arguments as there.
        """
        return self.steps.step(indices, targets, scale, (check_given(self.held_out),))

    def finish_epoch(self, step: int | None = None) -> Record:
        """Add the streamed epoch to the history, also where not every example was visited.

        The record's ``examples`` says how many the estimate stands for. With several processes
        that train one model, call it on every one: all get the estimate of all they have seen.

        After an epoch that ended by itself, its record comes back, with ``step`` as its step. Where
        others were told of it, as TensorBoard is, that has to be ``epoch`` of :meth:`step`.
        """
        self.steps.check_outside("the end of an epoch")
        found = whole_epoch(self.stream.epoch, self.model, self.across_ranks)
        if found.seen:
            return self._record_epoch(found, self.history.number(step))
        done = ended(self._epoch_record, step, bool(self.listeners))
        if step is None or step == done.step:
            return done
        self._epoch_record = self.history.replace_step(done, step)
        return self._epoch_record

    def leave_step(self) -> None:
        """Forget a step that was begun and does not end; nothing of it stays on the model."""
        self.steps.leave()

    def close(self) -> None:
        """Take everything off the model and the optimizer; history and reports stay.

        A tracker is closed by itself at the end of ``with Tracker(...) as tracker:``.
        """
        self.steps.close()
        if self.trace is not None:
            self.trace.close()
        if self.held_out is not None:
            self.held_out.twin.close()
        self._stop_recording()

    def _stop_recording(self) -> None:
        if self.own_record is not None:
            self.own_record.stop()

    @property
    def own_record(self) -> TrainingRecord | None:
        """:attr:`training` where the tracker keeps it by itself, and saves it with its state."""
        return self.training if self._records else None

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def peers(self) -> Processes:
        """The processes that train this model together."""
        return Processes.found(self.across_ranks)

    def _record_epoch(self, done: Epoch, number: int) -> Record:
        record = done.record(number, self._validation_loss(), self.peers.count)
        record = self._kept(record, done.score, done.loss, done.loo_loss)
        self._epoch_record = record
        self.last_epoch = self._latest = done
        self.stream.begin_epoch()
        self._tell(record, done.score)
        return record

    def _kept(self, record: Record, scores: Tensor, losses: Tensor, loo_losses: Tensor) -> Record:
        if self.held_out is not None:
            record = self.held_out.estimated(record, losses)
        self.history.add(record, scores, loo_losses)
        return record

    def _tell(self, record: Record, scores: Tensor) -> None:
        for listener in self.listeners:
            listener(record, scores)

    def mean_loo_loss(self, first: int = 0, last: int | None = None) -> Tensor:
        """Every example's leave-one-out loss averaged over the training; as in the history."""
        return self.history.mean_loo_loss(first, last)

    def to_tensorboard(self, writer: Any, prefix: str = "engram") -> None:
        """From now on, write losses and scores of every update with a ``SummaryWriter``."""
        self.listeners.append(BoardWriter(writer, prefix))

    def indexed(self, data: Data | None = None) -> Indexed:
        """The training data, or a version of it, as a dataset that gives (index, x, y)."""
        return Indexed(self.data if data is None else data)

    def _validation_loss(self) -> float:
        return validation_loss(self.model, self.optimizer, self.validation, self.likelihood)

    def _forget_latest(self) -> None:
        self.last_epoch = self._latest = self._epoch_record = None

    @property
    def best_step(self) -> int | None:
        """The step with the lowest estimate of the test loss; None before the first update."""
        best = self.history.best
        return None if best is None else best.step

    @property
    def should_stop(self) -> bool:
        """Whether the estimate has not improved for ``patience`` updates; see ``stop_reason``."""
        return self.history.updates_since_best() >= self.patience

    @property
    def stop_reason(self) -> str | None:
        """Why to stop, in words; None while there is no reason."""
        return self.history.standstill() if self.should_stop else None

    def report(self, path: str | Path, top: int = 20, **shown: Any) -> Path:
        """Write one HTML page: the training, and the examples as the last update sees them.

        Args:
            path: of the file.
            top: rows of its table of examples.
            shown: ``ids``, ``classes``, ``images``, ``texts`` and ``rows`` of the examples, as in
                :meth:`engram.Result.report`.
        """
        from engram.report.html import write_page
        from engram.report.training_page import training_data

        data = training_data(self.history, self._latest, self.held_out, **shown)
        return write_page(data, path_of("file", path), whole("top", top, remedy="use top=20"))
