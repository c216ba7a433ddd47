r"""The step that all of these optimizers share: the Bayesian learning rule for a Gaussian.

.. math::
    S_t = (1 - \rho_S) S_{t-1} + \rho_S\, E[\nabla^2 \bar\ell(\theta)], \qquad
    m_t = m_{t-1} - \rho\, S_t^{-1} E[\nabla \bar\ell(\theta)]

with :math:`\bar\ell = N \cdot \text{mean loss} + \tfrac{\delta}{2}\|\theta\|^2`. An algorithm is a
choice of the structure of S (:mod:`~engram.optimizers.structures`), of where its curvature comes
from (:mod:`~engram.optimizers.curvatures`), and of the expectation: at the mean
(:mod:`~engram.optimizers.newton`) or over samples of q (:mod:`~engram.optimizers.von`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from engram.core.arguments import MANY, is_number, positive, whole
from engram.core.parameters import Layout
from engram.core.state.process import plain_attention
from engram.errors import ArgumentError
from engram.linalg.block import Block
from engram.optimizers.curvatures import CurvatureSource, Draw, Measured, loss_value
from engram.optimizers.structures import FLAT, SHARED, Structure

Closure = Callable[[], Any]


class BayesianOptimizer(Optimizer, ABC):
    """Abstract: a step of the Bayesian learning rule with a Gaussian of some structure.

    Args:
        params: parameters, or groups of them.
        defaults: settings of a group: num_data, prior_precision, lr, precision_lr,
            initial_precision, and samples where the expectation is over draws from q.
        curvature: where the curvature comes from; the class's own if not given.
        seed: of all random numbers of the optimizer; the caller's random state is never used.
    """

    structure: ClassVar[Structure]
    _default_curvature: ClassVar[CurvatureSource]
    # the last precision, factorised: the next step draws from it without factorising again
    _factorised: tuple[Tensor, Block] | None = None

    @abstractmethod
    def __init__(
        self, params: Any, defaults: dict[str, Any], curvature: CurvatureSource | None, seed: int
    ) -> None:
        self.curvature = self._default_curvature if curvature is None else curvature
        self.structure.check_curvature(self.curvature)
        super().__init__(params, defaults)
        generator = torch.Generator().manual_seed(seed)
        self._state()[SHARED] = {"step": 0, "generator": generator.get_state()}
        self.structure.check_size(self._trained())

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
        rate = self.structure.rate(self._per_entry(parameters, "precision_lr"))
        updated = updated_precision(precision, curvature, rate)
        block = self.structure.block(updated)
        gradient = (num_data * found.gradient + prior * mean).to(updated)  # as wide as S is
        _move(parameters, updated_mean(mean, block, gradient, self._per_entry(parameters, "lr")))
        self.structure.write(self.state, parameters, updated)
        self._factorised = (updated, block)
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

        baseline = None
        if self.num_samples and getattr(self.curvature, "needs_baseline", False):
            baseline = loss_value(called(closure))

        def measured(offset: Tensor | None) -> Measured:
            draw = Draw(generator, offset, precision, baseline)
            return self.structure.measure(self.curvature, called(closure), parameters, draw)

        if not self.num_samples:
            yield measured(None)
            return
        block = self._block(precision)
        for _ in range(self.num_samples):
            noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype).to(mean.device)
            offset = sampled_offset(block, noise.to(precision))
            try:
                _move(parameters, mean + offset.to(mean.dtype))
                found = measured(offset)
            finally:
                _move(parameters, mean)
            yield found

    def _block(self, precision: Tensor) -> Block:
        if self._factorised is not None and self._factorised[0] is precision:
            return self._factorised[1]
        return self.structure.block(precision)

    def _trained(self) -> list[Tensor]:
        found = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        if not found:
            raise ArgumentError(
                "at least one parameter that requires gradients",
                "none",
                "pass parameters with requires_grad=True",
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
        return super().__getstate__() | {"curvature": self.curvature}


def updated_precision(precision: Tensor, curvature: Tensor, rate: Tensor) -> Tensor:
    """S_t = (1 - rho_S) S_{t-1} + rho_S H, with H the curvature of the sum, its prior included."""
    return (1 - rate) * precision + rate * curvature


def updated_mean(mean: Tensor, block: Block, gradient: Tensor, rate: Tensor) -> Tensor:
    """m_t = m_{t-1} - rho S_t^-1 g, with g the gradient of the sum, its prior included, [P]."""
    step = block.solve({FLAT: gradient})[FLAT]
    return mean - (rate * step).to(mean.dtype)


def sampled_offset(block: Block, noise: Tensor) -> Tensor:
    """theta - m ~ N(0, S^-1) from white noise, [P]."""
    return block.root_solve({FLAT: noise})[FLAT]


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


def resolved(group: dict[str, Any]) -> dict[str, Any]:
    """The group with every setting checked, and the initial precision as a number."""
    positive("num_data", group["num_data"], "count the training examples")
    positive(
        "prior_precision",
        group["prior_precision"],
        "use num_data times the weight decay of the mean loss",
    )
    if group["initial_precision"] is None:
        group["initial_precision"] = group["num_data"] + group["prior_precision"]
    positive("initial_precision", group["initial_precision"], "use num_data, or leave it out")
    if not (is_number(group["lr"]) and 0 <= group["lr"] < math.inf):
        raise ArgumentError("lr of at least 0", repr(group["lr"]), "use 1 for a full Newton step")
    if not (is_number(group["precision_lr"]) and 0 <= group["precision_lr"] <= 1):
        raise ArgumentError("precision_lr from 0 to 1", repr(group["precision_lr"]), "use 0.1")
    whole("number of samples", group.get("samples", 1), 1, MANY, remedy="use samples=1 or more")
    return group


def called(closure: Closure | None) -> Any:
    """What the closure returns, computed with gradients."""
    if closure is None:
        raise ArgumentError(
            "a closure: curvature needs the loss itself, not only its gradient",
            "step() without one",
            "call optimizer.step(closure), where closure() returns the mean loss of the batch",
        )
    # fused attention has neither a second derivative nor a batched first one
    with torch.enable_grad(), plain_attention():
        return closure()
