"""Examples that the curvature at a checkpoint is measured on, passed over once.

Bases, eigenvalues and leverages all come from the gradients of the same examples. What a pass has
left of them, inputs and output gradients of every layer, is kept where it is small; elsewhere the
pass is made again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engram.curvature.kinds import drawn_roots, ggn_roots
from engram.engine.dropout import dropping
from engram.engine.session import Observed, Session
from engram.likelihoods.draws import Draws
from engram.sensitivity.trajectory.gradient_products import Gradients

FIT_PASSES = 1.0  # over the data, all checkpoints together, that curvature is measured with
FEWEST_EXAMPLES = 500  # at each checkpoint, where there are so many: fewer make noisy eigenvalues
EXACT_GRADIENTS = 1000  # of all outputs at a checkpoint, up to which no labels are sampled
# Of an example whose gradients are multiplied with others'. One sampled label each makes a matrix
# of few directions, past which held-out gradients seem free to move: losses rose by up to 3.6 times
# what they do with all roots; with two exact ones and a drawn one by 0.92 to 1.08 times
ROOTS = 3
HELD, SEEN, REST = range(3)  # groups of a sample: held out of the curvature, in it, and beside both
KEPT_BYTES = 2**29  # of gradients and inputs, all checkpoints together


def parts(num_data: int, count: int, seed: int) -> list[Tensor]:
    """Examples for each of so many checkpoints, others for each as long as there are enough."""
    size = min(num_data, max(FEWEST_EXAMPLES, int(FIT_PASSES * num_data / count)))
    order = torch.randperm(num_data, generator=torch.Generator().manual_seed(seed))
    repeated = order.repeat(-(-count * size // num_data))
    return [repeated[size * k : size * (k + 1)].sort().values for k in range(count)]


@dataclass
class Sample:
    """Gradients of some examples at a checkpoint, in groups.

    Args:
        session: at the checkpoint.
        groups: positions of the examples, by ``HELD``, ``SEEN`` and ``REST``.
        num_outputs: of the model, K.
        seed: of sampled labels and of dropout.
        roots: of an example of the first two groups, where all together are not few.
        room: bytes that may be kept from one pass to the next.
    """

    session: Session
    groups: tuple[Tensor, ...]
    num_outputs: int
    seed: int
    roots: int
    room: int
    _kept: dict[int, list[Gradients]] = field(default_factory=dict, repr=False)

    @property
    def num_examples(self) -> int:
        """In all groups."""
        return sum(len(group) for group in self.groups)

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
                found = _gradients(observed, self._roots(observed, number))
                if self._fits(found):
                    kept.append((observed.trace.without_graph(), found[1]))
                yield found
        if self.room:
            self._kept[number] = kept

    def _roots(self, observed: Observed, number: int) -> Tensor:
        """All of them where they are few; else some in the groups of products, one in the rest.

        All take a backward pass for every output, and for the curvature along the eigenvectors of
        many examples they make no difference that could be measured (docs/decisions.md).
        """
        likelihood, count = self.session.likelihood, 1 if number == REST else self.roots
        few = self.num_examples * self.num_outputs <= EXACT_GRADIENTS
        if few or self.num_outputs <= count:
            return ggn_roots(observed, likelihood, "ggn", self.seed)
        if count == 1:
            return ggn_roots(observed, likelihood, "fisher", self.seed)
        draws = Draws(self.seed, observed.batch.indices)
        return drawn_roots(likelihood, observed.outputs, observed.targets, draws, count)[0]

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


def _gradients(observed: Observed, roots: Tensor) -> Gradients:
    """Of a batch, for each root."""
    with torch.no_grad():
        return observed.trace, [
            observed.trace.arranged(roots[:, :, r].contiguous()) for r in range(roots.shape[2])
        ]


def _fresh(found: Gradients) -> Gradients:
    """With nothing that a layer has made of its inputs in the meantime."""
    trace, gradients = found
    return trace.without_graph(), gradients
