"""Trained nets and the truth about leaving examples out, kept in a folder between runs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

import engram
from benchmarks.left_out import spread_over, stop_early
from benchmarks.trust.problems import Problem
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
        return Solved(problem, model.eval(), data, engram.load(folder))
    if problem.early is None:
        _converge(model, data, problem)
    else:
        delta = problem.prior_precision
        stop_early(model, data, problem.likelihood, delta, problem.early, seed)
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
    with torch.no_grad():
        outputs = model(data[0])
        targets = problem.likelihood.prepare(outputs, data[1])
        losses = problem.likelihood.loss(outputs, targets)
    return spread_over(losses, NUM_LEFT_OUT)
