"""What is asked of every posterior of a problem, and the answers by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import engram
from golden.posteriors import ASKED_MORE, makers
from golden.problems import Problem

ESTIMATORS = ("linear", "corrected", "iterated", "paper")
FITTING = {"newton": ("default", "hessian"), "downdated": ("kronecker",)}
"""Rules for some posteriors only, and words in the names of these; others refuse them."""
COLUMNS = ("deviation", "score", "loo_loss", "leverage")
GROUPS: dict[str, dict[str, Any]] = {
    "one": {"indices": [2]},
    "three": {"indices": [0, 3, 4]},
    "reweighted": {"indices": [1, 2], "weights": [0.5, -1.0]},
}
ASKED = (*((group, "displaced", "auto") for group in GROUPS), ("three", "linearised", "auto"))
BY_NAME = tuple(("three", "displaced", name) for name in ("linear", "corrected", "paper"))


@dataclass
class Record:
    """Numbers and words by name: ``posterior/variant/quantity`` and ``posterior/variant``."""

    numbers: dict[str, Tensor] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)

    def attempt(self, name: str, ask: Callable[[], None]) -> None:
        """Ask; a refusal is a fact to keep, by the type of its error."""
        try:
            ask()
        except Exception as error:
            self.words[name] = f"refused: {type(error).__name__}"

    def result(self, name: str, result: engram.Result) -> None:
        """The columns of a result, and its verdict in words."""
        for column in COLUMNS:
            self.numbers[f"{name}/{column}"] = getattr(result, column)
        reasons = sorted(f"{r.signal} {r.level}" for r in result.verdict.reasons)
        levels = "".join(map(str, result.verdict.levels.tolist()))
        flagged = "".join(map(str, result.flagged.long().tolist()))
        self.words[name] = f"{result.verdict.level} ({', '.join(reasons)}), {levels}, {flagged}"

    def removal(self, name: str, removal: engram.Removal) -> None:
        """Losses without the group, of itself and of other data, and the size of the step."""
        self.numbers[f"{name}/loss_without"] = removal.group.loss_without
        if removal.evaluation is not None:
            self.numbers[f"{name}/evaluation"] = removal.evaluation.loss_without
        if removal.delta is not None:
            flat = torch.cat([value.reshape(-1) for value in removal.delta.values()])
            self.numbers[f"{name}/step"] = torch.stack([flat.norm(), flat.abs().sum()])
        self.words[name] = f"flagged {removal.flagged}"


def record_of(problem: Problem) -> Record:
    """Everything that is asked of a problem."""
    record = Record()
    for name, make in makers(problem).items():
        record.attempt(name, lambda name=name, make=make: _ask(record, problem, name, *make()))
    return record


def _fitting(problem: Problem, name: str) -> list[str]:
    """The rules of this posterior's kind; that the others refuse it is pinned on a few problems."""
    everything = problem.name in ASKED_MORE
    return [
        rule for rule, words in FITTING.items() if everything or any(word in name for word in words)
    ]


def _ask(record: Record, problem: Problem, name: str, model: nn.Module, posterior: Any) -> None:
    given = {"progress": False}
    record.words[name] = posterior.structure

    def sensitivities(variant: str, estimator: str) -> None:
        result = engram.sensitivities(model, problem.data, posterior, estimator=estimator, **given)
        record.result(f"{name}/{variant}", result)
        if estimator == "auto":
            record.words[f"{name}/estimator"] = result.basis.estimator

    def remove(variant: str, group: str, at: str, estimator: str) -> None:
        evaluate_on = None if estimator == "paper" else problem.test_data
        settings = {**GROUPS[group], **given, "at": at, "estimator": estimator}
        removal = engram.remove(model, problem.data, posterior, evaluate_on=evaluate_on, **settings)
        record.removal(f"{name}/{variant}", removal)
        if estimator == "auto":
            record.words[f"{name}/removal"] = removal.estimator

    def influence() -> None:
        values = engram.influence(model, problem.data, problem.test_data, posterior, **given)
        record.numbers[f"{name}/pairs/influence"] = values

    def variance() -> None:
        values = engram.prediction_variance(model, problem.test_data, posterior, progress=False)
        record.numbers[f"{name}/pairs/variance"] = values

    record.attempt(f"{name}/default", lambda: sensitivities("default", "auto"))
    for estimator in (*ESTIMATORS, *_fitting(problem, name)):
        if estimator != record.words.get(f"{name}/estimator"):  # the default stands for it
            record.attempt(f"{name}/{estimator}", lambda e=estimator: sensitivities(e, e))
    for group, at, estimator in ASKED + BY_NAME * (problem.name in ASKED_MORE):
        if estimator == record.words.get(f"{name}/removal"):
            continue
        variant = f"{group} {at} {'default' if estimator == 'auto' else estimator}"
        ask = (variant, group, at, estimator)
        record.attempt(f"{name}/{variant}", lambda ask=ask: remove(*ask))
    record.attempt(f"{name}/influence", influence)
    record.attempt(f"{name}/variance", variance)
