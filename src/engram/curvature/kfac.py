r"""Kronecker factors of each layer's curvature: K-FAC.

For a layer with columns c (inputs, with a 1 for the bias) and rows r (output gradients) at M
positions in all, the block of the Gauss-Newton matrix is approximated by

.. math:: \frac{1}{M} \Big(\sum r r'\Big) \otimes \Big(\sum c c'\Big).

Positions that no gradient arrives at, such as padded ones, are not among the M
(:mod:`engram.curvature.reached`). What the rows and columns of a layer are its rule says
(:mod:`engram.engine.rules`); what is made of their sums is in
:mod:`engram.linalg.kronecker_factors`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from engram.core.parameters import Layout
from engram.core.processes.group import Processes
from engram.curvature.reached import Reached
from engram.engine.passes import Trace
from engram.engine.sites import Site
from engram.linalg.kronecker_factors import Factors


class KroneckerFactors:
    """Collects the factors of every layer that has them.

    Args:
        fixed: parameters that count as fixed, and have none.
    """

    def __init__(self, fixed: Collection[str] = ()) -> None:
        self.fixed = fixed
        self.layers: dict[str, Factors] = {}

    def covered(self) -> set[str]:
        """Parameters that have Kronecker factors."""
        return {name for factors in self.layers.values() for name in factors.layout.names}

    def drop_unused(self) -> None:
        """Forget layers whose output reaches no output of the model: they have no gradients."""
        self.layers = {name: f for name, f in self.layers.items() if f.complete}

    def take_sums(self, peers: Processes, device: torch.device) -> None:
        """Replace what is collected by its sums over processes."""
        if peers.alone:
            return
        layouts: dict[str, Layout] = {}
        forms = {n: [f.layout.names, f.layout.shapes] for n, f in self.layers.items()}
        for said in peers.told("layers", forms):
            for first, (names, shapes) in said.items():
                layouts.setdefault(first, Layout(tuple(names), tuple(map(torch.Size, shapes))))
        own = {
            json.dumps([first, name]): value
            for first, factors in self.layers.items()
            for name, value in factors.sums.items()
        }
        sums: dict[str, dict[str, Tensor]] = {first: {} for first in layouts}
        for key, value in peers.summed("Kronecker factors", own, device).items():
            first, name = json.loads(key)
            sums[first][name] = value
        self.layers = {n: Factors.of_sums(layout, sums[n]) for n, layout in layouts.items()}

    def update_columns(self, trace: Trace) -> None:
        """Add a batch's inputs; once per batch."""
        for number, factors in self.of(trace).items():
            trace.sites[number].rule.add_inputs(trace.sites[number].call, factors)

    def update_reached(self, reached: Reached) -> None:
        """Add them at the positions that gradients arrive at, once all gradients are known."""
        for number, site in enumerate(reached.sites):
            factors = self.layers.get(site.roles.get("weight", ""))
            if factors is not None:
                site.rule.add_inputs(reached.call(number), factors)

    def of(self, trace: Trace) -> dict[int, Factors]:
        """The factors of every site that has some, by its number; begun where there are none."""
        uses = Counter(name for site in trace.sites for name in site.names)
        found = {}
        for number, site in enumerate(trace.sites):
            layout = _factorised(site, self.fixed)
            if layout is not None and all(uses[name] == 1 for name in site.names):
                found[number] = self.layers.setdefault(layout.names[0], Factors(layout))
        return found

    def update_rows(self, trace: Trace, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of one output vector of the batch."""
        for site, gradient in zip(trace.sites, gradients, strict=True):
            factors = self.layers.get(site.roles.get("weight", ""))
            if factors is not None and gradient is not None:
                site.rule.add_gradients(site.call, gradient, factors)


def _factorised(site: Site, fixed: Collection[str]) -> Layout | None:
    """The parameters of a site that have factors in common; None where its weight has none."""
    own = {role for role, name in site.roles.items() if name not in fixed}
    roles = [role for role in site.rule.kronecker_roles if role in own]
    if "weight" not in roles:
        return None
    return Layout(tuple(site.roles[r] for r in roles), tuple(site.call.shapes[r] for r in roles))
