"""One line before the training loop: hooks on the optimizer's steps that keep a record."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from engram.core.arguments import MANY, one_of, path_of, truth, whole
from engram.core.dtypes import wide
from engram.core.parameters import check_module, uncompiled
from engram.core.state.sharded import is_sharded
from engram.engine.views import Augment
from engram.errors import ArgumentError, EngineError, ModelMismatchError, TrainingError
from engram.likelihoods import Likelihood, resolve
from engram.training.checkpoints import Grid, Snapshot, taken
from engram.training.clipping import Watch
from engram.training.clock import Clock
from engram.training.metrics import metric_of, steps_taken, takes_mean_loss, unwrapped
from engram.training.named_batches import NamedBatches
from engram.training.order import Order, optimizer_state
from engram.training.training import Training

CHECKPOINTS = 6  # that the estimate along the training asks for
LOOK = 64  # steps between two looks at the norms of all gradients: a pass over them
ALWAYS = 4  # first steps, after each of which there is such a look
AUGMENT_REMEDY = "pass what the loop does to its inputs, such as lambda x: x.flip(3)"
# The optimizer's own hooks hold the record: nothing here keeps either alive
_recorded: WeakKeyDictionary[Optimizer, ref[Training]] = WeakKeyDictionary()


def record(
    optimizer: Optimizer,
    model: nn.Module | None = None,
    *,
    checkpoints: int = CHECKPOINTS,
    folder: str | Path | None = None,
    num_steps: int | None = None,
    max_bytes: int | None = None,
    reduction: str = "mean",
    training_batch_size: int | None = None,
    scaler: Any = None,
    replay: bool = False,
    loader: DataLoader[Any] | None = None,
    likelihood: str | Likelihood = "categorical",
    augment: Augment | None = None,
) -> Training:
    r"""Record a training: call it once, before the loop, and train as always.

    Kept for every parameter are the training time, in the optimizer's own metric, and the weight
    decay as it was applied,

    .. math::
        C = \sum_t \eta_t P_t^{-1}, \qquad W = \sum_t \text{(share by which a step shrinks it)}

    and on the way a few checkpoints of the weights.

    Args:
        optimizer: that trains, of a kind in ``engram.training.metrics.METRICS``.
        model: whose parameters it trains; with it buffers, such as BatchNorm's statistics, are in
            the checkpoints, and the record knows the parameters' names.
        checkpoints: that will be asked for; 0 keeps times only.
        folder: for files of checkpoints; a temporary one if not given.
        num_steps: of the training, where known: fewer checkpoints are then taken.
        max_bytes: of all checkpoints together.
        reduction: of the training loss over a batch, ``mean`` or ``sum``.
        training_batch_size: B, needed for ``sum``.
        scaler: the ``torch.amp.GradScaler`` of the training, if it has one: without it, clipped
            gradients are not told from scaled ones, and ``sees_clipping`` says so.
        replay: keep what is needed to train on from a checkpoint bit for bit: the optimizer's state
            with every checkpoint, settings, random numbers, and the examples that
            ``loader`` names or ``training.note(indices)`` tells before each batch. Needs
            ``model``.
        loader: that the loop goes over, shuffled as it may be: the record then has
            ``training.visits``, what the steps said about their examples, at no further pass.
            Needs ``model``. Without a loader, name examples by :meth:`Training.visit`.
        likelihood: of the training loss, which makes predictions of outputs at the visits.
        augment: what the loop, or the data set, does to a batch of inputs before the model sees
            it, such as random flips: examples are then followed by views of them. It is called
            with one example at a time, [1, ...]. Not saved; set ``training.augment`` after a load.

    Returns:
        The record, which goes on as the optimizer steps.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> training = record(optimizer, model)
        >>> for _ in range(3):
        ...     model(torch.ones(4, 2)).square().mean().backward()
        ...     _ = optimizer.step()
        >>> training.num_steps, training.of(model).time["weight"]
        (3, tensor(0.3000))

    Reference:
        Nickl et al., *The Memory-Perturbation Equation*, NeurIPS 2023.
    """
    if not isinstance(unwrapped(optimizer), Optimizer):
        got = type(optimizer).__name__
        raise ArgumentError("a torch.optim.Optimizer", got, "pass the optimizer of the training")
    inner = unwrapped(optimizer)
    metric_of(inner)
    _check_whole(inner)
    if recorded(inner) is not None:
        raise TrainingError(
            "one record of an optimizer",
            "a second one",
            "use the first, or end it before with its stop()",
        )
    wanted = whole("number of checkpoints", checkpoints, 0, MANY, "use 6")
    steps = None if num_steps is None else whole("num_steps", num_steps)
    limit = None if max_bytes is None else whole("max_bytes", max_bytes)
    grid = Grid(wanted, None if folder is None else path_of("folder", folder), steps, limit)
    if augment is not None and not callable(augment):
        raise ArgumentError(
            "a function of a batch of inputs as augment", type(augment).__name__, AUGMENT_REMEDY
        )
    watch = Watch([p for g in inner.param_groups for p in g["params"]], scaler)
    if truth("replay", replay) and (model is None or scaler is not None):
        raise ArgumentError(
            "the model, and no scaler, with replay=True",
            "no model" if model is None else "a scaler, whose scale is not recorded",
            "call engram.record(optimizer, model, replay=True)",
        )
    recorder = Recorder(inner, model, grid, _scale(inner, reduction, training_batch_size), watch)
    if replay:
        kind = f"{type(inner).__module__}.{type(inner).__qualname__}"
        recorder.training.order = Order(optimizer=kind, reduction=reduction)
    recorder.training.seen.likelihood = resolve(likelihood)
    recorder.training.augment = augment
    if loader is not None:
        recorder.listen(loader, model)
    _recorded[inner] = ref(recorder.training)
    return recorder.training


def _check_whole(optimizer: Optimizer) -> None:
    """EngineError for parameters that processes have a piece each of."""
    for group in optimizer.param_groups:
        if any(is_sharded(p) for p in group["params"]):
            raise EngineError(
                "an optimizer of whole parameters, whose checkpoints are weights",
                "parameters that are sharded over processes, as by fully_shard",
                "record a training with DDP; of a sharded one, engram.posterior_of(optimizer, "
                "model, num_data=N) reads the state at its end, on every process",
            )


def recorded(optimizer: Optimizer) -> Training | None:
    """The record that an optimizer's steps go into now, if there is one."""
    kept = _recorded.get(unwrapped(optimizer))
    found = None if kept is None else kept()
    return found if found is not None and found.is_recording else None


def _scale(optimizer: Optimizer, reduction: str, batch_size: int | None) -> float:
    one_of("reduction", reduction, ("mean", "sum"), "see your loss function")
    if reduction == "mean":
        return 1.0
    if takes_mean_loss(optimizer):
        raise ArgumentError(
            f'reduction="mean" with {type(optimizer).__name__}, whose equations are those of the '
            "mean loss",
            '"sum"',
            "train with the mean loss of a batch",
        )
    return float(whole("training_batch_size", batch_size, remedy='pass it with reduction="sum"'))


class Recorder:
    """The hooks of one record."""

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module | None,
        grid: Grid,
        scale: float,
        watch: Watch,
    ) -> None:
        self.optimizer, self.model = optimizer, None if model is None else uncompiled(model)
        self.clock = Clock(optimizer, metric_of(optimizer), scale)
        self.watch = watch
        names = None if self.model is None else _names(self.model, self.clock.parameters)
        self.training = Training(
            type(optimizer).__name__,
            self.clock.clocks,
            grid,
            names,
            num_missing_steps=self.steps_taken(),
            parameters=self.clock.parameters,
        )
        self.training.follow(self)
        self.batches: NamedBatches | None = None
        self._seen = 1.0  # share of the gradient that a step is about to see, where it spoils it
        self.handles = (
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        )

    def steps_taken(self) -> int:
        """That the optimizer's state knows of."""
        return max(steps_taken(self.optimizer, p) for p in self.clock.parameters)

    @property
    def has_loader(self) -> bool:
        """Whether a loader names the examples of the steps."""
        return self.batches is not None

    def remove(self) -> None:
        """Take the hooks off the optimizer."""
        self.watch.remove()
        if self.batches is not None:
            self.batches.remove()
        for handle in self.handles:
            handle.remove()

    def listen(self, loader: DataLoader[Any], model: nn.Module | None) -> None:
        """Have the batches of a loader name the examples of the model's forward passes."""
        if model is None:
            raise ArgumentError(
                "the model, with a loader",
                "no model",
                "call engram.record(optimizer, model, loader=loader)",
            )
        self.batches = NamedBatches(loader, model, self.training.seen, self.training.note)

    def restart(self, number: int) -> None:
        """Go on as after so many recorded steps."""
        self.clock.restart(number)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The first weights, right before they are moved."""
        self.before_forward()
        if self.clock.metric.spoils_gradients:
            self._seen = self._share(self.training.num_steps + 1)

    def before_forward(self) -> None:
        """Keep the first weights, once."""
        training = self.training
        if training.num_steps or training.grid.snapshots:
            return
        training.grid.start(sum(2 * p.numel() * p.element_size() for p in self.clock.parameters))
        if training.grid.is_due(0):
            training.grid.add(self.snapshot())

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Count the step; take a snapshot where one is due."""
        training = self.training
        if bool(getattr(optimizer, "found_inf", False)):
            return  # a fused optimizer under a GradScaler has skipped the step
        training.num_steps += 1
        training.stopwatch.lap()
        training.seen.advance(training.num_steps)
        spoilt = self.clock.metric.spoils_gradients
        share = self._seen if spoilt else self._share(training.num_steps)
        training.num_bad_steps += math.isnan(share)
        training.sees_clipping = self.watch.sees_clipping
        is_due = training.grid.is_due(training.num_steps) and not math.isnan(share)
        if training.order is not None and self.model is not None:
            training.order.saw(share, self.model)
            training.order.stepped(training.num_steps, optimizer, is_due)
        if not is_due:
            self.clock.advance(share)
            return
        taking = training.grid.begin(training.num_steps)
        parameters = self.clock.parameters
        self.clock.advance(
            share, lambda number, clock: taking.add(number, parameters[number], clock)
        )
        if training.order is not None:
            taking.add_optimizer(optimizer_state(optimizer))
        training.grid.add(taking.finished(self.model))
        training.seen.cut([snapshot.step for snapshot in training.grid.snapshots])

    def _share(self, number: int) -> float:
        """Of the gradient that clipping has left; NaN for a step that moves nothing by a rule."""
        groups = self.optimizer.param_groups
        rates = [float(group["lr"]) for group in groups if group["lr"] is not None]
        finite = all(0 <= rate < math.inf for rate in rates)
        share = self.watch.share() if self.clock.metric.has_gradients else 1.0
        if number <= ALWAYS or number % LOOK == 0:
            finite = self._look() and finite
        return share if finite else math.nan

    def _look(self) -> bool:
        """Keep the largest gradient of every parameter so far; whether all are finite."""
        both = zip(self.clock.clocks, self.clock.parameters, strict=True)
        seen = [(clock, p.grad) for clock, p in both if p.grad is not None]
        if not seen:
            return True
        norms = torch.stack([wide(n) for n in torch._foreach_norm([g for _, g in seen])])
        for (clock, gradient), norm in zip(seen, norms.tolist(), strict=True):
            size = norm / math.sqrt(max(1, gradient.numel()))
            clock.largest_gradient = max(clock.largest_gradient, size)
        return bool(norms.isfinite().all())

    def snapshot(self) -> Snapshot:
        """Weights, times and buffers as they are now."""
        training, clock = self.training, self.clock
        state = None if training.order is None else optimizer_state(self.optimizer)
        return taken(training.num_steps, clock.parameters, clock.now(), self.model, state)


def _names(model: nn.Module, parameters: list[Tensor]) -> list[str]:
    check_module(model)
    names = {id(p): name for name, p in model.named_parameters()}
    if not any(id(p) in names for p in parameters):
        raise ModelMismatchError(
            "an optimizer of this model's parameters",
            "one that trains none of them",
            "pass the optimizer that was made with model.parameters()",
        )
    return [names.get(id(p), "") for p in parameters]
