"""How an optimizer keeps its precision: one matrix, or one number for each parameter entry.

The precision S itself stands in the optimizer's state, as a tensor, so that torch can save it. To
solve with it or to sample from it, it is factorised into a block of :mod:`engram.linalg` over the
flat vector theta of all parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engram.core.dtypes import wide
from engram.core.memory import available_bytes
from engram.core.parameters import Layout
from engram.errors import ArgumentError, ModelMismatchError, PosteriorError
from engram.linalg.block import Block
from engram.linalg.dense import DenseBlock
from engram.linalg.diagonal import DiagonalBlock
from engram.optimizers.curvatures import DiagonalCurvature, Draw, MatrixCurvature, Measured

SHARED = "shared"  # key in the state of what belongs to no single parameter
FLAT = "theta"  # name of the flat vector in a block
COPIES_OF_MATRIX = 7  # held at once: old and new, their Cholesky factors, curvature, temporaries
BYTES = 8  # of a number, in the double precision that matrices are held in
REMEDY = (
    "use curvature=GaussNewton(likelihood), which is never indefinite; or lower precision_lr, "
    "raise prior_precision, or start nearer to a minimum; nothing was changed by this step"
)
State = Mapping[Any, Any]
Parameters = Sequence[Tensor]


class Structure(ABC):
    """Pure functions of a precision, and where it stands in the optimizer's state."""

    @abstractmethod
    def check_curvature(self, curvature: object) -> None:
        """ArgumentError for a curvature that this structure cannot use."""

    @abstractmethod
    def check_size(self, parameters: Parameters) -> None:
        """PosteriorError for more parameters than fit in memory."""

    @abstractmethod
    def check_state(self, state: State) -> None:
        """ArgumentError for a saved state of another structure."""

    @abstractmethod
    def read(self, state: State, parameters: Parameters, initial: Tensor) -> Tensor:
        """The precision in the state; at the first step the initial diagonal."""

    @abstractmethod
    def write(self, state: Any, parameters: Parameters, precision: Tensor) -> None:
        """Keep a precision in the state."""

    @abstractmethod
    def measure(
        self, curvature: Any, returned: Any, parameters: Parameters, draw: Draw
    ) -> Measured:
        """Loss, gradient and curvature in this structure."""

    @abstractmethod
    def with_prior(self, curvature: Tensor, prior: Tensor) -> Tensor:
        """Curvature plus the prior's diagonal [P]."""

    @abstractmethod
    def rate(self, rates: Tensor) -> Tensor:
        """rho_S as it multiplies a precision, from that of every entry, [P]."""

    @abstractmethod
    def _block(self, precision: Tensor) -> Block:
        """The precision, factorised; PosteriorError where it is not positive definite."""

    def block(self, precision: Tensor) -> Block:
        """The precision as a block over the flat vector, with what to do where it is none."""
        try:
            return self._block(precision)
        except PosteriorError as error:
            raise PosteriorError(error.expected, error.got, REMEDY) from error


def _other_structure(expected: str, got: str) -> ArgumentError:
    return ArgumentError(
        f"a saved state with {expected}", got, "load what state_dict() of the same class gave"
    )


class FullMatrix(Structure):
    """S [P, P] in the widest precision, in the state under ``shared``."""

    def check_curvature(self, curvature: object) -> None:
        if not isinstance(curvature, MatrixCurvature):
            raise ArgumentError(
                "a curvature with a full matrix", repr(curvature), "use Hessian() or GaussNewton()"
            )

    def check_size(self, parameters: Parameters) -> None:
        size = sum(p.numel() for p in parameters)
        needed, free = COPIES_OF_MATRIX * BYTES * size**2, available_bytes(parameters[0].device)
        if needed > free:
            largest = int((free / (COPIES_OF_MATRIX * BYTES)) ** 0.5)
            raise PosteriorError(
                f"at most {largest:,} parameters, whose matrices fit in the free "
                f"{free / 2**30:.1f} GiB",
                f"{size:,} parameters, which need {needed / 2**30:.1f} GiB",
                "use DiagonalOnlineNewton or DiagonalVON, or freeze some of the parameters",
            )

    def check_state(self, state: State) -> None:
        if any("precision" in part for key, part in state.items() if key != SHARED):
            raise _other_structure("a full matrix", "another class's diagonal")

    def read(self, state: State, parameters: Parameters, initial: Tensor) -> Tensor:
        found = state[SHARED].get("precision")
        if found is None:
            return torch.diag_embed(wide(initial))
        if len(found) != len(initial):
            raise ModelMismatchError(
                f"the {len(found):,} trained parameter entries of the steps before",
                f"{len(initial):,}",
                "make a new optimizer after freezing, unfreezing or adding parameters",
            )
        return found.to(initial.device)

    def write(self, state: Any, parameters: Parameters, precision: Tensor) -> None:
        state[SHARED]["precision"] = precision

    def measure(
        self, curvature: Any, returned: Any, parameters: Parameters, draw: Draw
    ) -> Measured:
        return curvature.matrix(returned, parameters, draw)

    def with_prior(self, curvature: Tensor, prior: Tensor) -> Tensor:
        return wide(curvature) + torch.diag_embed(wide(prior))

    def rate(self, rates: Tensor) -> Tensor:
        if (rates != rates[0]).any():
            raise ArgumentError(
                "one precision_lr, since the groups share one matrix",
                f"values from {float(rates.min()):g} to {float(rates.max()):g}",
                "give all groups the same precision_lr, or use a diagonal optimizer",
            )
        return wide(rates[0])

    def _block(self, precision: Tensor) -> Block:
        return DenseBlock.factorise(Layout((FLAT,), (precision.shape[:1],)), precision)


class Diagonal(Structure):
    """The diagonal s of S, in the state of each parameter, in its shape and type."""

    def check_curvature(self, curvature: object) -> None:
        if not isinstance(curvature, DiagonalCurvature):
            raise ArgumentError(
                "a curvature with a diagonal",
                repr(curvature),
                "use Hutchinson(), Hessian(), GaussNewton() or, with DiagonalVON, "
                "Reparameterised() or ScoreFunction()",
            )

    def check_size(self, parameters: Parameters) -> None:
        """Any number of parameters."""

    def check_state(self, state: State) -> None:
        if "precision" in state[SHARED]:
            raise _other_structure("a diagonal for every parameter", "another class's full matrix")

    def read(self, state: State, parameters: Parameters, initial: Tensor) -> Tensor:
        parts = initial.split([p.numel() for p in parameters])
        found = [
            state[p]["precision"].flatten() if "precision" in state.get(p, {}) else part
            for p, part in zip(parameters, parts, strict=True)
        ]
        return torch.cat(found)

    def write(self, state: Any, parameters: Parameters, precision: Tensor) -> None:
        parts = precision.split([p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            state[parameter]["precision"] = part.reshape(parameter.shape).clone()

    def measure(
        self, curvature: Any, returned: Any, parameters: Parameters, draw: Draw
    ) -> Measured:
        return curvature.diagonal(returned, parameters, draw)

    def with_prior(self, curvature: Tensor, prior: Tensor) -> Tensor:
        return curvature + prior

    def rate(self, rates: Tensor) -> Tensor:
        return rates

    def _block(self, precision: Tensor) -> Block:
        return DiagonalBlock.of(FLAT, precision)
