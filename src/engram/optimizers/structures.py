"""How an optimizer keeps its precision: one matrix, or one number for each parameter entry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engram.core.dtypes import wide
from engram.core.errors import ArgumentError, ModelMismatchError, PosteriorError
from engram.core.memory import available_bytes
from engram.optimizers.curvatures import DiagonalCurvature, Draw, MatrixCurvature, Measured

SHARED = "shared"  # the key of what belongs to no single parameter
COPIES_OF_MATRIX = 7  # old and new, their Cholesky factors, curvature, and temporaries
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
    def averaged(self, precision: Tensor, curvature: Tensor, rate: Tensor) -> Tensor:
        """(1 - rho_S) S + rho_S H, with rho_S for every entry, [P]."""

    @abstractmethod
    def factorised(self, precision: Tensor) -> Tensor:
        """A root of the precision; PosteriorError unless it is positive definite and finite."""

    @abstractmethod
    def solve(self, root: Tensor, vector: Tensor) -> Tensor:
        """S^-1 v."""

    @abstractmethod
    def sample(self, root: Tensor, noise: Tensor) -> Tensor:
        """theta - m ~ N(0, S^-1) from white noise."""


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
        needed, free = COPIES_OF_MATRIX * 8 * size**2, available_bytes(parameters[0].device)
        if needed > free:
            largest = int((free / (COPIES_OF_MATRIX * 8)) ** 0.5)
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

    def averaged(self, precision: Tensor, curvature: Tensor, rate: Tensor) -> Tensor:
        if (rate != rate[0]).any():
            raise ArgumentError(
                "one precision_lr, since the groups share one matrix",
                f"values from {float(rate.min()):g} to {float(rate.max()):g}",
                "give all groups the same precision_lr, or use a diagonal optimizer",
            )
        share = wide(rate[0])
        return (1 - share) * precision + share * curvature

    def factorised(self, precision: Tensor) -> Tensor:
        root, failed = torch.linalg.cholesky_ex(precision)
        if int(failed) or not torch.isfinite(root).all():
            lowest = "not finite"
            if torch.isfinite(precision).all():
                lowest = f"{float(torch.linalg.eigvalsh(precision)[0]):.3g}"
            raise PosteriorError(
                "a positive-definite precision",
                f"a matrix whose smallest eigenvalue is {lowest}",
                REMEDY,
            )
        return root

    def solve(self, root: Tensor, vector: Tensor) -> Tensor:
        return torch.cholesky_solve(wide(vector)[:, None], root)[:, 0]

    def sample(self, root: Tensor, noise: Tensor) -> Tensor:
        # with S = C C', C^-T turns white noise into draws with covariance S^-1
        return torch.linalg.solve_triangular(root.mT, wide(noise)[:, None], upper=True)[:, 0]


class Diagonal(Structure):
    """The diagonal s of S, in the state of each parameter, in its shape and type."""

    def check_curvature(self, curvature: object) -> None:
        if not isinstance(curvature, DiagonalCurvature):
            raise ArgumentError(
                "a curvature with a diagonal",
                repr(curvature),
                "use Hutchinson(), GaussNewton() or, with DiagonalVON, Reparameterised()",
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

    def averaged(self, precision: Tensor, curvature: Tensor, rate: Tensor) -> Tensor:
        return (1 - rate) * precision + rate * curvature

    def factorised(self, precision: Tensor) -> Tensor:
        lowest = float(precision.min())
        if not lowest > 0 or not torch.isfinite(precision).all():
            raise PosteriorError(
                "a positive, finite precision", f"entries from {lowest:.3g}", REMEDY
            )
        return precision.sqrt()

    def solve(self, root: Tensor, vector: Tensor) -> Tensor:
        return vector / (root * root)

    def sample(self, root: Tensor, noise: Tensor) -> Tensor:
        return noise / root
