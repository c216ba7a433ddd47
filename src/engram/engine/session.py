"""A model, a likelihood and data, ready for passes: the batches with what every pass needs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from engram.core.arguments import AUTO, is_auto, whole
from engram.core.data.batches import Batch, Batches, Data, call, check_output_rows
from engram.core.data.inputs import tensors_of
from engram.core.memory import available_bytes, short_of_memory
from engram.core.parameters import Named, check_module, hold_all_but, trainable, uncompiled
from engram.core.processes.group import Processes
from engram.core.progress import progress_over
from engram.core.state.model import device_of, state_preserved
from engram.engine import branches
from engram.engine.experts import routed
from engram.engine.passes import Trace
from engram.engine.prepare import Engine, prepare, prepare_again, training_layers
from engram.engine.refusals import named_failures
from engram.engine.views import Views
from engram.errors import NonFiniteError
from engram.likelihoods import Likelihood, resolve

# How many examples a pass takes at once, where the caller does not say.
LARGEST_BATCH = 256  # examples: more are no quicker, and cost memory
MEMORY_SHARE = 0.25  # of what is free: the rest is for what is computed from a pass
WORKING_SET = 192 * 2**20  # bytes: beyond, no quicker, and twice the memory of a training step
COPIES_OF_ACTIVATIONS = 8  # inputs, gradients, their graph, perturbations and temporaries of a pass
RETAINED_BLOCK = 31 * 2**20  # bytes: just below the largest that the C library keeps, 32 MB
ALONE = Processes()  # whoever passes over the data by itself


@dataclass(frozen=True)
class Observed:
    """One batch after its forward pass."""

    batch: Batch
    trace: Trace
    targets: Tensor
    loss: Tensor
    residual: Tensor

    @property
    def outputs(self) -> Tensor:
        """f, [B, K]."""
        return self.trace.outputs


@dataclass(frozen=True)
class Passes:
    """What a forward pass over the data needs."""

    engine: Engine
    batches: Batches
    progress: bool
    largest_part: int
    fitting: int  # examples that a pass could hold at once, whatever the batch size
    switched: tuple[str, ...]  # kinds of layers in train mode before, which eval mode changes
    held: Mapping[str, nn.Parameter]  # trained by the user, and fixed for now
    peers: Processes = ALONE  # that share the examples, where they do

    @property
    def model(self) -> nn.Module:
        """The user's model, in eval mode while this lasts."""
        return self.engine.model

    def own_rows(self, indices: Tensor | None = None) -> Tensor | None:
        """This process's share of some examples, or of all; None for all where it is alone.

        Whoever passes over it adds up, or puts together, what the processes have found.
        """
        if self.peers.alone:
            return indices
        if indices is None:
            return self.peers.rows(self.batches.num_data)
        return indices[self.peers.rows(len(indices))]

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The user's trainable parameters, also those that are held fixed for now."""
        known = {**trainable(self.model), **self.held}
        return {name: p for name, p in self.model.named_parameters() if name in known}

    def parts(self, source: Iterable[Batch], description: str, length: int) -> Iterator[Batch]:
        """Batches no larger than a pass should hold, behind a progress bar."""
        for batch in progress_over(source, description, self.progress, length):
            for start in range(0, len(batch), self.largest_part):
                whole = len(batch) <= self.largest_part
                yield batch if whole else batch.select(slice(start, start + self.largest_part))

    def placed(self, batch: Batch) -> Batch:
        """The batch on the model's device, its inputs checked."""
        batch = batch.to(device_of(self.model))
        for x in tensors_of(batch.inputs):
            if x.is_floating_point():
                _check_finite("inputs", x.flatten(1) if x.dim() > 1 else x[:, None], batch)
        return batch

    def traced(self, batch: Batch) -> Trace:
        """Forward pass over a placed batch, its outputs checked."""
        first, last = int(batch.indices[0]), int(batch.indices[-1])
        with named_failures(f"on the examples {first} to {last}, as on the first of the data"):
            trace = branches.traced(self.engine, batch)
        check_output_rows(trace.outputs, len(batch))
        _check_finite("outputs", trace.outputs, batch)
        return trace

    def traces(self, description: str) -> Iterator[Trace]:
        """The forward pass over every batch in order."""
        for part in self.parts(self.batches, description, len(self.batches)):
            trace = self.traced(self.placed(part))
            yield trace
            trace.release()


@dataclass(frozen=True)
class Session(Passes):
    """Everything that a pass over the data with its targets needs."""

    likelihood: Likelihood = field(kw_only=True)
    views: Views | None = field(default=None, kw_only=True)

    def viewed(self, batch: Batch) -> Batch:
        """The batch on the model's device, other views of it where the session has views."""
        return self.placed(batch if self.views is None else self.views.of(batch))

    def observe(self, batch: Batch) -> Observed:
        """Forward pass, checked targets, loss and residual of a batch."""
        batch = self.viewed(batch)
        trace = self.traced(batch)
        targets = self.likelihood.prepare(trace.outputs, batch.targets)
        loss = self.likelihood.loss(trace.outputs, targets).detach()
        _check_finite("losses", loss[:, None], batch)
        residual = self.likelihood.residual(trace.outputs, targets).detach()
        return Observed(batch, trace, targets, loss, residual)

    def pull_back(self, batch: Batch, seed: Tensor, parameters: Mapping[str, Tensor]) -> Named:
        """J' seed, summed over the batch, by parameter name: a plain backward pass."""
        with torch.enable_grad():
            outputs = call(self.model, batch.inputs)
        found = torch.autograd.grad(
            outputs,
            list(parameters.values()),
            seed,
            allow_unused=True,
            materialize_grads=True,
        )
        return dict(zip(parameters, found, strict=True))

    def passes(
        self, description: str, indices: Tensor | None = None, batch_size: int | None = None
    ) -> Iterator[Observed]:
        """Every batch in order, or those of the given examples, behind a progress bar."""
        size = batch_size or self.batches.batch_size
        source: Iterable[Batch] = self.batches
        length = len(self.batches)
        if indices is not None:
            source, length = self.batches.subset(indices, size), -(-len(indices) // size)
        for part in self.parts(source, description, length):
            observed = self.observe(part)
            yield observed
            observed.trace.release()  # before the next forward pass, not after it


def _check_finite(what: str, values: Tensor, batch: Batch) -> None:
    if torch.isfinite(values.sum()):  # one pass; anything not finite makes the sum so
        return
    bad = ~torch.isfinite(values).all(1)
    if not bad.any():
        return
    position = int(bad.nonzero()[0])
    index = int(batch.indices[position])
    cause = "its input is finite, so the model or the loss overflows there"
    if what == "inputs":
        cause = "the data itself has them"
    elif what == "losses" and batch.targets[position].isnan().any():
        cause = "its target is NaN"
    raise NonFiniteError(
        f"finite {what}",
        f"NaN or infinity for example {index} (batch of examples {int(batch.indices[0])} to "
        f"{int(batch.indices[-1])}); {cause}",
        "clean or drop that example",
    )


def keep_freed_memory() -> None:
    """Have freed temporaries kept for reuse instead of handed back to the system page by page.

    The C library returns blocks as large as the largest one freed so far, and takes page faults for
    them again in the next batch: a sixth of the time of a K-FAC fit of a small convolutional net.
    Freeing one untouched block of nearly the largest size it considers raises that limit.
    """
    if available_bytes(torch.device("cpu")) > 4 * RETAINED_BLOCK:
        torch.empty(RETAINED_BLOCK, dtype=torch.uint8)


def _fitting_examples(engine: Engine, batches: Batches) -> int:
    """How many examples a pass should hold at once, from the tensors of one of them."""
    device = device_of(engine.model)
    trace = engine.trace(batches.take(torch.zeros(1, dtype=torch.long)).to(device))
    entries = sum(site.call.input.numel() for site in trace.sites) + trace.outputs.numel()
    per_example = COPIES_OF_ACTIVATIONS * entries * trace.outputs.element_size()
    budget = min(WORKING_SET, MEMORY_SHARE * available_bytes(device))
    return max(1, int(budget / max(per_example, 1)))


@contextmanager
def opened_passes(
    model: nn.Module,
    data: Data,
    batch_size: int | str = AUTO,
    progress: bool = True,
    labelled: bool = False,
    planned: Engine | None = None,
    peers: Processes = ALONE,
    only: Collection[str] | None = None,
) -> Iterator[Passes]:
    """Open the model for passes; it is as before when this ends, also after an exception.

    An engine that was planned for this model, or for one that this is a copy of, serves again.
    Where ``only`` some parameters are wanted the others are held fixed: what comes before the first
    of them is run without gradients, and takes no memory for a backward pass.
    """
    limit = None
    if not is_auto(batch_size):
        limit = whole("batch_size", batch_size, remedy='use batch_size="auto"')
    check_module(model)
    model, batches = uncompiled(model), Batches(data, limit or 1, labelled)
    limit = limit and min(limit, batches.num_data)
    switched = tuple(training_layers(model))
    with state_preserved(model), routed(model), short_of_memory() as examples:
        keep_freed_memory()
        batches.check_repeatable()
        held = {} if only is None else hold_all_but(model, only)
        engine = prepare_again(planned, model, batches) if planned else prepare(model, batches)
        fitting = _fitting_examples(engine, batches)
        size = limit or min(LARGEST_BATCH, fitting, batches.num_data)
        part = min(fitting, limit or fitting)
        examples.append(min(size, part))
        batches = Batches(data, size, labelled)
        yield Passes(engine, batches, progress, part, fitting, switched, held, peers)


@contextmanager
def session(
    model: nn.Module,
    data: Data,
    likelihood: str | Likelihood,
    batch_size: int | str = AUTO,
    progress: bool = True,
    planned: Engine | None = None,
    peers: Processes = ALONE,
    only: Collection[str] | None = None,
) -> Iterator[Session]:
    """Open the model for passes over inputs and targets, of ``only`` some parameters or of all."""
    chosen = resolve(likelihood)
    given = (model, data, batch_size, progress, True, planned, peers, only)
    with opened_passes(*given) as passes:
        # a loss that mixes examples shows in a batch of two, whatever the size of the others
        two = passes.batches.take(torch.arange(min(2, passes.batches.num_data)))
        shape = passes.traced(passes.placed(two)).shape
        opened = Session(**vars(passes), likelihood=chosen.for_outputs(shape))
        opened.observe(two)
        yield opened


@contextmanager
def narrowed(opened: Session, names: Collection[str]) -> Iterator[Session]:
    """The same session of some parameters alone, the others held fixed while this lasts."""
    held = hold_all_but(opened.model, names)
    if not held:
        yield opened
        return
    try:
        engine = prepare(opened.model, opened.batches)
        fitting = _fitting_examples(engine, opened.batches)
        yield replace(
            opened,
            engine=engine,
            fitting=fitting,
            largest_part=max(opened.largest_part, min(fitting, opened.batches.batch_size)),
            held={**opened.held, **held},
        )
    finally:
        for parameter in held.values():
            parameter.requires_grad_(True)
