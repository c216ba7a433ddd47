"""Every posterior that a problem is asked about, by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import ivon
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import engram
from engram import optimizers as own
from golden.problems import NUM_DATA, Problem

Pair = tuple[nn.Module, Any]
STRUCTURES = ("isotropic", "diagonal", "kronecker", "ekfac", "low_rank", "full", "last_layer")
FITTED = {
    "default": {},
    **{f"{name} ggn": {"structure": name, "curvature": "ggn"} for name in STRUCTURES},
    # those without a Hessian are refused, which is pinned for one of them
    **{
        f"{name} hessian": {"structure": name, "curvature": "hessian"}
        for name in ("low_rank", "full", "last_layer", "kronecker")
    },
    "kronecker empirical": {"structure": "kronecker", "curvature": "empirical"},
}
STEPS, RATE, DECAY = 3, 1e-3, 0.5

Maker = Callable[[Any], Optimizer]
OPTIMIZERS: dict[str, Maker] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=RATE, weight_decay=DECAY),
    "SGD": lambda p: torch.optim.SGD(p, lr=RATE, weight_decay=DECAY),
}
MORE_OPTIMIZERS: dict[str, Maker] = {
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=RATE, weight_decay=DECAY),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=RATE, weight_decay=DECAY),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=RATE, weight_decay=DECAY),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=RATE, momentum=0.9, weight_decay=DECAY),
    "IVON": lambda p: ivon.IVON(p, lr=RATE, ess=NUM_DATA, weight_decay=DECAY),
}
ASKED_MORE = ("mlp", "mlp_gaussian", "layer_norm")
"""Problems that every optimizer is read on, and asked by every rule; the others by what fits."""


def own_optimizers(problem: Problem) -> dict[str, Maker]:
    """The optimizers that hold their posterior; VON draws its samples from a seed of its own."""
    given = {"num_data": NUM_DATA, "prior_precision": problem.prior_precision, "lr": 0.1}
    exact = own.GaussNewton(problem.likelihood)
    return {
        "Newton": lambda p: own.Newton(p, **given, curvature=exact),
        "Newton hessian": lambda p: own.Newton(p, **given),
        "OnlineNewton": lambda p: own.OnlineNewton(p, **given, curvature=exact),
        "DiagonalOnlineNewton": lambda p: own.DiagonalOnlineNewton(p, **given, curvature=exact),
        "VON": lambda p: own.VON(p, **given, samples=2, curvature=exact),
        "DiagonalVON": lambda p: own.DiagonalVON(p, **given, samples=2, curvature=exact),
    }


def makers(problem: Problem) -> dict[str, Callable[[], Pair]]:
    """By name, what gives a model and a posterior of it."""
    asked = dict(OPTIMIZERS)
    if problem.name in ASKED_MORE:
        asked |= MORE_OPTIMIZERS | own_optimizers(problem)
    return {
        **{name: _fitting(problem, settings) for name, settings in FITTED.items()},
        **{name: _stepping(problem, make) for name, make in asked.items()},
    }


def _fitting(problem: Problem, settings: dict[str, Any]) -> Callable[[], Pair]:
    def fit() -> Pair:
        posterior = engram.laplace(
            problem.model,
            problem.data,
            likelihood=problem.likelihood,
            prior_precision=problem.prior_precision,
            progress=False,
            **settings,
        )
        return problem.model, posterior

    return fit


def _stepping(problem: Problem, make: Maker) -> Callable[[], Pair]:
    def step() -> Pair:
        model = copy.deepcopy(problem.model)
        optimizer = make([p for p in model.parameters() if p.requires_grad])
        with torch.random.fork_rng():
            torch.manual_seed(0)
            for _ in range(STEPS):
                _step(problem, model, optimizer)
        return model, engram.posterior_of(
            optimizer, model, num_data=NUM_DATA, likelihood=problem.likelihood
        )

    return step


def _step(problem: Problem, model: nn.Module, optimizer: Any) -> None:
    inputs, targets = problem.data

    def mean_loss() -> Tensor:
        outputs = model(inputs).reshape(NUM_DATA, -1)
        prepared = problem.likelihood.prepare(outputs.detach(), targets)
        loss: Tensor = problem.likelihood.loss(outputs, prepared).mean()
        return loss

    if isinstance(getattr(optimizer, "curvature", None), own.GaussNewton):
        optimizer.step(lambda: (model(inputs).reshape(NUM_DATA, -1), targets))
    elif isinstance(optimizer, own.Newton):
        optimizer.step(mean_loss)
    else:
        optimizer.zero_grad()
        if isinstance(optimizer, ivon.IVON):
            with optimizer.sampled_params(train=True):
                mean_loss().backward()
        else:
            mean_loss().backward()
        optimizer.step()
