r"""A second set of weights that takes every step of a training with a loss of its own.

With the same start, batches, random numbers, rates and rule as the user's optimizer,

.. math:: \theta'_{t+1} = \mathrm{step}_t(\theta'_t, g_t), \qquad
    g_t = \sum_{j \in B_t} c_j \nabla \ell_j(\theta'_t)

and :math:`c_j = 0` for the examples that it is to know nothing of.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import LBFGS, Optimizer

from engram.core.data.batches import Batches, as_outputs
from engram.core.data.inputs import handed
from engram.core.parameters import Named
from engram.core.state.model import own_forward, state_kept
from engram.core.storage.values import objects, typed, wrong
from engram.engine.streaming.step import StepRecorder
from engram.errors import DataError, PosteriorError
from engram.likelihoods import Likelihood
from engram.optimizers.base import BayesianOptimizer
from engram.tracking.validation import BATCH_SIZE, losses_of
from engram.training.metrics import unwrapped

TWIN = "a saved twin"
ROUNDING = 1e-5  # relative change of a gradient's norm up to which it was not rescaled (clipped)


class HeldOutTwin:
    """Weights, buffers and optimizer state beside those of a training.

    Schedules need no care, nor does whatever scales a gradient as a whole between ``backward`` and
    ``step``, such as clipping: the twin's is scaled by the same factor. The training's own
    weights, gradients and random numbers are not touched.

    Args:
        model, optimizer: of the training; the twin starts where they are.

    Attributes:
        optimizer: a copy, whose parameters are the twin's weights.
        missed: steps of the training that the twin was not told of.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.leader = model, unwrapped(optimizer)
        check_copied(self.leader)
        self.optimizer = _copied(self.leader)
        self.optimizer.zero_grad()
        self.buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
        self.missed = 0
        self._length: float | None = None  # of the leader's gradient; None without one of ours
        self._apart = True  # whether backward comes before the step, not inside of it
        own = weakref.ref(self)  # the hooks must not keep the twin alive
        hooks = (
            self.leader.register_step_pre_hook(lambda *_: _alive(own)._before_step()),
            self.leader.register_step_post_hook(lambda *_: _alive(own)._after_step()),
        )
        self._hooks = [weakref.finalize(self, hook.remove) for hook in hooks]

    @property
    def weights(self) -> Named:
        """The twin's weights under the names of the model's."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        return {names[id(p)]: own for p, own in self._pairs() if id(p) in names}

    def close(self) -> None:
        """Take no more steps; the optimizer is as it was before the twin."""
        for remove in self._hooks:
            remove()

    def begin(self) -> None:
        """Before a backward pass: where the leader's gradients are gone, so are the twin's."""
        if all(p.grad is None for p, _ in self._pairs()):
            self.optimizer.zero_grad()
            self._length = None

    def learn(self, seen: StepRecorder, objective: Callable[[Tensor], Tensor]) -> None:
        """Add the gradient of an objective of the outputs [B, K] to what the next step takes.

        Args:
            seen: the call of the model that it repeats, after its backward pass.
            objective: what the twin minimises, a scalar.
        """
        self._join()
        for parameter, own in self._pairs():
            own.requires_grad_(parameter.requires_grad)
        trained = [own for _, own in self._pairs() if own.requires_grad]
        assert seen.random is not None
        with (
            state_kept(self.model),
            seen.random.again(),
            own_forward(self.model),
            torch.enable_grad(),
        ):
            loss = objective(self._called(seen.args, seen.kwargs))
        found = torch.autograd.grad(loss, trained, allow_unused=True)
        for own, gradient in zip(trained, found, strict=True):
            if gradient is not None:
                own.grad = gradient if own.grad is None else own.grad + gradient
        self._length = _length(p for p, _ in self._pairs())

    def losses(self, batches: Batches, indices: Tensor, likelihood: Likelihood) -> Tensor:
        """Losses of these examples at the twin's weights, in eval mode, [m]."""
        parts = batches.subset(indices, BATCH_SIZE)
        return losses_of(self.model, parts, likelihood, lambda x: self._called(*handed(x)))

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        state = {**self.buffers, **self.weights}
        return as_outputs(functional_call(self.model, state, args, kwargs))

    def _pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Every parameter of the leader with the twin's own."""
        groups = zip(self.leader.param_groups, self.optimizer.param_groups, strict=False)
        for group, own in groups:
            yield from zip(group["params"], own["params"], strict=True)

    def _join(self) -> None:
        """Groups of parameters that the leader was given since."""
        for group in self.leader.param_groups[len(self.optimizer.param_groups) :]:
            fresh = [copy.deepcopy(p) for p in group["params"]]
            self.optimizer.add_param_group({**group, "params": fresh})

    def _before_step(self) -> None:
        self._apart = self._length is not None  # else the step has a closure, not called yet
        if self._apart:
            self._scale()

    def _after_step(self) -> None:
        if self._length is None:
            self.missed += 1
            return
        groups = self.leader.param_groups
        if not self._apart and not any(group.get("nesterov") for group in groups):
            self._scale()  # Nesterov's step may have written to the gradients
        for group, own in zip(groups, self.optimizer.param_groups, strict=True):
            own |= {key: value for key, value in group.items() if key != "params"}
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._length = None

    def _scale(self) -> None:
        """By the factor that the leader's gradient was scaled by since its backward pass."""
        factor = _length(p for p, _ in self._pairs()) / (self._length or math.inf)
        if factor > 0 and math.isfinite(factor) and abs(factor - 1) > ROUNDING:
            for _, own in self._pairs():
                if own.grad is not None:
                    own.grad.mul_(factor)

    def state_dict(self) -> dict[str, Any]:
        """Copies of everything that a restart needs; keys are words."""
        held: dict[int, Any] = self.optimizer.state_dict()["state"]
        return {
            "weights": {name: w.detach().clone() for name, w in self.weights.items()},
            "buffers": {name: b.clone() for name, b in self.buffers.items()},
            "optimizer": {str(place): copy.deepcopy(values) for place, values in held.items()},
            "missed": self.missed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave."""
        self._join()
        tensors = Mapping[str, Tensor]
        kinds = {"weights": tensors, "buffers": tensors, "optimizer": Mapping[str, Any]}
        values = objects(state, TWIN, (*kinds, "missed"))
        saved = {name: typed(kind, values[name], TWIN) for name, kind in kinds.items()}
        missed = typed(int, values["missed"], TWIN)
        for kind, present in (("weights", self.weights), ("buffers", self.buffers)):
            if _shapes(saved[kind]) != _shapes(present):
                raise DataError(
                    f"{kind} of the model in training",
                    f"those of another one ({', '.join(sorted(saved[kind])[:3])}, ...)",
                    "resume with the model and optimizer that the run was started with",
                )
        held = self._held(saved["optimizer"])
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": held, "param_groups": groups})
        with torch.no_grad():
            for kind, present in (("weights", self.weights), ("buffers", self.buffers)):
                for name, value in saved[kind].items():
                    present[name].copy_(value)
        self.missed, self._length = missed, None

    def _held(self, saved: Mapping[str, Any]) -> dict[int, Any]:
        """What the optimizer keeps of each parameter, by the parameter's place."""
        places = {str(place): place for place, _ in enumerate(self._pairs())}
        held = {}
        for place, values in saved.items():
            if place not in places or not isinstance(values, Mapping):
                raise wrong(TWIN, f"what an optimizer of {len(places)} parameters keeps", place)
            held[places[place]] = copy.deepcopy(dict(values))
        return held


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    return {name: (value.shape, value.dtype) for name, value in tensors.items()}


def check_copied(optimizer: Optimizer) -> None:
    """PosteriorError for an optimizer that runs the model in its own step, or samples weights."""
    sampling = any(base.__name__ == "IVON" for base in type(optimizer).__mro__)
    if sampling or isinstance(optimizer, BayesianOptimizer | LBFGS):
        raise PosteriorError(
            "an optimizer whose step takes the gradients of one backward pass, such as SGD, Adam",
            type(optimizer).__name__,
            "leave held_out out; IVON and Newton hold a Hessian, which the posterior already uses",
        )


def _copied(optimizer: Optimizer) -> Optimizer:
    """The optimizer over copies of its parameters, with what torch's own copy leaves behind."""
    memo: dict[int, Any] = {}
    twin = copy.deepcopy(optimizer, memo)
    for name, value in vars(optimizer).items():
        if name not in vars(twin) and not callable(value):  # a scheduler wraps step
            setattr(twin, name, copy.deepcopy(value, memo))
    return twin


def _length(parameters: Iterable[Tensor]) -> float:
    """Norm of all gradients together."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return 0.0
    place = gradients[0].device
    return float(torch.stack([gradient.norm().to(place) for gradient in gradients]).norm())


def _alive(reference: weakref.ref[HeldOutTwin]) -> HeldOutTwin:
    found = reference()
    assert found is not None  # the hook is gone with its twin
    return found
