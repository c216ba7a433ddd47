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
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from engram.engine.session import Observed
from engram.engine.sites import per_example_gradients

GRAM_EXAMPLES = 400  # whose gradients are multiplied with each other
GRAM_BYTES = 2**29  # that these gradients may take
GRAM_PRODUCTS = 4e10  # multiplications at a checkpoint, two seconds or so; fewer examples beyond
FEWEST_HELD = 32  # fewer say nothing about a mean
HELD_OUT = 4  # one of so many examples is held out
SMALL = 1e-10  # of the largest eigenvalue: below is rounding
SLOWEST_BEND = 0.999  # of a learning curve in logarithms: 1 is a power law
# Logarithms between which the curvature's factor is looked for. Factors that leave out what is
# between layers are never too stiff; where some hundred examples say so, as in a net that has
# memorised thousands, they are too few to know their curvature
SCALES = (0.0, 12.0)
HALVINGS = 40  # of that interval

Gradients = tuple[Observed, list[list[Tensor | None]]]


def examples_held(num_params: int) -> int:
    """How many examples' gradients, in single precision, fit into memory and time for them."""
    entries = max(1, num_params)
    return min(GRAM_BYTES // (4 * entries), int(math.sqrt(GRAM_PRODUCTS / entries)), GRAM_EXAMPLES)


def gram_of(observed: Iterable[Gradients], times: Mapping[str, Tensor]) -> Tensor:
    """Products of the gradients of M examples with R roots each, [M, R, M, R].

    Args:
        observed: batches of them.
        times: training time of every entry, by name of the parameter.
    """
    found: dict[str, list[Tensor]] = {name: [] for name in times}
    count = roots = 0
    for batch, gradients in observed:
        number, roots = len(batch.outputs), len(gradients)
        for name, rows in _rows(batch, gradients, times).items():
            found[name].append(rows)
        count += number
    total = torch.zeros(count * roots, count * roots, dtype=torch.float64)
    for parts in found.values():
        flat = torch.cat(parts).flatten(0, 1)
        total += (flat @ flat.mT).double().cpu()
    return total.reshape(count, roots, count, roots)


def _rows(
    batch: Observed, gradients: Sequence[Sequence[Tensor | None]], times: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Gradients of a batch, [B, R, entries] by name; zeros where none arrives."""
    number, found = len(batch.outputs), dict[str, list[Tensor]]()
    for one in gradients:
        chunks = list(per_example_gradients(batch.trace.sites, one, set(times)))
        for name, time in times.items():
            rows = [chunk[name].flatten(1) for chunk in chunks if name in chunk]
            zeros = batch.outputs.new_zeros(number, time.numel())
            whole = torch.cat(rows) * time.flatten().sqrt().to(zeros) if rows else zeros
            found.setdefault(name, []).append(whole.detach())
    return {name: torch.stack(rows, 1) for name, rows in found.items()}


def held_out_leverage(gram: Tensor, out: int, num_data: int, seed: int = 0) -> float:
    """v_N: N times the mean leverage of examples that the curvature of N others has not seen.

    Args:
        gram: products of gradients, [M, R, M, R].
        out: the last so many examples are held out.
        num_data: N.
        seed: of the choice among the others of the smaller parts.

    Example:
        >>> alike = torch.ones(64, 1, 64, 1).double()  # one direction, which all others know
        >>> print(f"{held_out_leverage(alike, 16, 64):.3f}")
        0.632
    """
    count, roots = gram.shape[:2]
    most = count - out
    order = torch.randperm(most, generator=torch.Generator().manual_seed(seed))
    held, energy = (
        gram[most:],
        float(gram.flatten(2).flatten(0, 1).diagonal()[-out * roots :].sum()),
    )
    found = []
    for size in (most // 4, most // 2, most):
        part = order[:size]
        inner = gram[part][:, :, part].reshape(size * roots, size * roots) / size
        values, vectors = torch.linalg.eigh(inner)
        values = values.clamp(min=SMALL * float(values[-1].clamp(min=1e-300)))
        cross = held[:, :, part].reshape(out * roots, size * roots) @ vectors
        lost = 1 + torch.expm1(-values) / values  # 1 - (1 - e^-x) / x
        seen = (cross.square() / (size * values)) @ lost
        found.append((energy - float(seen.sum())) / out)
    return followed(found, math.log2(num_data / most))


def followed(found: Sequence[float], doublings: float) -> float:
    """A learning curve, known at three sizes with a factor 2 between them, so many doublings on.

    Its slope in logarithms goes on changing by the same factor at each doubling, and never grows.

    Example:
        >>> print(f"{followed([8.0, 4.0, 2.0], 1.0):.2f} {followed([4.0, 2.0, 2.0], 3.0):.2f}")
        1.00 2.00
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
    low, high = SCALES
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        scaled = (math.exp(middle) * rates).clamp(min=1e-12)
        above = float((energies * -torch.expm1(-scaled) / scaled).sum()) > wanted
        low, high = (middle, high) if above else (low, middle)
    return math.exp((low + high) / 2)
