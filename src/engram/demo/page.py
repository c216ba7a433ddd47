"""The demonstration's page: everything it found, with the digits themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import engram
from engram.demo.digits import Digits
from engram.demo.findings import ClassEffect
from engram.report.effects import effect_of
from engram.report.page import Comparison, Neighbours, PageData
from engram.report.result_page import result_data
from engram.report.training_page import history_curves
from engram.sensitivity.class_removals import ClassRemovals
from engram.tracking.history import History

COMMAND = "make demo"


def demo_page(
    data: Digits,
    result: engram.Result,
    history: History,
    removals: ClassRemovals,
    effects: Sequence[ClassEffect],
    near: Neighbours,
) -> PageData:
    """The result with pictures, the training, and the classes beside what retraining gave."""
    page = result_data(result, ids=_ids(data), classes=_classes(), images=data.inputs.numpy())
    return replace(
        page,
        examples=replace(page.examples, neighbours=near),
        effects=[effect_of(removal, _classes()[label]) for label, removal in removals.items()],
        effects_on="the test data",
        curves=replace(history_curves(history), step_name="epoch"),
        comparisons=_comparisons(effects),
        making=replace(page.making, command=COMMAND),
    )


def _ids(data: Digits) -> list[str]:
    return [f"digit {number}" for number in range(len(data.labels))]


def _classes() -> list[str]:
    names = "zero one two three four five six seven eight nine"
    return names.split()


def _comparisons(effects: Sequence[ClassEffect]) -> list[Comparison]:
    """Of every class that was left out, on its own examples and on the test data."""
    names = [_classes()[effect.label] for effect in effects]
    return [
        Comparison(
            "change of the class's own loss",
            [effect.own_estimated for effect in effects],
            [effect.own_retrained for effect in effects],
            names=names,
        ),
        Comparison(
            "change of the test loss",
            [effect.test_estimated for effect in effects],
            [effect.test_retrained for effect in effects],
            names=names,
        ),
    ]
