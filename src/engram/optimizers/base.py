r"""The step that all of these optimizers share: the Bayesian learning rule for a Gaussian.

.. math::
    S_t = (1 - \rho_S) S_{t-1} + \rho_S\, E[\nabla^2 \bar\ell(\theta)], \qquad
    m_t = m_{t-1} - \rho\, S_t^{-1} E[\nabla \bar\ell(\theta)]

with :math:`\bar\ell = N \cdot \text{mean loss} + \tfrac{\delta}{2}\|\theta\|^2`. An algorithm is a
choice of the structure of S, of where its curvature comes from, and of the expectation: at the mean
(Newton, Online Newton) or over samples of q (VON).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from engram.core.errors import ArgumentError
from engram.core.parameters import Layout
from engram.optimizers.curvatures import Draw, Measured
from engram.optimizers.evaluation import Closure, called
from engram.optimizers.settings import resolved
from engram.optimizers.structures import SHARED, Structure


class BayesianOptimizer(Optimizer, ABC):
    """Abstract: a step of the Bayesian learning rule with a Gaussian of some structure.

    Args:
        params: parameters, or groups of them.
        defaults: settings of a group: num_data, prior_precision, lr, precision_lr,
            initial_precision.
        structure: of the precision.
        curvature: where the curvature comes from.
        seed: of all random numbers of the optimizer; the caller's random state is never used.
    """

    # the last precision with its root: the next step draws from it without factorising again
    _factorised: tuple[Tensor, Tensor] | None = None

    @abstractmethod
    def __init__(
        self, params: Any, defaults: dict[str, Any], structure: Structure, curvature: Any, seed: int
    ) -> None:
        structure.check_curvature(curvature)
        self.structure, self.curvature = structure, curvature
        super().__init__(params, defaults)
        generator = torch.Generator().manual_seed(seed)
        self._state()[SHARED] = {"step": 0, "generator": generator.get_state()}
        structure.check_size(self._trained())

    @property
    def num_samples(self) -> int:
        """Draws from q in a step; 0 takes the expectation at the mean."""
        return int(self.param_groups[0].get("samples", 0))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own, as in torch."""
        group = resolved(self.defaults | param_group)
        sizes = {known["num_data"] for known in (*self.param_groups, group)}
        if len(sizes) > 1:
            raise ArgumentError(
                "one num_data", f"{sorted(sizes)} in the groups", "give it outside the groups"
            )
        super().add_param_group(group)

    def step(self, closure: Closure | None = None) -> Tensor:  # type: ignore[override]
        """One step; if anything goes wrong, weights and state are as they were before.

        Args:
            closure: runs the model on the batch and returns the mean loss (``GaussNewton``:
                outputs and targets), without calling ``backward``.

        Returns:
            The mean loss of the batch, averaged over the points at which the closure was run.
        """
        parameters = self._trained()
        mean = torch.cat([p.detach().flatten() for p in parameters])
        prior = self._per_entry(parameters, "prior_precision")
        initial = self._per_entry(parameters, "initial_precision")
        precision = self.structure.read(self.state, parameters, initial)
        generator = torch.Generator()
        generator.set_state(self._state()[SHARED]["generator"])
        found = _average(self._points(closure, parameters, precision, generator))
        num_data = self.param_groups[0]["num_data"]
        curvature = self.structure.with_prior(num_data * found.curvature, prior)
        rate = self._per_entry(parameters, "precision_lr")
        updated = self.structure.averaged(precision, curvature, rate)
        root = self.structure.factorised(updated)
        step = self.structure.solve(root, num_data * found.gradient + prior * mean)
        step_size = self._per_entry(parameters, "lr")
        _move(parameters, mean - (step_size * step).to(mean.dtype))
        self.structure.write(self.state, parameters, updated)
        self._factorised = (updated, root)
        shared = self._state()[SHARED]
        shared.update(step=shared["step"] + 1, generator=generator.get_state())
        return found.loss

    def _points(
        self,
        closure: Closure | None,
        parameters: Sequence[Tensor],
        precision: Tensor,
        generator: torch.Generator,
    ) -> Iterator[Measured]:
        """Loss, gradient and curvature wherever the closure is run; the weights come back."""
        mean = torch.cat([p.detach().flatten() for p in parameters])

        def measured(offset: Tensor | None) -> Measured:
            draw = Draw(generator, offset, precision)
            return self.structure.measure(self.curvature, called(closure), parameters, draw)

        if not self.num_samples:
            yield measured(None)
            return
        root = self._root(precision)
        for _ in range(self.num_samples):
            noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype).to(mean.device)
            offset = self.structure.sample(root, noise)
            try:
                _move(parameters, mean + offset.to(mean.dtype))
                found = measured(offset)
            finally:
                _move(parameters, mean)
            yield found

    def _root(self, precision: Tensor) -> Tensor:
        if self._factorised is not None and self._factorised[0] is precision:
            return self._factorised[1]
        return self.structure.factorised(precision)

    def _trained(self) -> list[Tensor]:
        found = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        if not found:
            raise ArgumentError(
                "at least one parameter that requires gradients", "none", "unfreeze some"
            )
        return found

    def _per_entry(self, parameters: Sequence[Tensor], name: str) -> Tensor:
        """A setting of the groups for every entry, [P]."""
        chosen = {id(p): float(group[name]) for group in self.param_groups for p in group["params"]}
        return torch.cat([p.new_full((p.numel(),), chosen[id(p)]) for p in parameters]).detach()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch; with what belongs to no single parameter, such as the random state."""
        if SHARED not in state_dict["state"]:
            raise ArgumentError(
                f"a state of {type(self).__name__}",
                "one of another kind of optimizer",
                "load what state_dict() of the same class gave",
            )
        self.structure.check_state(state_dict["state"])
        super().load_state_dict(state_dict)
        self._factorised = None
        shared = self._state()[SHARED]
        self._state()[SHARED] = {
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in shared.items()
        }

    def _state(self) -> dict[Any, Any]:
        """The state with keys of any kind: torch keeps other keys than parameters as they are."""
        return self.state

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"structure": self.structure, "curvature": self.curvature}


def _move(parameters: Sequence[Tensor], flat: Tensor) -> None:
    layout = Layout.of({str(number): p for number, p in enumerate(parameters)})
    with torch.no_grad():
        for parameter, value in zip(parameters, layout.unflatten(flat).values(), strict=True):
            parameter.copy_(value)


def _average(points: Iterator[Measured]) -> Measured:
    total, count = next(points), 1
    for point in points:
        total, count = total + point, count + 1
    return total.over(count)
