r"""Layers right before batch normalisation: their weights count up to shift and scale.

In training, BatchNorm takes the mean and the variance of its input from the batch. A change of the
weights before it that shifts a channel, or scales it, is undone at once. With running statistics, as
in eval mode, it is not: gradients by these weights have parts that training never had. For a layer
:math:`z = W c` with inputs c of mean m and covariance K, training sees of a change D of a row w

.. math:: \Pi D = D - \frac{D' K w}{w' K w} w, \qquad z' = \Pi D\,(c - m)

and of a gradient what the transposed map leaves of it. The layer's rule is wrapped in that map.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from engram.core.dtypes import wide
from engram.engine.rules.base import Bound, Call, Roles, Rule
from engram.engine.rules.matrix import MatrixRule
from engram.engine.rules.norms import ChannelNorm
from engram.engine.sites import Site
from engram.linalg.kronecker_factors import Factors


@dataclass
class Moments:
    """Sums over the inputs of a layer: of c, [G, I], of c c', [G, I, I], and their number."""

    total: Tensor | float = 0.0
    square: Tensor | float = 0.0
    count: int = 0

    def add(self, columns: Tensor) -> None:
        """Add inputs [B, G, T, I]."""
        flat = wide(columns.transpose(0, 1).flatten(1, 2))
        self.total = self.total + flat.sum(1)
        self.square = self.square + flat.mT @ flat
        self.count += flat.shape[1]


@dataclass(frozen=True)
class Channel:
    """What BatchNorm makes of changes of the weights before it.

    Args:
        mean: m, [G, 1, I].
        weight: w, [G, O, I].
        image: K w, [G, O, I].
        length: w' K w, [G, O, 1].
    """

    mean: Tensor
    weight: Tensor
    image: Tensor
    length: Tensor

    @classmethod
    def of(cls, weight: Tensor, moments: Moments) -> Channel:
        """Of a weight as it is, and the moments of its inputs."""
        assert isinstance(moments.total, Tensor)
        assert isinstance(moments.square, Tensor)
        mean = moments.total / moments.count
        covariance = moments.square / moments.count - mean[:, :, None] * mean[:, None, :]
        groups = len(mean)
        rows = wide(weight.detach()).reshape(groups, weight.shape[0] // groups, -1)
        image = rows @ covariance
        length = (rows * image).sum(2, keepdim=True).clamp(min=torch.finfo(image.dtype).tiny)
        found = (mean[:, None, :], rows, image, length)
        return cls(*(part.to(weight.dtype) for part in found))

    def seen(self, change: Tensor) -> Tensor:
        """Pi D for changes [..., G, O, I]."""
        return change - (change * self.image).sum(-1, keepdim=True) / self.length * self.weight

    def gradient(self, gradient: Tensor, rows: Tensor) -> Tensor:
        """Of gradients [B, G, O, I] with rows summed over positions, [B, G, O, 1]."""
        centred = gradient - rows * self.mean
        along = (centred * self.weight).sum(-1, keepdim=True) / self.length
        return centred - along * self.image


class Normalised(Rule):
    """The rule of a layer whose output goes through batch normalisation and nowhere else.

    Args:
        rule: of the layer.
        channel: at the present weights.
    """

    def __init__(self, rule: MatrixRule, channel: Channel) -> None:
        self.rule, self.channel = rule, channel
        self.kronecker_roles = ("weight",)  # type: ignore[misc]

    def bind(self, arguments: Any) -> Bound | None:
        return self.rule.bind(arguments)

    def gradient(self, call: Call, output_gradient: Tensor) -> Roles:
        weight = self.rule.gradient(call, output_gradient)["weight"]
        rows = self.rule.rows(call, output_gradient).sum(2)[..., None]
        shaped = weight.reshape(len(weight), *self.channel.weight.shape)
        return {"weight": self.channel.gradient(shaped, rows).reshape(weight.shape)}

    def tangent(self, call: Call, direction: Roles) -> Tensor:
        weight = direction["weight"]
        shaped = self.channel.seen(weight.reshape(len(weight), *self.channel.weight.shape))
        shift = -(shaped * self.channel.mean).sum(-1).flatten(1)
        return self.rule.tangent(call, {"weight": shaped.reshape(weight.shape), "bias": shift})

    def bytes_per_example(self, call: Call) -> int:
        return 2 * self.rule.bytes_per_example(call)

    def add_inputs(self, call: Call, factors: Factors) -> None:
        self.rule.add_inputs(call, factors)

    def add_gradients(self, call: Call, output_gradient: Tensor, factors: Factors) -> None:
        self.rule.add_gradients(call, output_gradient, factors)


def before_normalisation(sites: Sequence[Site]) -> list[int]:
    """Positions of sites of matrices whose output is the input of a batch normalisation."""
    edges = {(id(site.edge.node), site.edge.output_nr): n for n, site in enumerate(sites)}
    found = []
    for site in sites:
        if isinstance(site.rule, ChannelNorm) and site.source.requires_grad and "running_mean" in site.call.options:
            edge = get_gradient_edge(site.source)
            place = edges.get((id(edge.node), edge.output_nr))
            if place is not None and sites[place].rule.as_matrix is not None:
                found.append(place)
    return found


def with_normalisation(sites: Sequence[Site], channels: Mapping[int, Channel]) -> list[Site]:
    """The sites, with the rules of those before a normalisation wrapped in what it undoes."""
    result = list(sites)
    for place, channel in channels.items():
        site = sites[place]
        rule = site.rule.as_matrix
        assert rule is not None
        roles = {"weight": site.roles["weight"]}
        result[place] = replace(site, rule=Normalised(rule, channel), roles=roles)
    return result
