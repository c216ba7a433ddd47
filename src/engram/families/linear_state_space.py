r"""A hidden state that moves linearly and is observed at some of the times.

.. math:: z_0 \sim N(m_0, P_0), \quad z_{t+1} \sim N(F z_t, Q), \quad y_i \sim N(H z_{t_i}, R)

The posterior of all states is one Gaussian whose precision couples neighbours only. With
:math:`T = (z_t, z_t z_t', z_t z_{t+1}')` an observation touches the entries of its own time,

.. math:: \tilde\lambda_i = (H'R^{-1}y_i,\ -\tfrac12 H'R^{-1}H) \text{ at } t_i

so an observation is removed from a Kalman smoother by subtracting it.

Of the chain every second block is eliminated at once, which leaves a chain of half the length, and
so on: the blocks of the inverse that a smoother needs come from log2(T) batched steps instead of T
single ones. Derivatives pass through.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from engram.core import equation
from engram.core.equation import WeightedSum
from engram.core.parameters import Named
from engram.errors import ArgumentError, DataError
from engram.families.base import Family, Observations, check_cavities, improper
from engram.families.densities import multivariate_normal_log_density
from engram.families.reading import (
    check_lengths,
    check_support,
    read_array,
    read_covariance,
    read_numbers,
    read_vector,
    read_vectors,
)


@dataclass(frozen=True, eq=False)
class LinearStateSpace(Family):
    """A linear-Gaussian state-space model, as of the Kalman smoother.

    Data are a tuple (times, observations [N, K]), or observations of the times 0 to N - 1. Times
    without an observation are missing ones; several observations of one time are allowed.

    Args:
        num_times: T, the length of the chain.
        transition: F [D, D].
        transition_noise: Q [D, D], positive definite, or a number.
        emission: H [K, D].
        emission_noise: R [K, K], positive definite, or a number.
        initial_mean: m_0 [D].
        initial_covariance: P_0 [D, D], or a number.

    Example:
        >>> walk = LinearStateSpace(3, [[1.0]], 1.0, [[1.0]], 1.0, [0.0], 1.0)
        >>> walk.fit(([0, 2], [1.0, 3.0])).moments()["mean"][:, 0]
        tensor([0.8571, 1.5714, 2.2857], dtype=torch.float64)
    """

    num_times: int
    transition: Sequence[Sequence[float]] | Tensor
    transition_noise: float | Tensor
    emission: Sequence[Sequence[float]] | Tensor
    emission_noise: float | Tensor
    initial_mean: Sequence[float] | Tensor
    initial_covariance: float | Tensor = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.num_times, Integral) or self.num_times < 1:
            raise ArgumentError("at least one time", repr(self.num_times), "give their number")
        object.__setattr__(self, "num_times", int(self.num_times))
        mean = read_vector(self.initial_mean, "initial_mean")
        size = len(mean)
        transition = read_array(self.transition, "transition")
        emission = read_array(self.emission, "emission")
        if transition.shape != (size, size) or emission.dim() != 2 or emission.shape[1] != size:
            raise ArgumentError(
                f"transition of shape ({size}, {size}) and emission of shape (K, {size})",
                f"{tuple(transition.shape)} and {tuple(emission.shape)}",
                "make them as wide as initial_mean is long",
            )
        noise = read_covariance(self.transition_noise, "transition_noise", size)
        error = read_covariance(self.emission_noise, "emission_noise", len(emission))
        initial = read_covariance(self.initial_covariance, "initial_covariance", size)
        for name, value in {
            "transition": transition,
            "transition_noise": noise,
            "emission": emission,
            "emission_noise": error,
            "initial_mean": mean,
            "initial_covariance": initial,
        }.items():
            object.__setattr__(self, name, value)

    def read(self, data: Any) -> Observations:
        given = data if isinstance(data, tuple) else (None, data)
        if len(given) != 2:
            raise DataError("a pair (times, observations)", f"{len(given)} arrays", "pass two")
        rows = read_vectors(given[1], "observations", len(self.emission))
        order = torch.arange(len(rows)) if given[0] is None else given[0]
        times = read_numbers(order, "times")
        check_lengths(times, rows, "times and observations")
        inside = (times >= 0) & (times < self.num_times) & (times == times.round())
        expected = f"times from 0 to {self.num_times - 1}"
        check_support(inside, times, expected, "count times from 0, or raise num_times")
        return times.long(), rows

    def prior(self) -> Named:
        F, Q, _, _, mean, P = self._matrices()
        precision, start = torch.linalg.inv(Q), torch.linalg.inv(P)
        pull = F.mT @ precision
        diagonal = precision.repeat(self.num_times, 1, 1)
        diagonal[0] = start
        diagonal[:-1] += pull @ F
        linear = torch.zeros(self.num_times, len(mean), dtype=torch.float64)
        linear[0] = start @ mean
        return {
            "linear": linear,
            "quadratic": -0.5 * diagonal,
            "cross": pull.repeat(self.num_times - 1, 1, 1),
        }

    def likelihoods(self, observations: Observations) -> dict[str, WeightedSum]:
        times, rows = observations
        _, _, H, R, _, _ = self._matrices()
        gain = torch.linalg.solve(R, H)
        curvature = (-0.5 * H.mT @ gain).expand(len(rows), -1, -1)
        return {
            "linear": equation.placed(rows @ gain, times, self.num_times),
            "quadratic": equation.placed(curvature, times, self.num_times),
        }

    def check(self, natural: Mapping[str, Tensor]) -> None:
        self._smooth(natural)

    def standard(self, natural: Mapping[str, Tensor]) -> Named:
        solution = self._smooth(natural)
        return {
            "mean": solution.mean,
            "covariance": solution.covariance,
            "cross_covariance": solution.cross,
        }

    def log_partition(self, natural: Mapping[str, Tensor]) -> Tensor:
        solution = self._smooth(natural)
        size = solution.mean.numel()
        fit = (natural["linear"] * solution.mean).sum() - solution.log_determinant
        return 0.5 * (fit + size * math.log(2 * math.pi))

    def moments(self, natural: Mapping[str, Tensor]) -> Named:
        """Smoothed mean and covariance of the state at every time."""
        solution = self._smooth(natural)
        return {"mean": solution.mean, "variance": solution.covariance}

    def loo_log_predictive(
        self, natural: Mapping[str, Tensor], observations: Observations, weights: Tensor
    ) -> Tensor:
        """Cook's deviation at the observation's own time; one smoothing serves all of them."""
        times, rows = observations
        solution = self._smooth(natural)
        _, _, H, R, _, _ = self._matrices()
        variance = (H @ solution.covariance @ H.mT)[times]
        error = (solution.mean @ H.mT)[times] - rows
        share = weights[:, None, None]
        root = torch.linalg.cholesky(R)
        scaled = torch.linalg.solve_triangular(root, variance, upper=False)
        scaled = torch.linalg.solve_triangular(root, scaled.mT, upper=False)
        identity = torch.eye(len(R), dtype=torch.float64)
        check_cavities(torch.linalg.cholesky_ex(identity - share * scaled).info == 0)
        left = identity - share * torch.linalg.solve(R, variance).mT
        variance_left = torch.linalg.solve(left, variance)
        moved = (variance_left @ torch.linalg.solve(R, error.mT).mT[..., None])[..., 0]
        error_left = error + weights[:, None] * moved
        covariance = 0.5 * (variance_left + variance_left.mT) + R
        return multivariate_normal_log_density(error_left, covariance)

    def _matrices(self) -> tuple[Tensor, ...]:
        """F, Q, H, R, m_0, P_0."""
        matrices = (
            self.transition,
            self.transition_noise,
            self.emission,
            self.emission_noise,
            self.initial_mean,
            self.initial_covariance,
        )
        return tuple(torch.as_tensor(matrix) for matrix in matrices)

    def _smooth(self, natural: Mapping[str, Tensor]) -> ChainSolution:
        return solve_chain(-2 * natural["quadratic"], -natural["cross"], natural["linear"])


@dataclass(frozen=True, eq=False)
class ChainSolution:
    """What the chain's precision S and its linear term b give.

    Attributes:
        mean: S^-1 b, [T, D].
        covariance: diagonal blocks of S^-1, [T, D, D].
        cross: blocks (t, t + 1) of S^-1, [T - 1, D, D].
        log_determinant: log |S|.
    """

    mean: Tensor
    covariance: Tensor
    cross: Tensor
    log_determinant: Tensor


def solve_chain(diagonal: Tensor, upper: Tensor, linear: Tensor) -> ChainSolution:
    """Solve with S by odd-even elimination; PosteriorError unless S is positive definite.

    Args:
        diagonal: blocks (t, t) of S, [T, D, D].
        upper: blocks (t, t + 1) of S, [T - 1, D, D].
        linear: b, [T, D].
    """
    if len(diagonal) == 0:
        return ChainSolution(linear, diagonal, upper, linear.sum())
    factor, info = torch.linalg.cholesky_ex(diagonal[0::2])
    if (info != 0).any():
        raise improper("a positive definite precision of the states", "one that is not")
    own = torch.cholesky_inverse(factor)
    own_mean = _times(own, linear[0::2])
    determinant = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum()
    # of an even block: to its right neighbour, and to its left one; absent ones are missing rows
    right = own[: len(upper[0::2])] @ upper[0::2]
    left = own[1:] @ upper[1::2].mT
    kept = len(diagonal[1::2])
    reduced = diagonal[1::2] - upper[0::2].mT @ right
    reduced = reduced - _pad(upper[1::2] @ left, kept)
    term = linear[1::2] - _times(upper[0::2].mT, own_mean[:kept])
    term = term - _pad(_times(upper[1::2], own_mean[1:]), kept)
    couplings = -upper[1::2][: max(kept - 1, 0)] @ right[1:]
    inner = solve_chain(reduced, couplings, term)
    return _expand(inner, own, own_mean, left, right, determinant)


def _expand(
    inner: ChainSolution,
    own: Tensor,
    own_mean: Tensor,
    left: Tensor,
    right: Tensor,
    determinant: Tensor,
) -> ChainSolution:
    """From the odd blocks back to all: an even block depends on its two neighbours."""
    total, size = len(own), own.shape[-1]
    gain_right, gain_left = _pad(right, total), _pad_front(left, total)
    mean_right, mean_left = _pad(inner.mean, total), _pad_front(inner.mean, total)[:total]
    around_right, around_left = _pad(inner.covariance, total), _pad_front(inner.covariance, total)
    between = _pad_front(_pad(inner.cross, total - 1), total)  # (left, right) of each even block
    to_right = -gain_left @ between - gain_right @ around_right
    to_left = -gain_left @ around_left - gain_right @ between.mT
    even_mean = own_mean - _times(gain_left, mean_left) - _times(gain_right, mean_right)
    even = own - to_left @ gain_left.mT - to_right @ gain_right.mT
    cross = _interleave(to_right[: len(right)], to_left[1:].mT)
    return ChainSolution(
        _interleave(even_mean, inner.mean),
        _interleave(0.5 * (even + even.mT), inner.covariance),
        cross.reshape(-1, size, size),
        determinant + inner.log_determinant,
    )


def _times(matrices: Tensor, vectors: Tensor) -> Tensor:
    return (matrices @ vectors[..., None])[..., 0]


def _pad(blocks: Tensor, length: int) -> Tensor:
    return torch.cat([blocks, blocks.new_zeros(max(length - len(blocks), 0), *blocks.shape[1:])])[
        :length
    ]


def _pad_front(blocks: Tensor, length: int) -> Tensor:
    return torch.cat([blocks.new_zeros(1, *blocks.shape[1:]), blocks])[:length]


def _interleave(first: Tensor, second: Tensor) -> Tensor:
    """first[0], second[0], first[1], ...; first has as many rows as second, or one more."""
    paired = torch.stack([first[: len(second)], second], 1).flatten(0, 1)
    return torch.cat([paired, first[len(second) :]])
