r"""Adafactor: squares of gradients as a product of row and column means.

.. math:: v = \frac{r c'}{\bar r}, \qquad
    \theta \leftarrow \theta - \frac{\alpha_t}{\max(1, \mathrm{rms}(u) / d)}\, u, \qquad
    u = g / \sqrt{v}

:math:`\alpha` is relative to the size of the parameter. Both torch's and transformers' Adafactor
are read; they differ in the names of their settings and state, in where their eps stands, and in
whether weight decay has the learning rate or :math:`\alpha`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engram.training.step_rules import Step, rate_of, rms, shrinking

FASTEST = 1e-2  # of transformers' own schedule, relative to the parameter; and while it warms up:
WARMING = 1e-6  # times the steps


def is_torchs(group: Mapping[str, Any]) -> bool:
    """Whether these are the settings of torch's Adafactor, not transformers'."""
    return "beta2_decay" in group


def root_of_factors(group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor:
    """sqrt(v), no smaller than torch's first eps; transformers' is in the averages already."""
    if not is_torchs(group):
        return _transformers_square(state).sqrt()
    if "variance" in state:
        square = state["variance"]
    else:
        rows, columns = state["row_var"], state["col_var"]
        square = rows @ columns / rows.mean(dim=-2, keepdim=True).clamp(min=_eps(group, rows))
    return square.sqrt().clamp_(min=_eps(group, square))


def _transformers_square(state: Mapping[str, Any]) -> Tensor:
    if "exp_avg_sq" in state:
        found: Tensor = state["exp_avg_sq"]
        return found
    rows, columns = state["exp_avg_sq_row"], state["exp_avg_sq_col"]
    return (rows / rows.mean(dim=-1, keepdim=True))[..., None] * columns[..., None, :]


def _eps(group: Mapping[str, Any], like: Tensor) -> float:
    given = group["eps"][0]
    return torch.finfo(like.dtype).eps if given is None else float(given)


def adafactor_rate(step: Step) -> float:
    """alpha: at most 1 / sqrt(t), times the parameter's root mean square where it is relative.

    torch's is taken of the weights after the step, which is within a learning rate of before.
    """
    group = step.group
    if is_torchs(group):
        size = max(float(group["eps"][1]), float(rms(step.parameter.detach())))
        return min(rate_of(step), step.number**-0.5) * size
    rate = 0.0 if group["lr"] is None else float(group["lr"])
    if group["relative_step"]:
        most = WARMING * step.number if group["warmup_init"] else FASTEST
        rate = min(most, step.number**-0.5)
    relative = max(float(group["eps"][1]), float(step.state["RMS"]))
    return rate * relative if group["scale_parameter"] else rate


def adafactor_root(step: Step) -> Tensor:
    """sqrt(v), times what the update is larger than d."""
    root = root_of_factors(step.group, step.state)
    if step.parameter.grad is None:
        return root
    most = float(step.group["d" if is_torchs(step.group) else "clip_threshold"])
    return root.mul_(max(1.0, float(rms(step.parameter.grad / root)) / most))


def adafactor_weight(step: Step, memory: float, share: float) -> tuple[float, float]:
    """1; with transformers' beta1, what is new of the average of divided gradients."""
    return memory, share * (1 - adafactor_momentum(step.group))


def adafactor_momentum(group: Mapping[str, Any]) -> float:
    """beta1 of transformers' Adafactor, 0 without."""
    return float(group.get("beta1") or 0.0)


def adafactor_shrinking(step: Step) -> float:
    """torch decays by its learning rate, transformers by alpha."""
    if is_torchs(step.group):
        return shrinking(step)
    return adafactor_rate(step) * float(step.group["weight_decay"])
