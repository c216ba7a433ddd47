r"""The sum of all examples' gradients, exact where it is cheap and sketched where it is not.

For a large matrix at one position the exact sum :math:`\sum_i r_i c_i'` costs as much as the weight
gradients of a training step. Its norm, which is all that the diagnosis needs, is estimated from
:math:`P' \sum_i r_i c_i'` with a random P of a few columns: unbiased for the squared norm, zero
when the sum is zero, and within some 30 % otherwise.
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from engram.core.dtypes import wide
from engram.core.parameters import Named
from engram.core.processes.group import Processes

# Sketches of the sum at large layers. A pass over an MLP took 1.55 training epochs with the exact
# sum and 1.15 with the sketch (docs/decisions.md).
SKETCH = 16  # columns of the random matrix: the squared norm is within sqrt(2 / SKETCH), a third
SKETCH_PAYS = 4  # multiplications of the exact sum over those of a sketch, below which it is exact


class GradientSink(ABC):
    """Where a pass puts the gradients that it comes by, by parameter name.

    ``wanted`` says whether products that serve the sum alone are to be made.
    """

    wanted: bool

    @abstractmethod
    def add(self, name: str, value: Tensor) -> None:
        """Add a gradient that is there anyway."""

    @abstractmethod
    def add_outer(self, name: str, shape: torch.Size, rows: Tensor, columns: Tensor) -> None:
        """Add sum_i r_i c_i' for rows [B, O] and columns [B, I]."""


class GradientAccumulator(GradientSink):
    """Adds up the gradients of each parameter over all examples."""

    wanted = True

    def __init__(self, seed: int = 0) -> None:
        self.exact: Named = {}
        self.sketched: Named = {}
        self._probes: Named = {}
        self._seed = seed

    def add(self, name: str, value: Tensor) -> None:
        if name in self.exact:
            self.exact[name].add_(value)
        else:
            self.exact[name] = value.clone()

    def take_sums(self, peers: Processes, device: torch.device) -> None:
        """Replace what is collected by its sums over processes."""
        self.exact = peers.summed("gradients", self.exact, device)
        self.sketched = peers.summed("sketches of gradients", self.sketched, device)

    def add_outer(self, name: str, shape: torch.Size, rows: Tensor, columns: Tensor) -> None:
        outputs, inputs = rows.shape[1], columns.shape[1]
        if outputs * inputs <= SKETCH_PAYS * SKETCH * (outputs + inputs):
            self.add(name, (rows.mT @ columns).reshape(shape))
            return
        value = (rows @ self._probe(name, outputs, rows)).mT @ columns
        self.sketched[name] = self.sketched[name] + value if name in self.sketched else value

    def _probe(self, name: str, outputs: int, like: Tensor) -> Tensor:
        """The random matrix of a layer, whoever asks for it and whatever came before."""
        if name not in self._probes:
            generator = torch.Generator().manual_seed(self._seed + zlib.crc32(name.encode()))
            drawn = torch.randn(outputs, SKETCH, generator=generator)
            self._probes[name] = drawn.to(like) / math.sqrt(SKETCH)
        return self._probes[name]

    def square_norms(
        self, parameters: Mapping[str, Tensor], prior_of: Callable[[str], float]
    ) -> tuple[float, float]:
        """Squared norms of the sum, and of the sum plus delta times the parameters."""
        losses = objective = 0.0
        for value, regulariser in self._pairs(parameters, prior_of):
            losses += float(value.square().sum())
            objective += float((value + regulariser).square().sum())
        return losses, objective

    def fitting_share(
        self, parameters: Mapping[str, Tensor], prior_of: Callable[[str], float]
    ) -> tuple[float, float]:
        """The c for which the sum plus c delta times the parameters is smallest; its relative norm.

        At a minimum of an objective with another regulariser, c delta is that regulariser's.
        """
        square = inner = length = 0.0
        for value, regulariser in self._pairs(parameters, prior_of):
            square += float(value.square().sum())
            inner += float((value * regulariser).sum())
            length += float(regulariser.square().sum())
        share = max(-inner / length, 0.0) if length > 0 else 0.0
        left = max(square + 2 * share * inner + share**2 * length, 0.0)
        parts = math.sqrt(square) + share * math.sqrt(length)
        return share, 0.0 if parts == 0 else math.sqrt(left) / parts  # NaN stays

    def _pairs(
        self, parameters: Mapping[str, Tensor], prior_of: Callable[[str], float]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each parameter the sum and delta times itself, both exact or in the same sketch."""
        for name, parameter in parameters.items():
            delta = prior_of(name)
            if name in self.sketched:
                value = self.sketched[name]
                probe = self._probe(name, parameter.numel() // value.shape[1], value)
                regulariser = delta * probe.mT @ parameter.reshape(len(probe), -1)
            else:
                value = self.exact.get(name, torch.zeros_like(parameter))
                regulariser = delta * parameter
            yield wide(value), wide(regulariser)


class DiscardGradients(GradientSink):
    """Where nobody asks for the sum: what would be added is dropped, and no product is made."""

    wanted = False

    def add(self, name: str, value: Tensor) -> None:
        pass

    def add_outer(self, name: str, shape: torch.Size, rows: Tensor, columns: Tensor) -> None:
        pass
