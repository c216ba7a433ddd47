r"""How each kind of optimizer steps: one short function a rule, and one line in ``METRICS``.

A step is :math:`\theta \leftarrow \theta - \eta_t b_t P_t^{-1}` (gradient): the learning rate, the
total weight b of gradients in the momentum (1 without one), and what the gradient is divided by.

========================  ===========================================  ==========================
optimizer                 weight b                                     root P
========================  ===========================================  ==========================
SGD                       b <- mu b + (1 - dampening), first 1;        1
                          with Nesterov 1 + mu b
Adam, AdamW               1 (m is bias-corrected)                      sqrt(v_hat) + eps
NAdam                     that of the gradient and of m, by its        sqrt(v_hat) + eps
                          schedule of momentum
RAdam                     1                                            the same over its
                                                                       rectification; 1 before it
Adamax                    1                                            u
RMSprop                   1; momentum goes through the divided         sqrt(s) + eps
                          gradients
Adagrad                   1 / (1 + (t - 1) lr_decay)                   sqrt(sum) + eps
IVON                      1, or 1 - beta1^t without debias             (h + delta / ess), over its
                                                                       value at the start where
                                                                       lr is rescaled
DiagonalOnlineNewton,     1                                            s / N
DiagonalVON
Newton, OnlineNewton,     1                                            1 / (N diag(S^-1))
VON
========================  ===========================================  ==========================

The last ones step along all axes at once; the diagonal is what a time per entry can say of it.
Where a gradient was clipped to a share of itself, that share stands in place of 1 in b.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import threshold
from torch.optim import Optimizer

from engram.errors import TrainingError
from engram.optimizers.structures import SHARED

RECTIFIED_FROM = 5.0  # length of its average from which RAdam divides by the root, as in torch
_inverses: WeakKeyDictionary[Optimizer, tuple[Tensor, Tensor]] = WeakKeyDictionary()


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


def with_eps(root: Tensor, group: Mapping[str, Any]) -> Tensor:
    """The root plus eps; infinite where it is 0, since no gradient has reached such an entry.

    Its steps moved nothing, and the first gradient that arrives finds another root. Taken by its
    eps, the training time of pixels that few of 400 images have was 50,000 times that of others.
    Without an eps the optimizer itself has made NaN of it.
    """
    eps = float(group["eps"])
    return (
        threshold(root, 0.0, math.inf, inplace=True).add_(eps) if eps else root
    )  # one pass over the root


def adam_root(step: Step) -> Tensor:
    """sqrt(v_hat) + eps."""
    return with_eps(root_of_average(step.group, step.state, step.number), step.group)


def nadam_weight(step: Step, memory: float, share: float) -> tuple[float, float]:
    """(1 - mu_t) / (1 - mu_1...mu_t) of the gradient, and the next mu over its product of m."""
    beta, speed = float(step.group["betas"][0]), float(step.group["momentum_decay"])
    now, later = (beta * (1 - 0.5 * 0.96 ** (t * speed)) for t in (step.number, step.number + 1))
    product = float(step.state["mu_product"])
    memory = beta * memory + (1 - beta) * share
    fresh = (1 - now) / (1 - product) * share
    return memory, fresh + later / (1 - product * later) * memory


def radam_root(step: Step) -> Tensor | float:
    """sqrt(v_hat) + eps over the rectification; 1 as long as v says too little."""
    beta, number = float(step.group["betas"][1]), step.number
    correction = 1 - beta**number
    longest = 2 / (1 - beta) - 1
    length = longest - 2 * number * beta**number / correction
    if length <= RECTIFIED_FROM:
        return 1.0
    above, below = (length - 4) * (length - 2) * longest, (longest - 4) * (longest - 2) * length
    root = with_eps(step.state["exp_avg_sq"].sqrt(), step.group)
    return root.div_((correction * above / below) ** 0.5)


def adamax_root(step: Step) -> Tensor:
    """u, the largest gradient so far, slowly forgotten."""
    return step.state["exp_inf"].clone()


def root_of_rmsprop(group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor:
    """sqrt(s), or that of the variance where it is centered."""
    square: Tensor = state["square_avg"]
    if group.get("centered"):
        square = (square - state["grad_avg"] ** 2).clamp_(min=0)
    return square.sqrt()


def rmsprop_root(step: Step) -> Tensor:
    """sqrt(s) + eps."""
    return with_eps(root_of_rmsprop(step.group, step.state), step.group)


def adagrad_weight(step: Step, memory: float, share: float) -> tuple[float, float]:
    """The learning rate falls by itself: 1 / (1 + (t - 1) lr_decay)."""
    return memory, share / (1 + (step.number - 1) * float(step.group["lr_decay"]))


def adagrad_root(step: Step) -> Tensor:
    """The root of the sum of squares, and eps."""
    return with_eps(step.state["sum"].sqrt(), step.group)


def ivon_weight(step: Step, memory: float, share: float) -> tuple[float, float]:
    """m <- beta1 m + (1 - beta1) g, bias-corrected unless IVON is told not to."""
    beta = float(step.group["beta1"])
    memory = beta * memory + (1 - beta) * share
    debiased = getattr(step.optimizer, "debias", True)
    return memory, memory / (1 - beta**step.number) if debiased else memory


def ivon_root(step: Step) -> Tensor:
    """h + delta / ess, one flat h for a group; over its first value where lr is rescaled."""
    group = step.group
    place = next(n for n, p in enumerate(group["params"]) if p is step.parameter)
    part = group["hess"].split([p.numel() for p in group["params"]])[place]
    rescaled = getattr(step.optimizer, "rescale_lr", True)
    first = group["hess_init"] + group["weight_decay"] if rescaled else 1.0
    return (part + group["weight_decay"]).div_(first).reshape(step.parameter.shape)


def own_diagonal_root(step: Step) -> Tensor:
    """s / N: the step of our own optimizers is that of the sum over N examples."""
    return step.state["precision"] / step.group["num_data"]


def own_matrix_root(step: Step) -> Tensor:
    """1 / (N diag(S^-1)), the parameter's part of it."""
    shared: Mapping[str, Any] = dict(step.optimizer.state)[SHARED]  # type: ignore[index]
    groups = step.optimizer.param_groups
    trained = [p for group in groups for p in group["params"] if p.requires_grad]
    place = next(n for n, p in enumerate(trained) if p is step.parameter)
    parts = _inverse_diagonal(step.optimizer, shared["precision"]).split(
        [p.numel() for p in trained]
    )
    inverse = parts[place].reshape(step.parameter.shape).to(step.parameter.dtype)
    return (inverse * step.group["num_data"]).reciprocal_()


def _inverse_diagonal(optimizer: Optimizer, precision: Tensor) -> Tensor:
    """diag(S^-1), found once for all parameters of a step."""
    if optimizer not in _inverses or _inverses[optimizer][0] is not precision:
        factor = torch.linalg.cholesky(precision)
        _inverses[optimizer] = (precision, torch.cholesky_inverse(factor).diagonal().clone())
    return _inverses[optimizer][1]


def _second_beta(group: Mapping[str, Any]) -> float:
    return 1 - float(group["beta2"] if "beta2" in group else group["betas"][1])


def _alpha(group: Mapping[str, Any]) -> float:
    return 1 - float(group["alpha"])


def _precision_rate(group: Mapping[str, Any]) -> float:
    return float(group["precision_lr"])


def _from_zero(group: Mapping[str, Any], steps: int) -> float:
    """RMSprop's average starts at 0 and is not corrected: its first roots are small."""
    alpha = float(group["alpha"])
    return sum((1 - alpha**t) ** -0.5 for t in range(1, steps + 1)) / steps


def _growing(group: Mapping[str, Any], steps: int) -> float:
    """Adagrad's sum grows as the steps do."""
    return 2.0


def _even(group: Mapping[str, Any], steps: int) -> float:
    return 1.0


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
        carries: whether momentum is taken of gradients that are divided already, as RMSprop's.
        course: mean of the inverse root over so many steps with gradients that are alike, relative
            to the last one: for guesses.
        has_gradients: whether it steps by the parameters' ``grad``; where not, every step moves
            all parameters, and there is nothing to clip.
    """

    weight: Weight = plain_weight
    root: Root = no_root
    forgetting: Forgetting = _all_forgotten
    decoupled: bool = False
    carries: bool = False
    course: Callable[[Mapping[str, Any], int], float] = _even
    has_gradients: bool = True

    def decay(self, group: Mapping[str, Any]) -> tuple[float, bool]:
        """Weight decay of the mean objective, and whether it is decoupled from the gradient."""
        if "prior_precision" in group:  # of our own optimizers: on the sum
            return float(group["prior_precision"]) / float(group["num_data"]), False
        decoupled = self.decoupled or bool(group.get("decoupled_weight_decay"))
        return float(group.get("weight_decay", 0.0)), decoupled

    def carried(self, group: Mapping[str, Any]) -> float:
        """The momentum of divided gradients."""
        return float(group.get("momentum", 0.0)) if self.carries else 0.0

    def forgotten(self, group: Mapping[str, Any]) -> float:
        """The share of the root that a step replaces; all where every root has its own weight."""
        return 1.0 if self.carried(group) else self.forgetting(group)


_OWN_DIAGONAL = Metric(root=own_diagonal_root, forgetting=_precision_rate, has_gradients=False)
_OWN_MATRIX = Metric(root=own_matrix_root, forgetting=_precision_rate, has_gradients=False)
# Every optimizer that is recorded, by the name of its class; subclasses in the same way.
METRICS: dict[str, Metric] = {
    "SGD": Metric(sgd_weight, forgetting=_nothing_forgotten),
    "RMSprop": Metric(root=rmsprop_root, forgetting=_alpha, carries=True, course=_from_zero),
    "Adam": Metric(averaged_weight, adam_root, _second_beta),
    "AdamW": Metric(averaged_weight, adam_root, _second_beta, decoupled=True),
    "NAdam": Metric(nadam_weight, adam_root, _second_beta),
    "RAdam": Metric(averaged_weight, radam_root, _second_beta),
    "Adamax": Metric(averaged_weight, adamax_root, _second_beta),
    "Adagrad": Metric(adagrad_weight, adagrad_root, _nothing_forgotten, course=_growing),
    "DiagonalOnlineNewton": _OWN_DIAGONAL,
    "DiagonalVON": _OWN_DIAGONAL,
    "IVON": Metric(ivon_weight, ivon_root, _second_beta, has_gradients=False),
    "Newton": _OWN_MATRIX,
    "OnlineNewton": _OWN_MATRIX,
    "VON": _OWN_MATRIX,
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


def steps_taken(optimizer: Optimizer, parameter: Tensor) -> int:
    """Steps that a parameter has taken, as far as the optimizer's state says; SGD's does not."""
    states: dict[Any, Any] = dict(optimizer.state)
    shared = states.get(SHARED, {}).get("step", getattr(optimizer, "current_step", 0))
    return int(states.get(parameter, {}).get("step", shared))


def takes_mean_loss(optimizer: Optimizer) -> bool:
    """Whether the algorithm itself is defined for the mean loss of a batch."""
    return any("ess" in group or "num_data" in group for group in optimizer.param_groups)


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside those that only pass its steps on, such as accelerate's."""
    inner = getattr(optimizer, "optimizer", None)
    return unwrapped(inner) if isinstance(inner, Optimizer) else optimizer
