"""A site: one place where parameters meet the data, as it was recorded.

What a pass needs to know of a layer is here: its rule, the input it saw, which parameters it holds
and where its output lies in the graph. All that is computed from per-example gradients goes from
sites and the gradients at their outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import GradientEdge

from engram.core.errors import EngineError
from engram.core.parameters import Named
from engram.engine.rules.base import Call, Rule


@dataclass(frozen=True)
class Site:
    """One call of an operation with parameters of the model.

    Args:
        rule: how the operation differentiates by its parameters.
        call: its input, examples first, and its settings.
        roles: what each parameter is to the rule ("weight"), and its name in the model.
        edge: the output's place in the graph, where gradients are asked for.
        dim: which dimension of the output counts examples.
        source, version: the input itself, to notice when it is changed in place later.
    """

    rule: Rule
    call: Call
    roles: dict[str, str]
    edge: GradientEdge
    dim: int
    source: Tensor
    version: int

    @property
    def names(self) -> tuple[str, ...]:
        """Parameters of the model at this site."""
        return tuple(self.roles.values())

    def arrange(self, tensor: Tensor) -> Tensor:
        """From the layout of the operation's output to examples first."""
        return tensor.movedim(self.dim, 0)

    def restore(self, tensor: Tensor) -> Tensor:
        """Back to the layout of the operation's output."""
        return tensor.movedim(0, self.dim)

    def check_fresh(self) -> None:
        """The captured input must still be what the operation saw."""
        if self.source._version != self.version:
            raise EngineError(
                "layer inputs that stay as they are until the backward pass",
                f"an input of {', '.join(self.names)} that was changed in place afterwards",
                "write that operation out of place (x = x + y instead of x += y)",
            )


def per_example_gradients(
    sites: Sequence[Site], gradients: Sequence[Tensor | None], names: set[str], chunk_bytes: int
) -> Iterator[Named]:
    """Gradients of these parameters for a few examples at a time, [b, *shape], all sites added."""
    alive = [
        (site, g)
        for site, g in zip(sites, gradients, strict=True)
        if g is not None and names & set(site.names)
    ]
    if not alive:
        return
    total = sum(site.rule.bytes_per_example(site.call) for site, _ in alive)
    size = max(1, chunk_bytes // max(total, 1))
    count = alive[0][0].call.num_examples
    for start in range(0, count, size):
        stop = min(start + size, count)
        result: Named = {}
        for site, gradient in alive:
            m = site.call.multiplicity
            # the whole call keeps what it has made of its input for the next gradient
            call = site.call if stop - start == count else site.call.narrow(start, stop)
            found = site.rule.gradient(call, gradient[start * m : stop * m])
            for role, value in found.items():
                name = site.roles[role]
                if name in names:
                    result[name] = result[name] + value if name in result else value
        yield result
