r"""Second moments of per-example gradients: the diagonal, the eigenvalues of EK-FAC, the matrix.

All three are :math:`\sum_i \sum_r` of some square of the gradients :math:`J_i' u_{ir}`: entry by
entry as they are, entry by entry in an eigenbasis, or as an outer product.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from engram.core.dtypes import wide, widest
from engram.core.parameters import Layout, Named
from engram.core.processes.group import Processes
from engram.engine.passes import Trace
from engram.engine.perturbations import in_eigenbasis
from engram.engine.rules.base import CHUNK_BYTES
from engram.engine.rules.matrix import MatrixRule
from engram.engine.sites import DENSE_CHUNK_BYTES, Site, chunks, per_example_gradients
from engram.linalg.block import MatrixBlock


def _uses(sites: Sequence[Site]) -> Counter[str]:
    return Counter(name for site in sites for name in site.names)


class SquareMoments:
    """Sum of squared gradient entries per parameter, or per block in the block's eigenbasis.

    Args:
        blocks: eigenbases, for the parameters that have one; the others are squared as they are.
    """

    def __init__(self, blocks: Sequence[MatrixBlock] = ()) -> None:
        self.block_of: dict[str, MatrixBlock] = {n: b for b in blocks for n in b.names}
        self.by_name: Named = {}
        self.by_block: dict[tuple[str, ...], Tensor] = {}

    def update(self, trace: Trace, gradients: Sequence[Tensor | None], names: set[str]) -> None:
        """Add one output vector's gradients."""
        uses = _uses(trace.sites)
        rest: dict[tuple[str, ...], set[str]] = {}
        for site, gradient in zip(trace.sites, gradients, strict=True):
            own = names & set(site.names)
            if gradient is None or not own:
                continue
            alone = all(uses[n] == 1 for n in site.names)
            if alone and set(site.names) <= names and self._is_rank_one(site):
                self._update_rank_one(site, gradient)
            elif alone and self._by_positions(site, own) is not None:
                self._update_positions(site, gradient)
            elif alone and self._picks_rows(site):
                self._update_picked(site, gradient)
            else:
                key = tuple(sorted(own)) if all(uses[n] == 1 for n in own) else ("shared",)
                rest.setdefault(key, set()).update(own)
        for group in rest.values():
            for found in per_example_gradients(trace.sites, gradients, group, CHUNK_BYTES):
                self._update_gradients(found)

    def _is_rank_one(self, site: Site) -> bool:
        rule = site.rule.as_matrix
        return rule is not None and "weight" in site.roles and rule.is_rank_one(site.call)

    def _by_positions(self, site: Site, names: set[str]) -> MatrixRule | None:
        """The rule of a matrix at several positions, where one block is for all that is asked."""
        block = self.block_of.get(site.roles.get("weight", ""))
        if block is None or set(block.names) != names:
            return None
        return in_eigenbasis(site, [block])

    def _update_positions(self, site: Site, gradient: Tensor) -> None:
        block, rule = self.block_of[site.roles["weight"]], site.rule.as_matrix
        assert rule is not None
        for part in chunks([site], [block]):
            call, own = site.narrow(part, gradient)
            columns = block.positions_seen(rule.input_columns(call)[:, 0], 1)
            turned = block.position_coordinates(rule.rows(call, own)[:, 0], columns)
            self._add_block(block, (turned * turned).sum(0))

    def _picks_rows(self, site: Site) -> bool:
        """Whether an example's gradient is in some rows alone, and the block couples none."""
        block = self.block_of.get(site.roles.get("weight", ""))
        alone = block is None or (block.keeps_rows and block.names == site.names)
        return alone and site.rule.picked_rows(site.call) is not None

    def _update_picked(self, site: Site, gradient: Tensor) -> None:
        """Row by row; of positions with the same row, each adds its share of one square."""
        name, rule = site.roles["weight"], site.rule
        picked, summed = rule.picked_rows(site.call), rule.summed_by_row(site.call, gradient)
        assert picked is not None
        block, shape = self.block_of.get(name), site.call.shapes["weight"]
        turned = summed if block is None else block.rotate_columns(summed)
        times = (picked[:, :, None] == picked[:, None, :]).sum(2)
        squares = wide(turned * turned / times[:, :, None]).flatten(0, 1)
        if block is None:
            if name not in self.by_name:
                self._add_name(name, squares.new_zeros(shape))
            total = self.by_name[name]
        else:
            if block.names not in self.by_block:
                self._add_block(block, squares.new_zeros(block.precision.shape))
            total = self.by_block[block.names]
        total.view(shape).index_add_(0, picked.flatten(), squares)

    def _update_rank_one(self, site: Site, gradient: Tensor) -> None:
        count = site.call.num_examples
        rows, columns = gradient.reshape(count, -1), site.call.input.reshape(count, -1)
        block = self.block_of.get(site.roles["weight"])
        if block is None:
            squares = (rows * rows).mT @ (columns * columns)
            self._add_name(site.roles["weight"], squares.reshape(site.call.shapes["weight"]))
            if "bias" in site.roles:
                self._add_name(site.roles["bias"], (rows * rows).sum(0))
            return
        turned = block.rotate_rows(rows)
        squares = (turned * turned).mT @ block.rotate_columns(columns).square()
        self._add_block(block, squares[None])
        if "bias" in site.roles and len(block.names) == 1:
            self._add_name(site.roles["bias"], (rows * rows).sum(0))

    def _update_gradients(self, found: Named) -> None:
        done: set[str] = set()
        for name, value in found.items():
            block = self.block_of.get(name)
            if block is None:
                self._add_name(name, (value * value).sum(0))
            elif name not in done and all(n in found for n in block.names):
                done |= set(block.names)
                turned = block.coordinates({n: found[n] for n in block.names})
                self._add_block(block, (turned * turned).sum(0))

    def of_block(self, block: MatrixBlock) -> Tensor:
        """The sums in the shape of a block's eigenvalues; zeros for what no output depends on."""
        if block.names in self.by_block:
            return self.by_block[block.names]
        found = self.by_name.get(block.names[0])
        return torch.zeros_like(block.precision) if found is None else found

    def take_sums(self, peers: Processes, device: torch.device) -> None:
        """Replace what is collected by its sums over processes."""
        if peers.alone:
            return
        own = {json.dumps([name]): value for name, value in self.by_name.items()}
        own |= {json.dumps(["", *names]): value for names, value in self.by_block.items()}
        self.by_name, self.by_block = {}, {}
        for key, value in peers.summed("squares of gradients", own, device).items():
            first, *names = json.loads(key)
            if names:
                self.by_block[tuple(names)] = value
            else:
                self.by_name[first] = value

    def _add_name(self, name: str, value: Tensor) -> None:
        value = wide(value)
        self.by_name[name] = self.by_name[name] + value if name in self.by_name else value

    def _add_block(self, block: MatrixBlock, value: Tensor) -> None:
        value, key = wide(value), block.names
        self.by_block[key] = self.by_block[key] + value if key in self.by_block else value


class OuterMoments:
    """Sum of outer products of gradients over the parameters of a layout, [P, P]."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        size = layout.num_params
        self.matrix = torch.zeros(size, size, dtype=widest(device), device=device)

    def update(self, trace: Trace, gradients: Sequence[Sequence[Tensor | None]]) -> None:
        """Add the gradients of several output vectors of one batch."""
        names = set(self.layout.names)
        rows: list[Tensor] = []
        for per_site in gradients:
            for found in per_example_gradients(trace.sites, per_site, names, DENSE_CHUNK_BYTES):
                rows.append(self.layout.flatten(self._filled(found)))
                if sum(r.numel() * r.element_size() for r in rows) >= DENSE_CHUNK_BYTES:
                    self._add(rows)
                    rows = []
        if rows:
            self._add(rows)

    def take_sums(self, peers: Processes) -> None:
        """Replace the matrix by its sum over processes."""
        self.matrix = peers.summed("outer products", {"matrix": self.matrix})["matrix"]

    def _add(self, rows: list[Tensor]) -> None:
        stacked = torch.cat(rows)
        self.matrix += stacked.mT @ stacked

    def _filled(self, found: Named) -> Named:
        reference = next(iter(found.values()))
        return {
            name: found[name] if name in found else reference.new_zeros(len(reference), *shape)
            for name, shape in zip(self.layout.names, self.layout.shapes, strict=True)
        }
