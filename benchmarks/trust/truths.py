"""Trained nets and the truth about leaving examples out, kept in a folder between runs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

import engram
from benchmarks.trust.problems import Problem
from engram.engine.prepare import undisturbed
from engram.retraining.open_stack import open_stack
from engram.retraining.quasi_newton import Objective
from engram.retraining.recipes import Newton

NUM_LEFT_OUT = 40
CACHE = Path(__file__).resolve().parent.parent.parent / "build" / "trust"


@dataclass(frozen=True, eq=False)
class Solved:
    """A trained net with its data and the truth about some of them."""

    problem: Problem
    model: nn.Sequential
    data: tuple[Tensor, Tensor]
    truth: engram.Retraining


def solve(problem: Problem, seed: int, cache: Path = CACHE) -> Solved:
    """Train and refit, or read what an earlier run has left."""
    data, model, initial = problem.tensors(seed), problem.net(seed), problem.net(seed)
    digest = hashlib.sha256(f"{problem!r} {seed} {NUM_LEFT_OUT}".encode())
    for tensor in data:
        digest.update(tensor.numpy().tobytes())
    folder = cache / digest.hexdigest()[:16]
    if (folder / "retraining.json").is_file():
        load_model(model, folder / "model.safetensors")
        return Solved(problem, model.eval(), data, engram.Retraining.load(folder))
    if problem.early is None:
        _converge(model, data, problem)
    else:
        _stop_early(model, data, problem, seed)
    truth = _truth(model, initial, data, problem, seed)
    folder.mkdir(parents=True, exist_ok=True)
    save_model(model, folder / "model.safetensors")
    truth.save(folder)
    return Solved(problem, model.eval(), data, truth)


def _converge(model: nn.Module, data: tuple[Tensor, Tensor], problem: Problem) -> None:
    """Full-batch L-BFGS on the sum of the losses plus the regulariser."""
    optimizer = torch.optim.LBFGS(
        model.parameters(),
        max_iter=3000,
        history_size=50,
        tolerance_grad=1e-6,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )
    likelihood = problem.likelihood

    def closure() -> Tensor:
        optimizer.zero_grad()
        outputs = model(data[0])
        targets = likelihood.prepare(outputs.detach(), data[1])
        squares = sum((p**2).sum() for p in model.parameters())
        value: Tensor = likelihood.loss(outputs, targets).sum()
        value = value + 0.5 * problem.prior_precision * squares
        value.backward()
        return value

    optimizer.step(closure)
    optimizer.zero_grad()


def _stop_early(model: nn.Module, data: tuple[Tensor, Tensor], problem: Problem, seed: int) -> None:
    """The recipe of the truth, with nothing left out."""
    assert problem.early is not None
    nothing = torch.empty(0, dtype=torch.long)
    with undisturbed(model):
        stack = open_stack(model, data, problem.likelihood, problem.prior_precision)
        objective = Objective(stack, (nothing,))
        trained = problem.early.train(objective, stack.start[None], seed, lambda count: None)
    parts = stack.layout.unflatten(trained.flat[0])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parts[name])


def _truth(
    model: nn.Module,
    initial: nn.Module,
    data: tuple[Tensor, Tensor],
    problem: Problem,
    seed: int,
) -> engram.Retraining:
    """Converged nets are trained on from where they are, the others from their first weights."""
    early = problem.early
    return engram.retrain(
        model if early is None else initial,
        data,
        _sample(model, data, problem),
        train=early or Newton(iterations=300),
        likelihood=problem.likelihood,
        prior_precision=problem.prior_precision,
        refits=2,
        seed=seed,
        progress=False,
    )


def _sample(model: nn.Module, data: tuple[Tensor, Tensor], problem: Problem) -> Tensor:
    """Evenly over the ranks of the loss, half of it from the highest quarter."""
    with torch.no_grad():
        outputs = model(data[0])
        targets = problem.likelihood.prepare(outputs, data[1])
        order = problem.likelihood.loss(outputs, targets).argsort()
    border = round(0.75 * len(order))
    half = NUM_LEFT_OUT // 2
    strata = (order[:border], order[border:])
    return torch.cat([s[torch.linspace(0, len(s) - 1, half).round().long()] for s in strata])
