r"""The passes over one batch: forward once, then as many backward and tangent passes as wanted.

The deviation :math:`J S^{-1} J' e` needs no Jacobian. A backward pass from e gives the gradient
g_l at the output of every site; a rule turns it into the perturbation t_l of that output by the
step :math:`S^{-1} \nabla \ell`; and the model's outputs change by
:math:`\sum_l (\partial f / \partial z_l) t_l`. Since :math:`g_l = (\partial f / \partial z_l)' e`
is linear in e, that sum is the derivative of :math:`\sum_l \langle t_l, g_l(e) \rangle` by e: one
backward pass through the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from engram.core.data.batches import Inputs, flat_outputs, output_shape, raw_outputs
from engram.core.memory import available_bytes, in_words
from engram.core.parameters import Layout, Named, trainable
from engram.core.progress import Pace
from engram.core.state.process import plain_attention
from engram.engine.displacements import Displacements
from engram.engine.drift import Drifts
from engram.engine.gradient_accumulator import DiscardGradients, GradientSink
from engram.engine.perturbations import Perturbations, add_total, inner_products
from engram.engine.plan import Plan
from engram.engine.recorder import Recorder
from engram.engine.sites import Site
from engram.engine.units import replaced
from engram.linalg.precision import Precision

QUICKER = 'estimator="linear" takes one'  # backward pass, where others take one for every output


@dataclass
class Trace:
    """One forward pass with everything needed to differentiate it.

    ``runs_again`` says whether backward passes may run operations of the model once more, as
    activation checkpointing does; ``twice`` whether they can be differentiated. Where they cannot,
    a tangent takes a backward pass for every output: <J' e_k, v> is its entry k. ``shape`` is that
    of the model's own outputs without the examples: (K), or (T, V) of sequences.
    """

    outputs: Tensor
    sites: list[Site]
    graph: Tensor | None = field(repr=False)
    runs_again: bool = False
    twice: bool = True
    shape: tuple[int, ...] = ()

    def release(self) -> None:
        """Let go of the graph and of what was recorded; the outputs stay."""
        self.graph = None
        self.sites = []

    def without_graph(self) -> Trace:
        """What was recorded, to outlive the pass: enough for gradients that are there already."""
        return replace(self, graph=None, sites=[site.without_graph() for site in self.sites])

    def gradients(self, seed: Tensor, create_graph: bool = False) -> list[Tensor | None]:
        """Gradient of <seed, f> at every site's output, in that output's layout."""
        if not self.sites or self.graph is None:
            return []
        edges = [site.edge for site in self.sites if site.edge is not None]
        return list(
            torch.autograd.grad(
                self.graph,
                edges,
                seed,
                retain_graph=True,
                create_graph=create_graph,
                allow_unused=True,
            )
        )

    def arranged(self, seed: Tensor) -> list[Tensor | None]:
        """Gradient of <seed, f> at every site's output, examples first."""
        found = self.gradients(seed)
        return [
            None if g is None else site.arrange(g)
            for site, g in zip(self.sites, found, strict=True)
        ]

    def deviation(
        self, seed: Tensor, precision: Precision, total: GradientSink | None = None
    ) -> Tensor:
        """J S^-1 J' seed, [B, K]; the gradients' sum is added to ``total``, where one is given."""
        leaf, found, arranged = self._differentiable(seed)
        with torch.no_grad():
            own = Perturbations(self.sites, arranged, precision, total or DiscardGradients())
            taken = [own.take(number) for number in range(len(self.sites))]
        return self._push(leaf, found, taken)

    def perturbations(
        self, seed: Tensor, precisions: Sequence[Precision]
    ) -> Iterator[tuple[Tensor, ...]]:
        """The gradient g_l of <seed, f> at each site, and what each precision makes of it, t_l.

        Their products, added up over the sites, are those of the vectors in the model's outputs,
        <u, J S^-1 J' v> = sum_l <g_l(u), t_l(v)>: no tangent pass is needed for them.

        Returns:
            For every site with a perturbation g_l and the t_l, flat, [B, ...].
        """
        with torch.no_grad():
            found = self.arranged(seed)
            own = [Perturbations(self.sites, found, p, DiscardGradients()) for p in precisions]
        for number, gradient in enumerate(found):
            with torch.no_grad():
                moved = [each.take(number) for each in own]
                present = [m.reshape(len(seed), -1) for m in moved if m is not None]
            if gradient is not None and present:
                yield gradient.reshape(len(seed), -1), *present

    def driving(self, seed: Tensor, carried: Displacements, drift: Drifts) -> Tensor:
        """J D, [B, K], for a displacement D of each example's own, after a drift of these outputs.

        Args:
            seed: u, whose gradients J'u act on D during the drift.
            carried: D.
            drift: that acts on D.
        """
        leaf, found, arranged = self._differentiable(seed)
        with torch.no_grad():
            carried.absorb(self.sites, arranged)
            taken = carried.moved(self.sites, arranged, drift)
        return self._push(leaf, found, taken)

    def displaced(
        self, seed: Tensor, carried: Displacements, drift: Drifts | None = None
    ) -> Tensor:
        """J D, [B, K].

        Args:
            seed: any that has a gradient at every site.
            carried: D.
            drift: that acts on D first, with the gradients absorbed last; None for D as it is.
        """
        leaf, found, arranged = self._differentiable(seed)
        with torch.no_grad():
            taken = carried.moved(self.sites, arranged, drift)
        return self._push(leaf, found, taken)

    def add_gradient(self, seed: Tensor, precision: Precision, total: GradientSink) -> None:
        """Add the sum over examples of J' seed to ``total``, where the precision covers it."""
        if not total.wanted:
            return
        with torch.no_grad():
            add_total(self.sites, self.arranged(seed), precision, total)

    def tangent(self, direction: Named) -> Tensor:
        """J direction, [B, K], for one direction that all examples share."""
        count = len(self.outputs)
        return self.own_tangents({n: v.expand(count, *v.shape) for n, v in direction.items()})

    def own_tangents(self, directions: Named) -> Tensor:
        """J_i v_i, [B, K], for a direction of each example's own, [B, *shape] by name."""
        leaf = torch.zeros_like(self.outputs).requires_grad_()
        with self._kernels():
            found = self.gradients(leaf, create_graph=self.twice)
        perturbations: list[Tensor | None] = []
        with torch.no_grad():
            for site in self.sites:
                roles = {
                    role: directions[name]
                    for role, name in site.roles.items()
                    if name in directions
                }
                perturbations.append(site.rule.tangent(site.call, roles) if roles else None)
        return self._push(leaf, found, perturbations)

    def own_gradients(self, seed: Tensor) -> Named:
        """J_i' seed_i, [B, *shape] by name; parameters that no output depends on are left out."""
        result: Named = {}
        with torch.no_grad():
            for site, gradient in zip(self.sites, self.arranged(seed), strict=True):
                if gradient is None:
                    continue
                for role, value in site.rule.gradient(site.call, gradient).items():
                    name = site.roles[role]
                    given = (gradient, site.call.input)
                    result[name] = _added(result[name], value, given) if name in result else value
        return result

    def own_gradient_rows(self, seed: Tensor, layout: Layout) -> Tensor:
        """J_i' seed_i as flat vectors, [B, P]; zeros for what no output depends on."""
        found = self.own_gradients(seed)
        zeros: Named = {
            name: seed.new_zeros(len(seed), *shape)
            for name, shape in zip(layout.names, layout.shapes, strict=True)
            if name not in found
        }
        return layout.flatten(found | zeros)

    def _differentiable(
        self, seed: Tensor
    ) -> tuple[Tensor, list[Tensor | None], list[Tensor | None]]:
        """The seed, the gradients at the sites that depend on it, and these examples first."""
        leaf = seed.detach().requires_grad_()
        with self._kernels():
            found = self.gradients(leaf, create_graph=self.twice)
        for site in self.sites:
            site.check_fresh()
        arranged = [
            None if g is None else site.arrange(g.detach())
            for site, g in zip(self.sites, found, strict=True)
        ]
        return leaf, found, arranged

    def _push(
        self, leaf: Tensor, found: Sequence[Tensor | None], perturbations: Sequence[Tensor | None]
    ) -> Tensor:
        if not self.twice:
            return self._push_by_outputs(perturbations)
        used = [
            (g, site.restore(t))
            for g, t, site in zip(found, perturbations, self.sites, strict=True)
            if g is not None and t is not None and g.requires_grad
        ]
        if not used:
            return torch.zeros_like(leaf)
        with self._kernels():
            (pushed,) = torch.autograd.grad(
                [g for g, _ in used], leaf, [t for _, t in used], allow_unused=True
            )
        return torch.zeros_like(leaf) if pushed is None else pushed.detach()

    @torch.no_grad()
    def _push_by_outputs(self, perturbations: Sequence[Tensor | None]) -> Tensor:
        """sum_l <t_l, g_l(e_k)> for every output k: exact, and a backward pass each."""
        count, pushed = len(self.outputs), torch.zeros_like(self.outputs)
        for k in range(pushed.shape[1]):
            seed = torch.zeros_like(pushed)
            seed[:, k] = 1
            for gradient, perturbation in zip(self.arranged(seed), perturbations, strict=True):
                if gradient is not None and perturbation is not None:
                    pushed[:, k] += (gradient * perturbation).reshape(count, -1).sum(1)
        return pushed

    def _kernels(self) -> AbstractContextManager[None]:
        return plain_attention() if self.runs_again else nullcontext()

    def inner_products(self, seeds: Tensor, precision: Precision) -> Tensor:
        """u_r' J S^-1 J' u_s for output vectors [B, K, R], as [B, R, R]."""
        count = seeds.shape[2]
        pace = Pace(count, "backward passes for a batch", QUICKER)
        per_seed: list[list[Tensor | None]] = []
        with torch.no_grad():
            for r in range(count):
                per_seed.append(self.arranged(seeds[:, :, r]))
                if r == 0:
                    self._check_room(count, per_seed[0])
                pace.step()
            return inner_products(self.sites, per_seed, precision)

    def _check_room(self, count: int, found: Sequence[Tensor | None]) -> None:
        """Before all of them are computed: the gradients of so many seeds must fit into memory."""
        size = count * sum(g.numel() * g.element_size() for g in found if g is not None)
        if size > available_bytes(self.outputs.device):
            raise MemoryError(f"{in_words(size)} for the gradients of {count:,} output vectors")


def _added(total: Tensor, value: Tensor, given: Sequence[Tensor]) -> Tensor:
    """The sum, in the place of a value that is no view of what was given: a third table less."""
    own = value.untyped_storage().data_ptr()
    shared = any(tensor.untyped_storage().data_ptr() == own for tensor in given)
    if shared or not value.is_contiguous():
        return total + value
    return value.add_(total)


def trace(
    model: nn.Module,
    plan: Plan,
    inputs: Inputs,
    num_examples: int,
    parameters: Mapping[str, nn.Parameter] | None = None,
) -> Trace:
    """Run the model once and record its sites; its parameters, where they are at hand."""
    recorder = Recorder(parameters or trainable(model), plan, num_examples)
    with (
        torch.enable_grad(),
        plain_attention(),
        recorder,
        replaced(plan.units, recorder, recorder.copy_of),
    ):
        returned = raw_outputs(model, inputs)
        outputs = flat_outputs(returned)
    recorder.check_complete()
    return Trace(
        outputs.detach(),
        recorder.sites,
        outputs,
        runs_again=not plan.own_kernels,
        twice=plan.twice,
        shape=output_shape(returned),
    )
