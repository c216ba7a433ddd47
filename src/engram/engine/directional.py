r"""Products of every example's gradient with vectors that all examples share, [B, n].

Where a layer acts once on an example its gradient is one product :math:`r c'`, and
:math:`\langle r c', W \rangle = r' W c`: no gradient is built. Elsewhere those of a few examples
are, a layer at a time, so that they stay in the processor's cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from engram.core.parameters import Named
from engram.engine.sites import Site, per_example_gradients

OUTPUT_BYTES = 32 * 2**20  # of W c that are held at a time


def directional(
    sites: Sequence[Site], gradients: Sequence[Tensor | None], vectors: Named
) -> Tensor:
    """<g_i, v_k> for each example i and vector k, [B, n]; sites whose gradients are given.

    Args:
        gradients: at the sites' outputs, examples first.
        vectors: [n, *shape] by name.
    """
    uses = Counter(name for site in sites for name in site.names)
    count = sites[0].call.num_examples
    number = len(next(iter(vectors.values())))
    like = next(iter(vectors.values()))
    found = like.new_zeros(count, number)
    rest: dict[tuple[str, ...], set[str]] = {}
    for site, gradient in zip(sites, gradients, strict=True):
        own = set(site.names) & set(vectors)
        if gradient is None or not own:
            continue
        if _is_product(site) and all(uses[name] == 1 for name in site.names):
            found += _of_product(site, gradient, vectors)
        else:
            key = tuple(sorted(own)) if all(uses[name] == 1 for name in own) else ("shared",)
            rest.setdefault(key, set()).update(own)
    for names in rest.values():
        start = 0
        for built in per_example_gradients(sites, gradients, names):
            lead = len(next(iter(built.values())))
            for name, value in built.items():
                found[start : start + lead] += (
                    value.reshape(lead, -1) @ vectors[name].reshape(number, -1).mT
                )
            start += lead
    return found


def _is_product(site: Site) -> bool:
    rule = site.rule.as_matrix
    return rule is not None and rule.is_rank_one(site.call)


def _of_product(site: Site, gradient: Tensor, vectors: Named) -> Tensor:
    """r' W_k c, and r' b_k."""
    count = site.call.num_examples
    rows, columns = gradient.reshape(count, -1), site.call.input.reshape(count, -1)
    weight, bias = (vectors.get(site.roles.get(role, "")) for role in ("weight", "bias"))
    found: list[Tensor] = []
    if weight is not None:
        matrices = weight.flatten(2) if weight.dim() > 3 else weight
        size = max(1, OUTPUT_BYTES // (rows.numel() * rows.element_size()))
        parts = []
        for some in matrices.split(size):
            moved = (columns @ some.flatten(0, 1).mT).unflatten(1, (len(some), -1))
            parts.append(torch.bmm(moved, rows[:, :, None])[:, :, 0])
        found.append(torch.cat(parts, dim=1))
    if bias is not None:
        found.append(rows @ bias.mT)
    return sum(found[1:], found[0])
