"""Examples that the curvature at a checkpoint is measured on, passed over once.

Bases, eigenvalues and leverages all come from the gradients of the same examples. What a pass has
left of them, inputs and output gradients of every layer, is kept where it is small; elsewhere the
pass is made again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from engram.curvature.kinds import ggn_roots
from engram.engine.dropout import dropping
from engram.engine.session import Observed, Session
from engram.sensitivity.trajectory.gradient_products import Gradients

FIT_PASSES = 1.0  # over the data, all checkpoints together, that curvature is measured with
FEWEST_EXAMPLES = 500  # at each checkpoint, where there are so many: fewer make noisy eigenvalues
EXACT_GRADIENTS = 1000  # of all outputs at a checkpoint, up to which no labels are sampled
KEPT_BYTES = 2**29  # of gradients and inputs, all checkpoints together


def parts(num_data: int, count: int, seed: int) -> list[Tensor]:
    """Examples for each of so many checkpoints, others for each as long as there are enough."""
    size = min(num_data, max(FEWEST_EXAMPLES, int(FIT_PASSES * num_data / count)))
    order = torch.randperm(num_data, generator=torch.Generator().manual_seed(seed))
    repeated = order.repeat(-(-count * size // num_data))
    return [repeated[size * k : size * (k + 1)].sort().values for k in range(count)]


def kind_of_roots(count: int, num_outputs: int) -> str:
    """Whether the whole Gauss-Newton matrix of so many examples is taken, or sampled labels.

    The former takes a backward pass for every output, and with many examples makes no difference
    that could be measured (docs/decisions.md).
    """
    return "ggn" if count * num_outputs <= EXACT_GRADIENTS else "fisher"


@dataclass
class Sample:
    """Gradients of some examples at a checkpoint, in groups.

    Args:
        session: at the checkpoint.
        groups: positions of the examples.
        num_outputs: of the model, K.
        seed: of sampled labels and of dropout.
        room: bytes that may be kept from one pass to the next.
    """

    session: Session
    groups: tuple[Tensor, ...]
    num_outputs: int
    seed: int
    room: int
    _kept: dict[int, list[Gradients]] = field(default_factory=dict, repr=False)

    @property
    def num_examples(self) -> int:
        """In all groups."""
        return sum(len(group) for group in self.groups)

    @property
    def curvature(self) -> str:
        """Whose roots the gradients are of."""
        return kind_of_roots(self.num_examples, self.num_outputs)

    def of_groups(self, *numbers: int) -> Sample:
        """Some groups by themselves; this sample where they have the same roots in it."""
        alone = replace(self, groups=tuple(self.groups[n] for n in numbers), _kept={})
        return self if alone.curvature == self.curvature else alone

    def batches(self, *numbers: int) -> Iterator[Gradients]:
        """Those of some groups, of all where none is named; a trace lasts until the next one."""
        for number in numbers or range(len(self.groups)):
            kept = self._kept.get(number)
            if len(self.groups[number]):
                yield from self._passed(number) if kept is None else map(_fresh, kept)

    def forget(self) -> None:
        """What was kept goes."""
        self._kept.clear()

    def _passed(self, number: int) -> Iterator[Gradients]:
        kept: list[Gradients] = []
        with dropping(self.session.model, self.seed + number):  # masks of its own for every group
            indices = self.groups[number]
            for observed in self.session.passes("curvature along the training", indices):
                found = self._gradients(observed)
                if self._fits(found):
                    kept.append((observed.trace.without_graph(), found[1]))
                yield found
        if self.room:
            self._kept[number] = kept

    def _gradients(self, observed: Observed) -> Gradients:
        roots = ggn_roots(observed, self.session.likelihood, self.curvature, self.seed)
        with torch.no_grad():
            gradients = [
                observed.trace.arranged(roots[:, :, r].contiguous()) for r in range(roots.shape[2])
            ]
        return observed.trace, gradients

    def _fits(self, found: Gradients) -> bool:
        """Whether all groups fit, if all examples are as large as these; else nothing is kept."""
        trace, gradients = found
        tensors = [site.call.input for site in trace.sites]
        tensors += [g for one in gradients for g in one if g is not None]
        size = sum(t.numel() * t.element_size() for t in tensors)
        if size * self.num_examples > self.room * len(trace.outputs):
            self.room = 0
            self._kept.clear()
        return self.room > 0


def _fresh(found: Gradients) -> Gradients:
    """With nothing that a layer has made of its inputs in the meantime."""
    trace, gradients = found
    return trace.without_graph(), gradients
