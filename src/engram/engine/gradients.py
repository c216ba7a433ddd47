"""Per-example gradients of named parameters, a few examples at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from engram.core.parameters import Named
from engram.engine.recorder import Site


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
