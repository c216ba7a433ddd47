r"""Schedule-free: the weights that are used are an average of those that are stepped.

.. math::
    z \leftarrow z - \eta_t P_t^{-1} g(y), \qquad x \leftarrow (1 - c_t)\, x + c_t z, \qquad
    y = (1 - \beta)\, z + \beta x

Gradients are taken at y, which is in the model while it trains; x is what is evaluated, after
``optimizer.eval()``. So the training time is that of x,

.. math::
    C_z \leftarrow C_z + \eta_t P_t^{-1}, \qquad C \leftarrow (1 - c_t)\, C + c_t C_z ,

about half that of z where :math:`c_t = 1 / t`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from engram.training.step_rules import Step, rectification, root_of_average, with_eps

RECTIFIED_FROM = 4.0  # length of its average from which schedule-free RAdam divides by the root


def newest_share(step: Step) -> float:
    """c_t: of the newest z in x."""
    group = step.group
    total = float(group["weight_sum"])
    rate = max(float(group["lr_max"]), 0.0)
    weight = int(group["k"]) ** float(group["r"]) * rate ** float(group["weight_lr_power"])
    return weight / total if total else 0.0


def stepped_rate(group: Mapping[str, Any]) -> float:
    """The learning rate of the last step of z, warm-up included."""
    return float(group["scheduled_lr"])


def averaged_adam_root(step: Step) -> Tensor:
    """(sqrt(v_hat) + eps) over the learning rate, which has RAdam's rectification in it."""
    root = with_eps(root_of_average(step.group, step.state, int(step.group["k"])), step.group)
    return root.div_(stepped_rate(step.group))


def averaged_radam_root(step: Step) -> Tensor | float:
    """The same; the learning rate alone where its first steps are those of SGD."""
    if rectification(step.group, int(step.group["k"]), RECTIFIED_FROM) is None:
        return averaged_sgd_root(step)
    return averaged_adam_root(step)


def averaged_sgd_root(step: Step) -> float:
    """1 over the learning rate."""
    rate = stepped_rate(step.group)
    return 1 / rate if rate else math.inf


def all_of_it(group: Mapping[str, Any]) -> float:
    """z keeps every step: the carry of the divided gradients is C_z."""
    return 1.0


def averaged_shrinking(step: Step) -> float:
    """Of z by one step."""
    return stepped_rate(step.group) * float(step.group["weight_decay"])
