r"""An exponential moving average of the curvature while the model trains.

.. math:: C_t = \beta\, C_{t-1} + (1 - \beta)\, C(\theta_t), \qquad
    S_t = C_t / (1 - \beta^t) + \delta I

C is the diagonal of the Gauss-Newton matrix, or its Kronecker factors, each averaged by itself.
With :math:`\beta = 0` nothing is remembered and S is the Laplace posterior of the moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from engram.core.arguments import is_number, shown
from engram.core.parameters import trainable
from engram.core.storage.values import objects, typed, wrong
from engram.curvature.kfac import KroneckerFactors
from engram.curvature.kinds import Curvature
from engram.curvature.moments import SquareMoments
from engram.errors import ArgumentError, DataError, ModelMismatchError
from engram.linalg.gram import GramSum
from engram.posteriors.curved import check_curved
from engram.posteriors.gaussian import Posterior, check_prior_precision
from engram.posteriors.structures import Fit, kronecker_blocks, kronecker_sums
from engram.problem import Opener

AVERAGED = ("diagonal", "kronecker")
SQUARES, SUMS = ("rows", "columns"), ("column_sum", "counts")


class MovingAverageCurvature:
    """Diagonal or Kronecker-factored curvature with a moving average.

    Args:
        structure: ``diagonal`` or ``kronecker``.
        average: beta, from 0 (only the present) up to 1 (excluded).
        prior_precision: delta.
        curvature: as in :func:`engram.laplace`.

    Example:
        >>> import torch
        >>> from engram.likelihoods import Gaussian
        >>> model, x = nn.Linear(2, 1, bias=False), torch.ones(4, 2)
        >>> averaged = MovingAverageCurvature("diagonal", 0.5, prior_precision=1.0)
        >>> opener = Opener((x, torch.zeros(4, 1)), Gaussian())
        >>> posterior = averaged.update(model, opener)
        >>> posterior.blocks[0].precision.flatten()
        tensor([5., 5.])
    """

    def __init__(
        self, structure: str, average: float, prior_precision: float, curvature: str = "ggn"
    ) -> None:
        if structure not in AVERAGED:
            raise ArgumentError(
                f"structure {' or '.join(AVERAGED)} with a moving average",
                repr(structure),
                'use "kronecker", or leave out average',
            )
        if not (is_number(average) and 0 <= average < 1):
            raise ArgumentError("an average from 0 to below 1", shown(average), "use average=0.9")
        self.structure, self.average, self.curvature = structure, average, curvature
        self.prior_precision = check_prior_precision(prior_precision)
        self.updates = 0
        self.sums: dict[str, Tensor] = {}

    def update(self, model: nn.Module, opener: Opener) -> Posterior:
        """Add the present curvature to the average and return the posterior with it.

        Where the fit fails, nothing is counted.
        """
        with opener.session(model, progress=False) as opened:
            fit = Fit(opened, self.prior_precision, self.curvature, self.updates)
            averages = _Averages(self.average, self.updates + 1, self.sums)
            if self.structure == "diagonal":
                names = list(fit.parameters)
                moments = fit.square_moments(set(names))
                averages.replace_moments(moments)
                blocks: tuple[Any, ...] = fit.diagonal(moments, names)
            else:
                factors, moments = kronecker_sums(fit)
                averages.replace_moments(moments)
                averages.replace_factors(factors)
                pair = kronecker_blocks(fit, factors, moments)
                blocks = pair[0] + pair[1]
            settings = {
                "method": "moving average of curvatures",
                "average": self.average,
                "updates": averages.updates,
                "curvature": self.curvature,
                "likelihood": repr(opened.likelihood),
            }
            mean = {name: p.detach().clone() for name, p in trainable(model).items()}
            found = Posterior(
                self.structure,
                mean,
                blocks,
                self.prior_precision,
                opened.batches.num_data,
                settings,
                curvature=Curvature(self.curvature),
                likelihood=opened.likelihood,
            )
            if self.average == 0:  # what is remembered may be of another moment
                check_curved(opened, found)
        self._check_same(averages.sums)
        self.updates, self.sums = averages.updates, averages.sums
        return found

    def _check_same(self, sums: Mapping[str, Tensor]) -> None:
        """A sum that began later would be corrected as if it had been there from the start."""
        shapes = {name: value.shape for name, value in sums.items()}
        known = {name: value.shape for name, value in self.sums.items()}
        if known and shapes != known:
            changed = [n for n in shapes | known if shapes.get(n) != known.get(n)]
            raise ModelMismatchError(
                "the parameters that the moving average began with",
                f"others now ({', '.join(changed[:3])}): frozen, unfrozen or replaced",
                "make a new tracker or MovingAverageCurvature when other parameters are trained",
            )

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors."""
        return {"structure": self.structure, "updates": self.updates, "sums": dict(self.sums)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave."""
        where = "a saved moving average of curvatures"
        kinds = {"structure": str, "updates": int, "sums": Mapping[str, Tensor]}
        values = objects(state, where, tuple(kinds))
        found = {name: typed(kind, values[name], where) for name, kind in kinds.items()}
        if found["structure"] != self.structure:
            raise DataError(
                f"a moving average of curvatures of structure {self.structure!r}",
                repr(found["structure"]),
                "resume with the settings that the run was started with",
            )
        if found["updates"] < 0 or (found["updates"] > 0) != bool(found["sums"]):
            raise wrong(where, "as many updates as there are sums of", found["updates"])
        self.updates, self.sums = found["updates"], dict(found["sums"])


class _Averages:
    """Sums C_t on top of those before, which stay as they are."""

    def __init__(self, average: float, updates: int, before: Mapping[str, Tensor]) -> None:
        self.average, self.updates, self.before = average, updates, before
        self.sums: dict[str, Tensor] = {}

    def replace_moments(self, moments: SquareMoments) -> None:
        for name, value in moments.by_name.items():
            moments.by_name[name] = self._averaged(f"moments/{name}", value)

    def replace_factors(self, factors: KroneckerFactors) -> None:
        for name, layer in factors.layers.items():
            for side in SQUARES:
                matrix = getattr(layer, side).matrix
                if matrix is not None:
                    setattr(layer, side, GramSum(self._averaged(f"{side}/{name}", matrix)))
            for side in SUMS:
                value = getattr(layer, side)
                if value is not None:
                    setattr(layer, side, self._averaged(f"{side}/{name}", value))

    def _averaged(self, key: str, value: Tensor) -> Tensor:
        """C_t / (1 - beta^t), with C_t kept."""
        fresh = (1 - self.average) * value
        self.sums[key] = self.average * self.before[key] + fresh if key in self.before else fresh
        return self.sums[key] / (1 - self.average**self.updates)
