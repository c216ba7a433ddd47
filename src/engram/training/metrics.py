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
Adafactor                 at most 1 / (lr sqrt(t)), times the          sqrt(v) of rows and
                          parameter's size                             columns, and its clipping
SOAP                      1 (m is bias-corrected)                      1 / diag(P^-1), P from its
                                                                       eigenbasis
Shampoo                   1                                            the same, P from its sums
Lion                      that of gradients in the momentum c          E[c^2] / E[|c|]
Muon                      the same                                     1 / diag(P^-1) of (c c')^1/2
AdamWScheduleFree,        the share of the newest weights in the       P / lr, summed up, and the
SGD..., RAdam...          average                                      sum averaged
Adam8bit, AdamW8bit and   as Adam                                      as Adam, unpacked
others of bitsandbytes
========================  ===========================================  ==========================

Newton's kin and SOAP step along all axes at once; the diagonal is what a time per entry can say.
Where a gradient was clipped to a share of itself, that share stands in place of 1 in b.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from engram.errors import TrainingError
from engram.optimizers.structures import SHARED
from engram.training.averaged_weights import (
    all_of_it,
    averaged_adam_root,
    averaged_radam_root,
    averaged_sgd_root,
    averaged_shrinking,
    newest_share,
)
from engram.training.factored_squares import (
    adafactor_momentum,
    adafactor_rate,
    adafactor_root,
    adafactor_shrinking,
    adafactor_weight,
)
from engram.training.kronecker_roots import shampoo_root, shampoo_weight, soap_root, soap_weight
from engram.training.normalised_steps import (
    lion_root,
    lion_weight,
    muon_root,
    muon_weight,
    steadily,
)
from engram.training.step_rules import (
    Forgetting,
    Number,
    Root,
    Step,
    Weight,
    adagrad_root,
    adagrad_weight,
    adam_root,
    adamax_root,
    averaged_weight,
    ivon_root,
    ivon_weight,
    nadam_weight,
    no_root,
    own_diagonal_root,
    own_matrix_root,
    plain_weight,
    radam_root,
    rate_of,
    rmsprop_root,
    sgd_weight,
    shrinking,
    weight_decay_of,
)


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


def _not_carried(group: Mapping[str, Any]) -> float:
    return 0.0


def _momentum(group: Mapping[str, Any]) -> float:
    return float(group.get("momentum", 0.0))


@dataclass(frozen=True)
class Metric:
    """How one kind of optimizer turns gradients into steps.

    Args:
        weight: the total weight of gradients in a step.
        root: what they are divided by, entry by entry, or one number for all.
        forgetting: the share of the root's average that a step replaces: where it is small, the
            root of a few steps is read once.
        decoupled: whether weight decay shrinks the weights by itself, as AdamW's.
        carried: the momentum of gradients that are divided already, as RMSprop's; 0 where there is
            none.
        course: mean of the inverse root over so many steps with gradients that are alike, relative
            to the last one: for guesses.
        has_gradients: whether it steps by the parameters' ``grad``; where not, every step moves
            all parameters, and there is nothing to clip.
        rate: the learning rate of a step.
        shrink: the share by which a decoupled weight decay shrinks the weights in a step.
        one_by_one: whether parameters of one group have learning rates of their own.
        averages: whether the weights in use are an average of those stepped, in which the newest
            have the share ``rate``.
        spoils_gradients: whether a step writes into the parameters' ``grad``.
    """

    weight: Weight = plain_weight
    root: Root = no_root
    forgetting: Forgetting = _all_forgotten
    decoupled: bool = False
    carried: Forgetting = _not_carried
    course: Callable[[Mapping[str, Any], int], float] = _even
    has_gradients: bool = True
    rate: Number = rate_of
    shrink: Number = shrinking
    one_by_one: bool = False
    averages: bool = False
    spoils_gradients: bool = False

    def decay(self, step: Step) -> tuple[float, bool]:
        """Weight decay of the mean objective, and whether it is decoupled from the gradient."""
        group = step.group
        if "prior_precision" in group:  # of our own optimizers: on the sum
            return float(group["prior_precision"]) / float(group["num_data"]), False
        own = group.get("decoupled_weight_decay") or group.get("weight_decouple")
        return weight_decay_of(step.optimizer, group), self.decoupled or bool(own)

    def forgotten(self, group: Mapping[str, Any]) -> float:
        """The share of the root that a step replaces; all where every root has its own weight."""
        return 1.0 if self.carried(group) else self.forgetting(group)

    def settled(self, group: Mapping[str, Any], steps: int) -> float:
        """What the last root is divided by to stand for so many steps: for guesses."""
        if self.averages:
            return 2 / steps
        return (1 - self.carried(group)) / self.course(group, steps)


# Adam's kin in bitsandbytes; all decay decoupled from the gradient, whatever their name
BITSANDBYTES = tuple(
    f"{kind}{bits}"
    for kind in ("Adam", "AdamW", "PagedAdam", "PagedAdamW")
    for bits in ("8bit", "32bit")
)
_OWN_DIAGONAL = Metric(root=own_diagonal_root, forgetting=_precision_rate, has_gradients=False)
_OWN_MATRIX = Metric(root=own_matrix_root, forgetting=_precision_rate, has_gradients=False)
_BITSANDBYTES = Metric(averaged_weight, adam_root, _second_beta, decoupled=True)
_SCHEDULE_FREE: dict[str, Any] = {
    "carried": all_of_it,
    "rate": newest_share,
    "shrink": averaged_shrinking,
    "averages": True,
    "spoils_gradients": True,
}
# Every optimizer that is recorded, by the name of its class; subclasses in the same way.
METRICS: dict[str, Metric] = {
    "SGD": Metric(sgd_weight, forgetting=_nothing_forgotten),
    "RMSprop": Metric(root=rmsprop_root, forgetting=_alpha, carried=_momentum, course=_from_zero),
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
    "Adafactor": Metric(
        adafactor_weight,
        adafactor_root,
        decoupled=True,
        carried=adafactor_momentum,
        rate=adafactor_rate,
        shrink=adafactor_shrinking,
        one_by_one=True,
    ),
    "SOAP": Metric(soap_weight, soap_root, _second_beta, decoupled=True),
    "Shampoo": Metric(shampoo_weight, shampoo_root, course=_growing, spoils_gradients=True),
    "Lion": Metric(lion_weight, lion_root, steadily, decoupled=True),
    "Muon": Metric(muon_weight, muon_root, steadily, decoupled=True),
    "AdamWScheduleFree": Metric(root=averaged_adam_root, decoupled=True, **_SCHEDULE_FREE),
    "RAdamScheduleFree": Metric(root=averaged_radam_root, decoupled=True, **_SCHEDULE_FREE),
    "SGDScheduleFree": Metric(root=averaged_sgd_root, **_SCHEDULE_FREE),
    **dict.fromkeys(BITSANDBYTES, _BITSANDBYTES),
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
    """Steps that a parameter has taken, as far as the optimizer says; SGD's does not."""
    states: dict[Any, Any] = dict(optimizer.state)
    shared = states.get(SHARED, {}).get("step", getattr(optimizer, "current_step", 0))
    for group in optimizer.param_groups:
        if any(p is parameter for p in group["params"]):
            shared = group.get("k", group.get("step", shared))  # of schedule-free, SOAP
    return int(states.get(parameter, {}).get("step", shared))


def takes_mean_loss(optimizer: Optimizer) -> bool:
    """Whether the algorithm itself is defined for the mean loss of a batch."""
    return any("ess" in group or "num_data" in group for group in optimizer.param_groups)


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside those that only pass its steps on, such as accelerate's."""
    inner = getattr(optimizer, "optimizer", None)
    return unwrapped(inner) if isinstance(inner, Optimizer) else optimizer
