r"""How far examples move their own outputs, from gradients of all layers together.

Kronecker factors hold each layer back by its own curvature alone, and spread what few examples have
over many directions. How far an example moves its outputs in a segment of training, its leverage,
is then too large, by 5 to 10 times on deep residual nets. The mean over examples is known without
any factors. For gradients g of M examples, each entry times the root of its training time, and the
curvature of m of them,

.. math::
    A_m = \frac1m \sum_{j \in S} g_j g_j', \qquad
    v_m = \operatorname*{mean}_{i \notin S} \; g_i' \, \frac{1 - e^{-A_m}}{A_m} \, g_i

is the mean leverage, times N, of examples that the curvature has not seen, as leaving one out asks
for. It takes the products of gradients alone. With m it falls along a learning curve, which is
followed to N. The factors' curvature is then multiplied by the number that gives them this mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engram.sensitivity.trajectory.gradient_products import Products
from engram.sensitivity.trajectory.gradient_sketch import ENTRIES_KEPT
from engram.sensitivity.trajectory.samples import ROOTS

GRAM_ROWS = 1000  # gradients that are multiplied with each other
GRAM_BYTES = 2**29  # that these gradients may take
GRAM_PRODUCTS = 4e10  # multiplications at a checkpoint, two seconds or so; fewer examples beyond
FEWEST_HELD = 32  # fewer say nothing about a mean
HELD_OUT = 4  # one of so many examples is held out
TINY = 1e-300  # of a leverage: below there is none
SMALL = 1e-10  # of the largest eigenvalue: below is rounding
# Of a learning curve in logarithms, where 1 is a power law. 0.65 to 0.81 a doubling was found from
# 2.3 times the examples; few of them say anything up to 1
SLOWEST_BEND = 0.85
# Logarithms between which the curvature's factor is looked for. Factors that leave out what is
# between layers are never too stiff; where some hundred examples say so, as in a net that has
# memorised thousands, they are too few to know their curvature
SCALES = (0.0, 12.0)
CLOSE_ENOUGH = 1e-10  # of the leverage's logarithm, where the factor is taken
IN_CACHE = 2**15  # directions at a time
TRIES = 60  # of factors; a dozen are enough


def rows_held(entries: int) -> int:
    """How many gradients of so many numbers fit into memory, in single precision, and time."""
    entries = max(1, entries)
    return min(GRAM_BYTES // (4 * entries), int(math.sqrt(GRAM_PRODUCTS / entries)), GRAM_ROWS)


def rows_added(shapes: Sequence[Sequence[int]]) -> int:
    """How many rows of a weight are added up in gradients that are kept, for parameters' shapes.

    None are where the fewest examples with all their roots fit as they are.
    """
    num_params = sum(math.prod(shape) for shape in shapes)
    if rows_held(num_params) >= FEWEST_HELD * ROOTS:
        return 1
    return max(1, num_params // ENTRIES_KEPT)


def held_out_leverage(products: Products, num_data: int, seed: int = 0) -> float:
    """v_N: N times the mean leverage of examples that the curvature of N others has not seen.

    Args:
        products: of gradients.
        num_data: N.
        seed: of the choice among the seen examples of the smaller parts.

    Example:
        >>> one = torch.ones(48, 1, 48, 1).double()  # one direction, which all others know
        >>> print(f"{held_out_leverage(Products(one, one[:16], 1.0), 64):.3f}")
        0.632
    """
    most = len(products.seen)
    order = torch.randperm(most, generator=torch.Generator().manual_seed(seed))
    found = []
    for parts in (4, 2, 1):
        size = most // parts
        leverages = [_leverage(products, order[size * n : size * (n + 1)]) for n in range(parts)]
        found.append(sum(leverages) / parts)
    return followed(found, math.log2(num_data / most))


def _leverage(products: Products, part: Tensor) -> float:
    """v_m of the held-out examples, with the curvature of some of the seen ones."""
    roots, out, size = products.seen.shape[1], len(products.cross), len(part)
    inner = products.seen[part][:, :, part].reshape(size * roots, size * roots) / size
    values, vectors = torch.linalg.eigh(inner)
    values = values.clamp(min=SMALL * float(values[-1].clamp(min=TINY)))
    cross = products.cross[:, :, part].reshape(out * products.cross.shape[1], size * roots)
    lost = 1 + torch.expm1(-values) / values  # 1 - (1 - e^-x) / x
    seen = ((cross @ vectors).square() / (size * values)) @ lost
    return products.energy - float(seen.sum()) / out


def followed(found: Sequence[float], doublings: float) -> float:
    """A learning curve, known at three sizes with a factor 2 between them, so many doublings on.

    Its slope in logarithms goes on falling by the same factor at each doubling.

    Example:
        >>> print(f"{followed([8.0, 4.0, 2.0], 1.0):.2f} {followed([4.0, 2.0, 2.0], 3.0):.2f}")
        1.11 2.00
    """
    tiny = 1e-12
    first, second, third = (math.log2(max(value, tiny)) for value in found)
    before, slope = second - first, third - second
    bend = min(max(slope / before, 0.0), SLOWEST_BEND) if before else 0.0
    steps = bend * (1 - bend**doublings) / (1 - bend)
    return float(2 ** (third + slope * steps))


def curvature_scale(rates: Tensor, energies: Tensor, wanted: float) -> float:
    r"""The factor c of the curvature, 1 or more, that gives factors the leverage that is wanted.

    .. math:: \sum_d e_d \, \frac{1 - e^{-c x_d}}{c x_d}

    Args:
        rates: x = k A of all directions.
        energies: e, the mean squared gradients of the held-out examples along them, times k.
        wanted: their mean leverage, times N.

    Example:
        >>> rates = torch.full((4,), 100.0)
        >>> print(f"{curvature_scale(rates, rates, 2.0):.3f}")
        2.000
    """

    def above(logarithm: float) -> float:
        """By how much the leverage is too large, in logarithms."""
        found = 0.0
        for rate, energy in zip(rates.split(IN_CACHE), energies.split(IN_CACHE), strict=True):
            scaled = (rate * math.exp(logarithm)).clamp_(min=1e-12)
            found -= float(torch.expm1(-scaled).div_(scaled) @ energy)
        return math.log(max(found, TINY)) - math.log(max(wanted, TINY))

    return math.exp(_root(above, *SCALES))


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a falling function is 0; the end of the interval that is nearer where it is nowhere.

    By secants through both ends. Where an end stays twice its value is halved (the Illinois rule),
    so that the other one does not creep.
    """
    at_low, at_high = function(low), function(high)
    if at_low <= 0 or at_high >= 0:
        return low if at_low <= 0 else high
    middle, side = low, 0
    for _ in range(TRIES):
        middle = (low * at_high - high * at_low) / (at_high - at_low)
        found = function(middle)
        if abs(found) < CLOSE_ENOUGH:
            break
        if found > 0:
            low, at_low, at_high = middle, found, at_high / (2 if side > 0 else 1)
        else:
            high, at_high, at_low = middle, found, at_low / (2 if side < 0 else 1)
        side = 1 if found > 0 else -1
    return middle
