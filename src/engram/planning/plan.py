"""Memory, time and disk of a fit, a pass, a tracker's update and a retraining, before they run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from engram.core.arguments import AUTO, is_auto, one_of, whole
from engram.core.data.batches import Batches, Data
from engram.core.memory import available_bytes, in_words
from engram.core.parameters import check_module, trainable
from engram.core.progress import time_in_words
from engram.core.state.model import device_of
from engram.engine.session import LARGEST_BATCH, session
from engram.errors import EngramError
from engram.planning.measuring import (
    Cost,
    Saved,
    costs,
    expected,
    memory_in_use,
    part_of,
)
from engram.posteriors.fitting_prior import fitting_prior
from engram.posteriors.gaussian import Posterior
from engram.posteriors.laplace import affordable_directions, chosen_fit, fitted
from engram.posteriors.structures import STRUCTURES
from engram.retraining.retrain import retrain
from engram.sensitivity.estimators import check_estimator
from engram.sensitivity.leave_one_out import sensitivities
from engram.tracking.tracker import Tracker

if TYPE_CHECKING:
    import pandas as pd

COPIES = 4  # trainings of a measured retraining without an example; as many as tell their price
REFITS = 2  # with everything, the fewest


@dataclass(frozen=True)
class Step:
    """What one call will take.

    Attributes:
        seconds: on the wall, as the machine is now.
        memory: bytes at its peak, above what is in use now.
        disk: bytes of its result, saved.
        measured_on: examples of the largest call that was measured.
        what: the call, in words.
    """

    seconds: float
    memory: float
    disk: float
    measured_on: int
    what: str


@dataclass(frozen=True)
class Plan:
    """What calls will take on a model and its data.

    Attributes:
        steps: ``fit``, ``pass``, and what else was asked for.
        num_data: examples.
        num_params: weights that are trained.
        device: of the model.
        free: bytes of memory that are free there.
    """

    steps: Mapping[str, Step]
    num_data: int
    num_params: int
    device: str
    free: int

    @property
    def fits(self) -> bool:
        """Whether there is memory for every step."""
        return all(step.memory <= self.free for step in self.steps.values())

    def to_frame(self) -> pd.DataFrame:
        """One row per step, in seconds and bytes."""
        import pandas as pd

        rows = [vars(step) for step in self.steps.values()]
        return pd.DataFrame(rows, index=pd.Index(list(self.steps), name="step"))

    def __repr__(self) -> str:
        lines = [
            f"Plan for {self.num_data:,} examples and {self.num_params:,} parameters on "
            f"{self.device}; {in_words(self.free)} of memory free",
            f"{'step':15}{'time':>8}{'memory':>14}{'disk':>14}  measured on",
        ]
        for name, step in self.steps.items():
            lines.append(
                f"{name:15}{time_in_words(step.seconds):>8}{in_words(step.memory):>14}"
                f"{in_words(step.disk):>14}  {step.measured_on:,} examples: {step.what}"
            )
        if not self.fits:
            lines.append("note: more memory than is free; use a smaller batch_size or structure")
        return "\n".join(lines)


def plan(
    model: nn.Module,
    data: Data,
    *,
    likelihood: Any = "categorical",
    structure: str = AUTO,
    estimator: str = AUTO,
    optimizer: torch.optim.Optimizer | None = None,
    train: Any = None,
    leave_out: int = 30,
) -> Plan:
    r"""Memory, time and disk of what is to come, from a few calls on few examples.

    Each call is made on 32, 64, ... examples until one takes a second, and time, disk and memory
    go on along the line through the last two. Another load of the machine, or a training that
    takes more steps on more data, is not foreseen. The random state, the model and the data stay
    as they are.

    Args:
        model: as for the calls that are planned.
        data: all of it.
        likelihood: as for :func:`engram.laplace`.
        structure: as for :func:`engram.laplace`; ``"auto"`` is what it stands for with all data.
        estimator: as for :func:`engram.sensitivities`.
        optimizer: in training: the update of a :class:`engram.Tracker` is planned too.
        train: a training function ``fit(model, data)`` or a recipe: :func:`engram.retrain` is
            planned too.
        leave_out: how many examples it is to leave out, one by one.

    Returns:
        ``steps`` by name, each with ``seconds``, ``memory`` and ``disk``; ``print`` shows them.

    Example:
        >>> model, data = nn.Linear(3, 2), (torch.randn(64, 3), torch.arange(64) % 2)
        >>> list(plan(model, data, structure="diagonal").steps)
        ['fit', 'pass']
    """
    check_module(model)
    leave_out = whole("leave_out", leave_out)
    one_of("structure", structure, (AUTO, *STRUCTURES), 'use "auto"')
    check_estimator(estimator)
    kept = torch.get_rng_state()
    try:
        return Planner(model, data, likelihood).plan(
            structure, estimator, optimizer, train, leave_out
        )
    finally:
        torch.set_rng_state(kept)


class Planner:
    """Measures one call after the other; arguments as for :func:`plan`, and a clock."""

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        likelihood: Any = "categorical",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model, self.data, self.likelihood, self.clock = model, data, likelihood, clock
        self.device = device_of(model)
        self.batches = Batches(data, 1)
        self.num_data = self.batches.num_data
        self.level = memory_in_use(self.device)
        self._posterior: Posterior | None = None

    def plan(
        self, structure: str, estimator: str, optimizer: Any, train: Any, leave_out: int
    ) -> Plan:
        """All steps that are asked for."""
        free = available_bytes(self.device)
        steps = {"fit": self.fit(structure), "pass": self.sensitivities(estimator)}
        if optimizer is not None:
            steps["tracker update"] = self.update(optimizer)
        if train is not None:
            steps["retraining"] = self.retraining(train, leave_out)
        parameters = sum(p.numel() for p in trainable(self.model).values())
        return Plan(steps, self.num_data, parameters, str(self.device), free)

    def fit(self, structure: str) -> Step:
        """The posterior, with the structure that all of the data would get."""
        with session(self.model, self.data, self.likelihood, AUTO, False) as opened:
            chosen, _ = chosen_fit(opened, structure, AUTO)

        def call(count: int) -> Saved:
            few = part_of(self.data, count)
            with session(self.model, few, self.likelihood, AUTO, False) as opened:
                with suppress(EngramError):  # of few examples the weights may fit none
                    fitting_prior(opened)
                exact = chosen == "low_rank" and is_auto(structure)
                curvature = "hessian" if exact else AUTO
                self._posterior = _fitted(opened, chosen, curvature)
            return self._posterior

        found = self._costs(call, self._work(chosen))
        return self._step(found, f"laplace, {chosen}", self._work(chosen)(self.num_data))

    def _work(self, chosen: str) -> Any:
        """Low rank explores fewer directions of more examples; all others pass over them."""
        if chosen != "low_rank":
            return float

        def work(count: int) -> float:
            few = Batches(part_of(self.data, count), 1)
            return float(count * max(1, affordable_directions(self.model, few)))

        return work

    def sensitivities(self, estimator: str) -> Step:
        """The pass, with the posterior of the last fit."""
        posterior = self._posterior

        def call(count: int) -> Saved:
            few = part_of(self.data, count)
            return sensitivities(self.model, few, posterior, estimator=estimator, progress=False)

        return self._step(self._costs(call), "sensitivities")

    def update(self, optimizer: torch.optim.Optimizer) -> Step:
        """An update of a tracker, which is taken off again."""

        def call(count: int) -> Saved:
            few = part_of(self.data, count)
            settings = {"likelihood": self.likelihood, "prior_precision": 1.0}
            with Tracker(self.model, optimizer, few, **settings) as tracker:
                tracker.update(step=0)
                return tracker.history

        return self._step(self._costs(call), "Tracker.update")

    def retraining(self, train: Any, leave_out: int) -> Step:
        """Trainings without an example each, and those with everything."""
        copies = min(COPIES, leave_out)

        def call(count: int) -> Saved:
            few = part_of(self.data, count)
            return retrain(
                self.model,
                few,
                list(range(min(copies, count))),
                train=train,
                likelihood=self.likelihood,
                refits=REFITS,
                progress=False,
            )

        found = self._costs(call)
        step = self._step(found, f"{leave_out:,} left out, one by one")
        times = (leave_out + 3) / (copies + REFITS)  # with the 3 refits that retrain makes
        return Step(
            step.seconds * times, step.memory, step.disk * times, step.measured_on, step.what
        )

    def _costs(self, call: Any, work: Any = float) -> list[Cost]:
        return costs(call, self.num_data, self.device, self.level, work, self.clock)

    def _step(self, found: list[Cost], what: str, work: float | None = None) -> Step:
        whole_call = expected(
            found, self.num_data, self.num_data if work is None else work, LARGEST_BATCH
        )
        return Step(
            whole_call.seconds, whole_call.memory, whole_call.disk, found[-1].examples, what
        )


def _fitted(opened: Any, structure: str, curvature: str) -> Posterior:
    """The posterior of few examples; where their Hessian is not definite, the Gauss-Newton one."""
    try:
        return fitted(opened, structure, 1.0, curvature)
    except EngramError:
        return fitted(opened, structure, 1.0)
