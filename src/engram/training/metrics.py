r"""How each kind of optimizer steps: one short function a rule, and one line in ``METRICS``.

A step is :math:`\theta \leftarrow \theta - \eta_t b_t P_t^{-1}` (gradient): the learning rate, the
total weight b of gradients in the momentum (1 without one), and what the gradient is divided by.

===========================  ============================  =======================================
optimizer                    weight b                      root P
===========================  ============================  =======================================
SGD                          b <- mu b + (1 - dampening);  1
                             with Nesterov 1 + mu b
Adam, AdamW                  1 (m is bias-corrected)       sqrt(v_hat) + eps
===========================  ============================  =======================================

Where a gradient was clipped to a share of itself, that share stands in place of 1 in b.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from engram.errors import TrainingError


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one parameter, as settings and state are right after it.

    Args:
        optimizer: that took it.
        parameter: that was moved.
        group: its settings.
        state: of the parameter.
        number: t, the steps of this parameter so far, this one included.
    """

    optimizer: Optimizer
    parameter: Tensor
    group: Mapping[str, Any]
    state: Mapping[str, Any]
    number: int


# (step, weight in the momentum before, share of the gradient that was left by clipping) ->
# (weight in the momentum now, weight of gradients in this step)
Weight = Callable[[Step, float, float], tuple[float, float]]
Root = Callable[[Step], Tensor | float]
Forgetting = Callable[[Mapping[str, Any]], float]


def plain_weight(step: Step, memory: float, share: float) -> tuple[float, float]:
    """The gradient itself: no momentum."""
    return memory, share


def sgd_weight(step: Step, memory: float, share: float) -> tuple[float, float]:
    """b <- mu b + (1 - dampening), at the first step 1; Nesterov's step has 1 + mu b."""
    momentum = float(step.group.get("momentum", 0.0))
    if not momentum:
        return memory, share
    fresh = share if step.number == 1 else (1 - float(step.group["dampening"])) * share
    memory = momentum * memory + fresh
    return memory, share + momentum * memory if step.group["nesterov"] else memory


def averaged_weight(step: Step, memory: float, share: float) -> tuple[float, float]:
    """m <- beta1 m + (1 - beta1) g, divided by 1 - beta1^t: 1, unless gradients were clipped."""
    beta = float(step.group["betas"][0])
    memory = beta * memory + (1 - beta) * share
    return memory, memory / (1 - beta**step.number)


def no_root(step: Step) -> float:
    """1: the gradient is divided by nothing."""
    return 1.0


def root_of_average(group: Mapping[str, Any], state: Mapping[str, Any], steps: float) -> Tensor:
    """sqrt(v / (1 - beta2^t)) of Adam and its kin; AMSGrad's v is the largest so far."""
    square: Tensor = state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"]
    return square.sqrt().div_((1 - float(group["betas"][1]) ** steps) ** 0.5)


def adam_root(step: Step) -> Tensor:
    """sqrt(v_hat) + eps."""
    return root_of_average(step.group, step.state, step.number).add_(float(step.group["eps"]))


def _second_beta(group: Mapping[str, Any]) -> float:
    return 1 - float(group["betas"][1])


def _nothing_forgotten(group: Mapping[str, Any]) -> float:
    return 0.0


def _all_forgotten(group: Mapping[str, Any]) -> float:
    return 1.0


@dataclass(frozen=True)
class Metric:
    """How one kind of optimizer turns gradients into steps.

    Args:
        weight: the total weight of gradients in a step.
        root: what they are divided by, entry by entry, or one number for all.
        forgetting: the share of the root's average that a step replaces: where it is small, the
            root of a few steps is read once.
        decoupled: whether weight decay shrinks the weights by itself, as AdamW's.
    """

    weight: Weight = plain_weight
    root: Root = no_root
    forgetting: Forgetting = _all_forgotten
    decoupled: bool = False

    def decay(self, group: Mapping[str, Any]) -> tuple[float, bool]:
        """Weight decay of the mean objective, and whether it is decoupled from the gradient."""
        decoupled = self.decoupled or bool(group.get("decoupled_weight_decay"))
        return float(group.get("weight_decay", 0.0)), decoupled


# Every optimizer that is recorded, by the name of its class; subclasses in the same way.
METRICS: dict[str, Metric] = {
    "SGD": Metric(sgd_weight, forgetting=_nothing_forgotten),
    "Adam": Metric(averaged_weight, adam_root, _second_beta),
    "AdamW": Metric(averaged_weight, adam_root, _second_beta, decoupled=True),
}


def metric_of(optimizer: Optimizer) -> Metric:
    """The metric of an optimizer; TrainingError where there is none for its class."""
    for base in type(optimizer).__mro__:
        if base.__name__ in METRICS:
            return METRICS[base.__name__]
    raise TrainingError(
        f"one of {', '.join(METRICS)}, or a registered optimizer",
        type(optimizer).__name__,
        "say how it steps: engram.training.metrics.register(name, root), with root(step) the "
        "tensor that it divides the gradient of step.parameter by",
    )


def register(
    name: str,
    root: Root = no_root,
    weight: Weight = plain_weight,
    *,
    forgetting: Forgetting = _all_forgotten,
    decoupled: bool = False,
) -> None:
    """Teach :func:`engram.record` another optimizer, by the name of its class.

    Args:
        name: of the class; subclasses are recorded in the same way.
        root: from a :class:`Step` to what the gradient is divided by: a tensor of the parameter's
            shape that may be changed, or a number. 1 if not given.
        weight: the total weight of gradients in a step, for optimizers with momentum: see
            :func:`sgd_weight` and :func:`averaged_weight`. 1 if not given.
        forgetting: from a group's settings to the share of the root that one step replaces, as
            1 - beta2 of Adam; with it the root is not read at every step.
        decoupled: whether weight decay shrinks the weights by itself, as AdamW's.

    Example:
        >>> register("MyAdam", lambda step: step.state["v"].sqrt() + 1e-8)
        >>> _ = METRICS.pop("MyAdam")
    """
    METRICS[name] = Metric(weight, root, forgetting, decoupled)


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside those that only pass its steps on, such as accelerate's."""
    inner = getattr(optimizer, "optimizer", None)
    return unwrapped(inner) if isinstance(inner, Optimizer) else optimizer
