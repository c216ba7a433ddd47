r"""What a step of torch's optimizers, of IVON and of our own does to a gradient.

A *weight* is the total of gradients in the momentum, a *root* what the gradient is divided by.
Which optimizer has which is in the table of :mod:`engram.training.metrics`.
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
Number = Callable[[Step], float]


def rate_of(step: Step) -> float:
    """The learning rate of the parameter's group."""
    return float(step.group["lr"])


def weight_decay_of(optimizer: Optimizer, group: Mapping[str, Any]) -> float:
    """As the steps use it; lion-pytorch's may be given relative to the first learning rate."""
    decay = float(group.get("weight_decay", 0.0))
    relative = getattr(optimizer, "decoupled_wd", False)
    return decay / float(optimizer._init_lr) if relative else decay  # type: ignore[attr-defined]


def shrinking(step: Step) -> float:
    """The share by which a decoupled weight decay shrinks the weights in this step."""
    return rate_of(step) * weight_decay_of(step.optimizer, step.group)


def rms(values: Tensor) -> Tensor:
    """Root mean square of the entries."""
    return values.norm() / max(1, values.numel()) ** 0.5


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
    if "state2" in state:  # of bitsandbytes
        square = _unpacked(state)
    else:
        square = state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"]
    return square.sqrt().div_((1 - float(group["betas"][1]) ** steps) ** 0.5)


def _unpacked(state: Mapping[str, Any]) -> Tensor:
    """bitsandbytes' average of squares; of 8 bits they are numbers in a table, scaled by block."""
    packed: Tensor = state["state2"]
    if packed.dtype != torch.uint8:
        return packed
    if "absmax2" not in state:
        raise KeyError("absmax2")
    flat = state["qmap2"][packed.flatten().long()]
    size = -(-flat.numel() // state["absmax2"].numel())
    block = 1 << (size - 1).bit_length()  # a power of two; the last one may be shorter
    scales = state["absmax2"].repeat_interleave(block)[: flat.numel()]
    return (flat * scales).reshape(packed.shape)


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


def rectification(group: Mapping[str, Any], number: int, shortest: float) -> float | None:
    """The square of RAdam's, or None as long as its average is no longer than the shortest."""
    beta = float(group["betas"][1])
    longest = 2 / (1 - beta) - 1
    length = longest - 2 * number * beta**number / (1 - beta**number)
    if length <= shortest:
        return None
    above, below = (length - 4) * (length - 2) * longest, (longest - 4) * (longest - 2) * length
    return above / below


def radam_root(step: Step) -> Tensor | float:
    """sqrt(v_hat) + eps over the rectification; 1 as long as v says too little."""
    rectified = rectification(step.group, step.number, RECTIFIED_FROM)
    if rectified is None:
        return 1.0
    root = with_eps(step.state["exp_avg_sq"].sqrt(), step.group)
    correction = 1 - float(step.group["betas"][1]) ** step.number
    return root.div_((correction * rectified) ** 0.5)


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
