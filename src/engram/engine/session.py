"""A model, a likelihood and data, ready for passes: the batches with what every pass needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from engram.arguments import whole
from engram.batches import Batch, Batches, Data, call, check_output_rows
from engram.engine.passes import Trace
from engram.engine.prepare import Engine, prepare
from engram.engine.state import device_of, undisturbed
from engram.errors import NonFiniteError
from engram.inputs import tensors_of
from engram.likelihoods import Likelihood, resolve
from engram.parameters import Named, check_module, uncompiled

LARGEST_BATCH = 256
MEMORY_SHARE = 0.25
WORKING_SET = 192 * 2**20  # larger batches are split: no slower, and twice the memory of training
RETAINED_BLOCK = 31 * 2**20
COPIES_OF_ACTIVATIONS = 8  # inputs, gradients, their graph, moves and temporaries of a pass


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
class Session:
    """Everything that a pass over the data needs."""

    engine: Engine
    batches: Batches
    likelihood: Likelihood
    progress: bool
    largest_part: int
    fitting: int  # examples that a pass could hold at once, whatever the batch size

    @property
    def model(self) -> nn.Module:
        """The user's model, in eval mode while the session lasts."""
        return self.engine.model

    def observe(self, batch: Batch) -> Observed:
        """Forward pass, checked targets, loss and residual of a batch."""
        batch = batch.to(device_of(self.model))
        _check_inputs(batch)
        trace = self.engine.trace(batch)
        check_output_rows(trace.outputs, len(batch))
        _check_finite("outputs", trace.outputs, batch)
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
        if indices is None:
            source: Iterator[Batch] = iter(self.batches)
            length = len(self.batches)
        else:
            source = self.batches.subset(indices, size)
            length = -(-len(indices) // size)
        for batch in tqdm(
            source, description, length, disable=not self.progress, delay=2.0, leave=False
        ):
            for start in range(0, len(batch), self.largest_part):
                whole = len(batch) <= self.largest_part
                part = batch if whole else batch.select(slice(start, start + self.largest_part))
                observed = self.observe(part)
                yield observed
                observed.trace.release()  # before the next forward pass, not after it


def _check_inputs(batch: Batch) -> None:
    for x in tensors_of(batch.inputs):
        if x.is_floating_point():
            _check_finite("inputs", x.flatten(1) if x.dim() > 1 else x[:, None], batch)


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
    raise NonFiniteError(
        f"finite {what}",
        f"NaN or infinity for example {index} (batch of examples {int(batch.indices[0])} to "
        f"{int(batch.indices[-1])}); {cause}",
        "clean or drop that example",
    )


def available_bytes(device: torch.device) -> int:
    """Memory that is free now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def keep_freed_memory() -> None:
    """Have freed temporaries kept for reuse instead of handed back to the system page by page.

    The C library returns blocks as large as the largest one freed so far, and takes page faults for
    them again in the next batch: a sixth of the time of a K-FAC fit of a small convolutional net.
    Freeing one untouched block of nearly the largest size it considers raises that limit.
    """
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
def session(
    model: nn.Module,
    data: Data,
    likelihood: str | Likelihood,
    batch_size: int | None = None,
    progress: bool = True,
) -> Iterator[Session]:
    """Open the model for passes; it is as before when this ends, also after an exception."""
    if batch_size is not None:
        batch_size = whole("batch_size", batch_size, remedy="leave it out")
    check_module(model)
    chosen, model = resolve(likelihood), uncompiled(model)
    batches = Batches(data, batch_size or 1)
    with undisturbed(model):
        keep_freed_memory()
        batches.check_repeatable()
        engine = prepare(model, batches)
        fitting = _fitting_examples(engine, batches)
        size = batch_size or min(LARGEST_BATCH, fitting, batches.num_data)
        part = min(fitting, batch_size or fitting)
        yield Session(engine, Batches(data, size), chosen, progress, part, fitting)
