r"""The posterior that an optimizer already holds: its preconditioner is a precision.

Every optimizer of the Bayesian-learning-rule family steps by :math:`S_t^{-1} \nabla`, so its own
state gives S_t, with no pass over the data:

==========================  =======================================  ==========================
optimizer                   state used                               precision S
==========================  =======================================  ==========================
SGD                         none                                     identity
RMSprop                     ``square_avg`` (minus ``grad_avg`` ^ 2   N sqrt(s) + delta
                            where centered)
Adam, AdamW, NAdam, RAdam   ``exp_avg_sq`` (``max_exp_avg_sq`` with  N sqrt(s_hat) + delta,
                            AMSGrad)                                 s_hat = s / (1 - beta2^t)
Adamax                      ``exp_inf``                              N u + delta
Adagrad                     ``sum``                                  N sqrt(sum / t) + delta
IVON                        ``hess``                                 ess (h + weight decay)
==========================  =======================================  ==========================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engram.errors import ArgumentError, ModelMismatchError, PosteriorError
from engram.parameters import trainable
from engram.posteriors.blocks import diagonal_block
from engram.posteriors.gaussian import Posterior, check_prior_precision


@dataclass(frozen=True)
class Reading:
    """What an adapter sees of one parameter: its group's settings, its state, scale and delta."""

    parameter: Tensor
    group: Mapping[str, Any]
    state: Mapping[str, Any]
    scale: float  # N for a loss averaged over the batch, N / batch size for a sum
    prior_precision: float

    def scaled(self, root: Tensor) -> Tensor:
        """N root + delta, for gradients of the mean loss."""
        return self.scale * root + self.prior_precision


Adapter = Callable[[Reading], Tensor]


def _steps(reading: Reading) -> float:
    return float(reading.state["step"])


def _identity(reading: Reading) -> Tensor:
    return torch.ones_like(reading.parameter)


def _rmsprop(reading: Reading) -> Tensor:
    square = reading.state["square_avg"]
    if reading.group.get("centered"):
        square = (square - reading.state["grad_avg"] ** 2).clamp(min=0)
    return reading.scaled(square.sqrt())


def _adam(reading: Reading) -> Tensor:
    name = "max_exp_avg_sq" if reading.group.get("amsgrad") else "exp_avg_sq"
    correction = 1 - reading.group["betas"][1] ** _steps(reading)
    return reading.scaled((reading.state[name] / correction).sqrt())


def _adamax(reading: Reading) -> Tensor:
    return reading.scaled(reading.state["exp_inf"])


def _adagrad(reading: Reading) -> Tensor:
    return reading.scaled((reading.state["sum"] / _steps(reading)).sqrt())


ADAPTERS: dict[str, Adapter] = {
    "SGD": _identity,
    "RMSprop": _rmsprop,
    "Adam": _adam,
    "AdamW": _adam,
    "NAdam": _adam,
    "RAdam": _adam,
    "Adamax": _adamax,
    "Adagrad": _adagrad,
}


def register(name: str, adapter: Adapter) -> None:
    """Teach :func:`posterior_of` another optimizer, by the name of its class."""
    ADAPTERS[name] = adapter


def posterior_of(
    optimizer: Optimizer,
    model: nn.Module,
    *,
    num_data: int,
    prior_precision: float | None = None,
    reduction: str = "mean",
    batch_size: int | None = None,
) -> Posterior:
    r"""The Gaussian posterior in an optimizer's state, at the model's present weights.

    Args:
        optimizer: after at least one step.
        model: whose parameters it trains.
        num_data: N, the number of training examples.
        prior_precision: delta; if not given, what the optimizer's weight decay means: N times it
            for a loss averaged over the batch, N / batch_size times it for a sum.
        reduction: of the training loss over a batch, ``mean`` or ``sum``.
        batch_size: of training; needed for ``sum`` only.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters(), weight_decay=0.01)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> _ = optimizer.step()
        >>> posterior_of(optimizer, model, num_data=100)
        Posterior(Adam, 3 parameters, N=100, prior_precision=1)
    """
    if reduction not in ("mean", "sum"):
        raise ArgumentError('reduction "mean" or "sum"', repr(reduction), "see your loss function")
    if num_data < 1:
        raise ArgumentError("num_data of at least 1", repr(num_data), "count the training examples")
    if reduction == "sum" and not batch_size:
        raise ArgumentError(
            'the training batch_size with reduction="sum"', "none", "pass batch_size"
        )
    scale = num_data / (batch_size or 1) if reduction == "sum" else float(num_data)
    parameters = trainable(model)
    _check_owner(optimizer, parameters)
    used = _prior(optimizer, scale, prior_precision)
    found = dict(_precisions(optimizer, parameters, scale, used))
    blocks = tuple(diagonal_block(n, found[n].detach()) for n in parameters if n in found)
    mean = {name: p.detach().clone() for name, p in parameters.items()}
    name = type(optimizer).__name__
    fixed = [n for n in parameters if n not in found]
    settings = {
        "method": "optimizer",
        "optimizer": name,
        "prior_from": "argument" if prior_precision is not None else "weight decay",
        "not_stepped": fixed,
    }
    return Posterior(name, mean, blocks, used, num_data, settings)


def _check_owner(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> None:
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not own & {id(p) for p in parameters.values()}:
        raise ModelMismatchError(
            "an optimizer of this model's parameters",
            f"a {type(optimizer).__name__} that trains none of them",
            "pass the optimizer that was made with model.parameters()",
        )


def _prior(optimizer: Optimizer, scale: float, prior_precision: float | None) -> float:
    if prior_precision is not None:
        return check_prior_precision(prior_precision)
    decays = {float(group.get("weight_decay", 0.0)) for group in optimizer.param_groups}
    if len(decays) > 1 or not max(decays) > 0:
        raise ArgumentError(
            "a prior_precision, or one positive weight decay to take it from",
            f"weight decays {sorted(decays)}",
            "pass prior_precision (num_data times the weight decay of the mean loss)",
        )
    return check_prior_precision(decays.pop() * scale)


def _precisions(
    optimizer: Optimizer, parameters: Mapping[str, Tensor], scale: float, delta: float
) -> Iterator[tuple[str, Tensor]]:
    """Name and precision of every parameter that has been stepped."""
    if type(optimizer).__name__ == "IVON":
        yield from _ivon(optimizer, parameters)
        return
    adapter = _adapter(optimizer)
    names = {id(p): name for name, p in parameters.items()}
    stepped = False
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if id(parameter) not in names or (not state and adapter is not _identity):
                continue
            stepped = True
            reading = Reading(parameter.detach(), group, state, scale, delta)
            yield names[id(parameter)], adapter(reading)
    if not stepped:
        raise PosteriorError(
            "an optimizer that has taken a step", "one without state", "call it after training"
        )


def _adapter(optimizer: Optimizer) -> Adapter:
    for base in type(optimizer).__mro__:
        if base.__name__ in ADAPTERS:
            return ADAPTERS[base.__name__]
    raise PosteriorError(
        f"one of {', '.join(ADAPTERS)}, IVON, or a registered optimizer",
        type(optimizer).__name__,
        "teach it with engram.posteriors.optimizers.register(name, adapter)",
    )


def _ivon(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """ess (h + weight decay); IVON keeps one flat Hessian per group, frozen parameters included."""
    names = {id(p): name for name, p in parameters.items()}
    if not getattr(optimizer, "current_step", 0):
        raise PosteriorError(
            "an optimizer that has taken a step", "IVON at step 0", "call it after training"
        )
    for group in optimizer.param_groups:
        sizes = [p.numel() for p in group["params"]]
        parts = group["hess"].split(sizes)
        for parameter, part in zip(group["params"], parts, strict=True):
            if id(parameter) in names:
                precision = group["ess"] * (part + group["weight_decay"])
                yield names[id(parameter)], precision.reshape(parameter.shape)
