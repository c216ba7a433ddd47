r"""What is kept of the displacement D of each example, layer by layer.

D is as large as the parameters, for each example; what is kept of it instead depends on the layer:

- a linear layer at one position: the rows and columns of its gradients at every checkpoint so far,
  since D is a short sum of products :math:`r c'`, each with weights that all examples share;
- an embedding: the rows of the tokens that the example has, which are the same at all checkpoints;
- any other layer: D itself, in the eigenbasis; of a matrix at several positions it is made of
  rows and columns there.

In each case the change of the layer's output by D is had without building more than that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engram.core.parameters import Named
from engram.engine.drift import Drifts
from engram.engine.perturbations import in_eigenbasis
from engram.engine.rules.matrix import MatrixRule
from engram.engine.sites import Site, SiteGroup, chunks
from engram.linalg.block import MatrixBlock
from engram.linalg.columns import Columns

Members = Sequence[tuple[Site, Tensor | None]]


class Carried(ABC):
    """What is kept of D for the parameters of one group of sites."""

    @abstractmethod
    def absorb(self, members: Members) -> None:
        """Take the gradients J'u at the sites of a checkpoint, for the drifts that follow."""

    @abstractmethod
    def moved(self, members: Members, drift: Drifts) -> list[Tensor | None]:
        """Changes of the sites' outputs by D after a drift with the gradients absorbed last."""

    @abstractmethod
    def advance(self, drift: Drifts) -> None:
        """Let the drift act on D, with the gradients absorbed last."""

    @abstractmethod
    def outputs(self, members: Members) -> list[Tensor | None]:
        """Changes of the sites' outputs by D as it is."""


class Products(Carried):
    """D as a sum over checkpoints of products r c' times weights that all examples share."""

    def __init__(self, block: MatrixBlock) -> None:
        self.block = block
        self.rows: list[Tensor] = []
        self.columns: list[Tensor] = []
        self.weights: list[Tensor] = []  # of all but what was absorbed last
        self._turned: tuple[Tensor, Tensor] | None = None  # inputs seen last, and their columns

    def absorb(self, members: Members) -> None:
        ((site, gradient),) = members
        if gradient is not None:
            self.rows.append(self.block.rotate_rows(gradient.reshape(site.call.num_examples, -1)))
            self.columns.append(self._columns(site))

    def _columns(self, site: Site) -> Tensor:
        """Inputs in the eigenbasis; those of the data are the same at all checkpoints."""
        inputs = site.call.input.reshape(site.call.num_examples, -1)
        if self._turned is None or not _same(self._turned[0], inputs):
            self._turned = (inputs, self.block.rotate_columns(inputs))
        return self._turned[1]

    def _after(self, drift: Drifts) -> list[Tensor]:
        step = drift[self.block.names]
        old = [w * _table(step.decay) for w in self.weights]
        return [*old, _table(step.gain)] if len(self.rows) > len(old) else old

    def _through(self, members: Members, weights: Sequence[Tensor]) -> list[Tensor | None]:
        ((site, gradient),) = members
        if gradient is None or not weights:
            return [None]
        seen = self._columns(site)
        found = torch.zeros_like(self.rows[0])
        for r, c, w in zip(self.rows, self.columns, weights, strict=True):
            found.addcmul_(r, (c * seen) @ w.mT)
        return [self.block.rotate_rows_back(found).reshape(gradient.shape)]

    def moved(self, members: Members, drift: Drifts) -> list[Tensor | None]:
        return self._through(members, self._after(drift))

    def advance(self, drift: Drifts) -> None:
        self.weights = self._after(drift)

    def outputs(self, members: Members) -> list[Tensor | None]:
        return self._through(members, self.weights)


def _same(first: Tensor, second: Tensor) -> bool:
    """Whether two batches of inputs are the same numbers; most of those that are not differ at
    once, so that few are compared."""
    if first.data_ptr() == second.data_ptr():
        return True
    return torch.equal(first[:1], second[:1]) and torch.equal(first, second)


def _table(values: Tensor) -> Tensor:
    """Eigenvalues [1, O, I] or [O, I] as a matrix."""
    return values[0] if values.dim() == 3 else values


class Tokens(Carried):
    """D of the rows of an embedding that belong to each example's tokens, [B, T, D]."""

    def __init__(self, block: MatrixBlock) -> None:
        self.block = block
        self.tokens: Tensor | None = None
        self.gradient: Tensor | None = None
        self.rows: Tensor | None = None

    def absorb(self, members: Members) -> None:
        ((site, gradient),) = members
        if gradient is not None:
            self.tokens = site.rule.picked_rows(site.call)
            summed = site.rule.summed_by_row(site.call, gradient)
            self.gradient = self.block.rotate_columns(summed)

    def _after(self, drift: Drifts) -> Tensor | None:
        if self.gradient is None:
            return self.rows
        step = drift[self.block.names]
        found = self.gradient * _table(step.gain)[self.tokens]
        return found if self.rows is None else found + self.rows * _table(step.decay)[self.tokens]

    def _through(self, members: Members, rows: Tensor | None) -> list[Tensor | None]:
        ((_, gradient),) = members
        if gradient is None or rows is None:
            return [None]
        return [self.block.rotate_columns_back(rows).reshape(gradient.shape)]

    def moved(self, members: Members, drift: Drifts) -> list[Tensor | None]:
        return self._through(members, self._after(drift))

    def advance(self, drift: Drifts) -> None:
        self.rows = self._after(drift)

    def outputs(self, members: Members) -> list[Tensor | None]:
        return self._through(members, self.rows)


class Positions(Carried):
    """D of a matrix that acts at several positions, in its eigenbasis, [B, O, I].

    Gradients and outputs go by rows and columns, turned where that is shorter than turning D.
    """

    def __init__(self, block: MatrixBlock, rule: MatrixRule) -> None:
        self.block, self.rule = block, rule
        self.gradient: Tensor | None = None
        self.values: Tensor | None = None
        self._seen: list[Columns] = []  # of the parts of the batch that was absorbed last
        self._inputs: Tensor | None = None  # they are of these, which nothing else may overwrite

    def absorb(self, members: Members) -> None:
        ((site, gradient),) = members
        self.gradient, self._seen, self._inputs = None, [], site.call.input
        if gradient is None:
            return
        found = []
        for part in chunks([site], [self.block]):
            call, own = site.narrow(part, gradient)
            columns = self.block.positions_seen(self.rule.input_columns(call)[:, 0], 2)
            rows = self.rule.rows(call, own)[:, 0]
            found.append(self.block.position_coordinates(rows, columns))
            self._seen.append(columns)
        self.gradient = torch.cat(found)

    def _after(self, drift: Drifts) -> Tensor | None:
        if self.gradient is None:
            return self.values
        step = drift[self.block.names]
        found = self.gradient * step.gain
        return found if self.values is None else found.addcmul_(self.values, step.decay)

    def _through(
        self, members: Members, values: Tensor | None, seen: Sequence[Columns]
    ) -> list[Tensor | None]:
        ((site, gradient),) = members
        if gradient is None or values is None:
            return [None]
        found = []
        for number, part in enumerate(chunks([site], [self.block])):
            call, own = site.narrow(part, gradient)
            columns = (
                seen[number]
                if seen
                else self.block.positions_seen(self.rule.input_columns(call)[:, 0], 1)
            )
            moved = self.block.position_outputs(values[part], columns)
            found.append(self.rule.in_output_shape(call, moved, own.shape))
        return [torch.cat(found)]

    def moved(self, members: Members, drift: Drifts) -> list[Tensor | None]:
        ((site, _),) = members
        own = self._inputs is not None and _same(self._inputs, site.call.input)
        seen, self._seen, self._inputs = self._seen if own else [], [], None
        return self._through(members, self._after(drift), seen)

    def advance(self, drift: Drifts) -> None:
        self.values, self.gradient = self._after(drift), None

    def outputs(self, members: Members) -> list[Tensor | None]:
        return self._through(members, self.values, [])


class Explicit(Carried):
    """D itself in the eigenbases of its blocks, [B, *eigenvalues]."""

    def __init__(self, blocks: Sequence[MatrixBlock]) -> None:
        self.blocks = blocks
        self.gradient: dict[tuple[str, ...], Tensor] = {}
        self.values: dict[tuple[str, ...], Tensor] = {}

    def absorb(self, members: Members) -> None:
        found: Named = {}
        for site, gradient in members:
            if gradient is None:
                continue
            for role, value in site.rule.gradient(site.call, gradient).items():
                name = site.roles[role]
                found[name] = found[name] + value if name in found else value
        self.gradient = {
            block.names: block.coordinates({name: found[name] for name in block.names})
            for block in self.blocks
            if all(name in found for name in block.names)
        }

    def _after(self, drift: Drifts) -> dict[tuple[str, ...], Tensor]:
        result = {}
        for names, gradient in self.gradient.items():
            step, old = drift[names], self.values.get(names)
            added = gradient * step.gain
            result[names] = added if old is None else added.addcmul_(old, step.decay)
        return result

    def _through(
        self, members: Members, values: Mapping[tuple[str, ...], Tensor]
    ) -> list[Tensor | None]:
        step: Named = {}
        for block in self.blocks:
            if block.names in values:
                step |= block.from_coordinates(values[block.names])
        result: list[Tensor | None] = []
        for site, _ in members:
            direction = {role: step[name] for role, name in site.roles.items() if name in step}
            result.append(site.rule.tangent(site.call, direction) if direction else None)
        return result

    def moved(self, members: Members, drift: Drifts) -> list[Tensor | None]:
        return self._through(members, self._after(drift))

    def advance(self, drift: Drifts) -> None:
        self.values = self._after(drift)
        self.gradient = {}

    def outputs(self, members: Members) -> list[Tensor | None]:
        return self._through(members, self.values)


def carried_for(group: SiteGroup, sites: Sequence[Site]) -> Carried:
    """The shortest way to keep D for a group of sites."""
    matrices = group.matrices
    assert len(matrices) == len(group.blocks), "eigenbases of matrices"
    if len(group.positions) == 1 and len(matrices) == 1:
        site, block = sites[group.positions[0]], matrices[0]
        rule = site.rule.as_matrix
        is_weight = site.roles.get("weight") == block.names[0]
        if rule is not None and is_weight and rule.is_rank_one(site.call):
            return Products(block)
        if block.keeps_rows and site.rule.picked_rows(site.call) is not None:
            return Tokens(block)
        by_positions = in_eigenbasis(site, matrices)
        if by_positions is not None:
            return Positions(block, by_positions)
    return Explicit(matrices)
