r"""Which of some models will do better on unseen data, from their leave-one-out losses.

All are results on the same examples, so their losses are compared example by example:

.. math:: d_i = \ell^{a}_{\setminus i} - \ell^{b}_{\setminus i}, \qquad
    \bar d = \tfrac1N \sum_i d_i, \qquad \mathrm{se}^2 = \tfrac1{N (N-1)} \sum_i (d_i - \bar d)^2

and the chance that a is worse is :math:`\Phi(\bar d / \mathrm{se})`. What makes an example hard for
both falls out of the difference, and with it most of the noise.

Reference: Sivula, Magnusson, Matamoros and Vehtari, "Uncertainty in Bayesian leave-one-out
cross-validation based model comparison", 2020: when the chance is not to be taken at its word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engram.core.printable import printable
from engram.errors import ArgumentError, ModelMismatchError, NonFiniteError
from engram.sensitivity.result import NOTE, Result, check_result
from engram.trust.verdict import LEVELS, UNRELIABLE

if TYPE_CHECKING:
    import pandas as pd

# Of the reference: below either of them the normal distribution is too narrow for the difference
FEW_EXAMPLES = 100
SMALL_DIFFERENCE = 4.0  # nats, summed over the examples


@dataclass(frozen=True)
class Difference:
    """Of the mean leave-one-out losses of two models on the same examples.

    Attributes:
        mean: of the first minus the second, per example; positive where the first is worse.
        standard_error: of that, by the differences of the examples.
        chance_worse: that the first has the larger loss on unseen data, by a normal distribution.
    """

    mean: float
    standard_error: float
    chance_worse: float


@dataclass(frozen=True, eq=False)
class Comparison:
    """Some results on the same examples, beside each other; the lowest leave-one-out loss first.

    Attributes:
        results: by name, in the order of their leave-one-out loss.
    """

    results: Mapping[str, Result]

    @property
    def best(self) -> str:
        """The name of the one with the lowest leave-one-out loss."""
        return next(iter(self.results))

    @property
    def unit(self) -> str:
        """Of the losses."""
        return self.results[self.best].basis.loss_unit

    def difference(self, first: str, second: str) -> Difference:
        """Of one result and another, by their names."""
        for name in (first, second):
            if name not in self.results:
                raise ArgumentError(
                    f"one of {', '.join(self.results)}", repr(name), "use a name that was compared"
                )
        one, other = self.results[first], self.results[second]
        return paired(one.loo_loss.double() - other.loo_loss.double(), one.counts)

    def to_frame(self) -> pd.DataFrame:
        """One row per result: losses, the difference from the best, and leave-one-out metrics.

        ``difference`` is of the mean leave-one-out loss, minus that of the best;
        ``standard_error`` is the difference's, and ``chance_worse`` that the result is really
        worse. Then ``training_loss``, the metrics of :meth:`Result.metrics` and the ``verdict``.
        """
        import pandas as pd

        rows = []
        for name, result in self.results.items():
            found = self.difference(name, self.best)
            rows.append(
                {
                    "loo_loss": result.loo_nll,
                    "difference": found.mean,
                    "standard_error": found.standard_error,
                    "chance_worse": found.chance_worse,
                    "training_loss": result.train_nll,
                    **result.metrics()["leave_one_out"].drop("loss").to_dict(),
                    "verdict": result.verdict.level,
                }
            )
        return pd.DataFrame(rows, index=pd.Index(list(self.results), name="model"))

    @property
    def notes(self) -> tuple[str, ...]:
        """Why not to take the chances at their word; empty where nothing speaks against them."""
        found = []
        best = self.results[self.best]
        if best.num_examples < FEW_EXAMPLES:
            found.append(
                f"with fewer than {FEW_EXAMPLES} examples the standard errors are too small"
            )
        close = [
            name
            for name in list(self.results)[1:]
            if self.difference(name, self.best).mean * best.num_examples < SMALL_DIFFERENCE
        ]
        if close:
            found.append(
                f"{_listed(close)} and {self.best} differ by less than {SMALL_DIFFERENCE:g} "
                f"{self.unit} on all examples together: they predict alike, and the standard "
                "error says little"
            )
        doubtful = [n for n, r in self.results.items() if r.verdict.level == LEVELS[UNRELIABLE]]
        if doubtful:
            found.append(
                f"the verdict on {_listed(doubtful)} is unreliable: the losses are estimates, and "
                "the standard error knows nothing of their error; see engram.verify"
            )
        return tuple(found)

    def __repr__(self) -> str:
        width = max(len(printable(name)) for name in self.results)
        best = self.results[self.best]
        lines = [
            f"Leave-one-out losses of {len(self.results)} models on the same "
            f"{best.num_data:,} examples, {self.unit} per example"
        ]
        for name, result in self.results.items():
            line = f"  {printable(name):{width}}  {result.loo_nll:.4f}"
            if name != self.best:
                found = self.difference(name, self.best)
                line += (
                    f"  {found.mean:+.4f} ± {found.standard_error:.4f}, "
                    f"worse with {found.chance_worse:.1%} chance"
                )
            lines.append(line)
        for note in self.notes:
            lines += wrap(printable(note), 79, initial_indent=NOTE, subsequent_indent=" " * 22)
        return "\n".join(lines)


def compare(results: Mapping[str, Result]) -> Comparison:
    r"""Which model will do better on unseen data, without any.

    The difference of two mean leave-one-out losses has a standard error from the differences of
    the single examples, and with it a chance that one model is worse than the other.

    Args:
        results: of :func:`engram.sensitivities` by name, two or more, on the same data and with
            the same likelihood.

    Returns:
        The results in the order of their leave-one-out loss: ``best``, ``difference(a, b)``,
        ``to_frame()`` with accuracy, AUROC, Brier score and calibration or R2 and RMSE under
        leave-one-out.

    Example:
        >>> import engram
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(200, 3)
        >>> data = (x, (x[:, 0] + 0.3 * torch.randn(200) > 0).long())
        >>> def fitted(columns):
        ...     model = torch.nn.Linear(columns, 2)
        ...     optimizer = torch.optim.LBFGS(model.parameters(), max_iter=50)
        ...     def closure():
        ...         optimizer.zero_grad()
        ...         loss = torch.nn.functional.cross_entropy(model(x[:, :columns]), data[1])
        ...         (loss + 0.005 * sum(p.square().sum() for p in model.parameters())).backward()
        ...         return loss
        ...     _ = optimizer.step(closure)
        ...     given = (x[:, :columns], data[1])
        ...     posterior = engram.laplace(model, given, prior_precision=2.0, structure="full")
        ...     return engram.sensitivities(model, given, posterior)
        >>> found = engram.compare({"one column": fitted(1), "three": fitted(3)})
        >>> abs(found.difference("one column", "three").mean) < 0.05
        True
    """
    if not isinstance(results, Mapping) or len(results) < 2:
        raise ArgumentError(
            "two results or more by name",
            f"{len(results)} of them" if isinstance(results, Mapping) else type(results).__name__,
            'use engram.compare({"small": result, "large": other})',
        )
    named = {str(name): result for name, result in results.items()}
    first_name, first = next(iter(named.items()))
    for name, result in named.items():
        check_result(result)
        _check_losses(name, result)
        _check_same(first_name, first, name, result)
    return Comparison(dict(sorted(named.items(), key=lambda pair: pair[1].loo_nll)))


def paired(differences: Tensor, counts: Tensor) -> Difference:
    """Their mean with its standard error, and the chance that the true one is above zero.

    Args:
        differences: of the losses of each row, [N].
        counts: how many examples each row stands for, [N].

    Example:
        >>> paired(torch.tensor([1.0, 0.0, 2.0, 1.0]), torch.ones(4))
        Difference(mean=1.0, standard_error=0.408..., chance_worse=0.992...)
    """
    counts = counts.double()
    some = counts > 0
    counts, differences = counts[some], differences[some].double()
    total = counts.sum()
    mean = (counts * differences).sum() / total
    spread = (counts * (differences - mean).square()).sum() / (total - 1)
    error = (spread / total).sqrt()
    # equal losses throughout leave nothing to tell the two by
    chance = torch.special.ndtr(mean / error) if error > 0 else 0.5 + 0.5 * mean.sign()
    return Difference(float(mean), float(error), float(chance))


def _check_losses(name: str, result: Result) -> None:
    counted = result.loo_loss[result.counts > 0]
    lost = int((~torch.isfinite(counted)).sum())
    if lost or result.num_examples < 2:
        raise NonFiniteError(
            f"finite leave-one-out losses of two examples or more in {name!r}",
            f"{lost:,} of {len(counted):,} NaN or infinite",
            "use engram.refine on those examples, or another estimator",
        )


def _check_same(first: str, one: Result, name: str, other: Result) -> None:
    """Raise unless two results are about the same examples, targets and likelihood."""
    remedy = "compare results on the same data, in the same order"
    if one.num_data != other.num_data:
        raise ModelMismatchError(
            f"results on the same data: {first!r} has {one.num_data:,} examples",
            f"{name!r} with {other.num_data:,}",
            remedy,
        )
    columns: dict[str, tuple[Any, Any]] = {
        "indices": (one.indices, other.indices),
        "targets": (one.targets, other.targets),
        "counts": (one.counts, other.counts),
    }
    for column, (mine, theirs) in columns.items():
        if mine.shape != theirs.shape or not torch.equal(mine.double(), theirs.double()):
            raise ModelMismatchError(
                f"results on the same data: the {column} of {first!r}",
                f"other {column} in {name!r}",
                remedy,
            )
    mine, theirs = one.basis.likelihood, other.basis.likelihood
    if mine is not None and theirs is not None and mine.identity != theirs.identity:
        raise ModelMismatchError(
            f"the likelihood of {first!r}, {mine}",
            f"{theirs} in {name!r}",
            "losses of two likelihoods have no common scale: fit both posteriors with one",
        )


def _listed(names: list[str]) -> str:
    return ", ".join(names)
