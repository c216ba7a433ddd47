"""A trained net and its data, as every library gets them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from torch import Tensor, nn
from torch.nn import functional

import engram
from benchmarks.libraries import MODULES


@dataclass(frozen=True, eq=False)
class Case:
    """Outputs are [N, K] with classes [N], or [N, T, K] with tokens [N, T].

    Args:
        model: in eval mode.
        prior_precision: of the whole data; None where the weights are to say it.
        training: its record, where there is one.
    """

    model: nn.Module
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    prior_precision: float | None
    training: engram.Training | None = None
    batch_size: int = 64

    @property
    def likelihood(self) -> str | engram.likelihoods.Likelihood:
        """That of classes or of tokens, which stand at the positions of their outputs."""
        if self.train[1].dim() == 1:
            return "categorical"
        return engram.likelihoods.Tokens(shift=False)

    @property
    def damping(self) -> float:
        """What peers add to the mean curvature, delta / N."""
        delta = 1.0 if self.prior_precision is None else self.prior_precision
        return delta / len(self.train[1])


Way = Callable[[Case], Tensor]


def summed_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy, added up over examples and their tokens."""
    return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="sum")


def ways(module: str, kind: str) -> dict[str, Way]:
    """``PAIRS`` or ``OWN`` of a library; one that does not load has a way that says why."""
    try:
        found: dict[str, Way] = getattr(
            importlib.import_module(f"benchmarks.libraries.{module}"), kind, {}
        )
    except Exception as error:  # an import may fail in any way
        reason = error

        def failing(case: Case) -> Tensor:
            raise reason

        return {MODULES[module]: failing}
    return found


def installed() -> dict[str, str]:
    """Versions of the packages."""
    found = {}
    for package in (p for p in MODULES.values() if p not in ("engram", "torch")):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
