"""Bayesian logistic regression on MNIST with VON, sensitivities over samples of its posterior."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR

import engram
from engram.optimizers import DiagonalVON, GaussNewton
from experiments.figures.evolution import CRITERION, draw, followed, held, outcome_of
from experiments.models import make
from experiments.panel import Outcome, Panel, Scale
from experiments.training import figures_on
from experiments.workplace import Workplace


@dataclass(frozen=True)
class Settings:
    """The paper's VON; its start is not stated, and chosen on held-out images (docs/results)."""

    prior_precision: float = 0.1
    batch_size: int = 200
    rates: tuple[float, float] = (0.005, 0.001)
    precision_rate: float = 1e-5
    samples: int = 3
    samples_at_looks: int = 150
    looks: tuple[int, ...] = (5, 10, 25, 125)
    start: float = 0.002


def run(settings: Settings, scale: Scale, place: Workplace) -> Outcome:
    data = place.data("mnist", scale)
    updates = min(settings.looks[-1], scale.epochs)

    def follow() -> Outcome:
        inputs, targets = data.train
        model = make("logistic", place.seed)
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        optimizer = DiagonalVON(
            model.parameters(),
            num_data=data.num_train,
            prior_precision=settings.prior_precision,
            lr=settings.rates[0],
            precision_lr=settings.precision_rate,
            initial_precision=settings.start * data.num_train,
            samples=settings.samples,
            seed=place.seed,
            curvature=GaussNewton("categorical", 1),
        )
        share = settings.rates[1] / settings.rates[0]
        schedule = LinearLR(optimizer, 1.0, share, max(1, updates - 1))
        tracker = engram.Tracker(
            model,
            optimizer,
            data.train,
            prior_precision=settings.prior_precision,
            estimator="linear",
            samples=scale.count,
            expectation="deviation",
            examples=scale.looked,
        )
        generator = place.generator()
        for number in range(1, updates + 1):
            chosen = torch.randint(data.num_train, (settings.batch_size,), generator=generator)
            optimizer.step(lambda c=chosen: (model(inputs[c]), targets[c]))
            schedule.step()
            if number in settings.looks or number == updates:
                tracker.update(step=number, diagnostics=False)
        return followed(tracker, figures_on(model, data.test)["error"])

    found = place.stage("followed", follow)
    return outcome_of(found, data.train[0], "update")


FINDING = (
    "At 125 updates with samples from the posterior, sensitivity has moved to few examples; the "
    "mean reaches an accuracy of about 91 %."
)
PANELS = [
    Panel(
        "fig11a",
        "11 (a)",
        "MNIST, Bayesian logistic regression with VON",
        FINDING,
        CRITERION,
        Settings(),
        {
            "smoke": Scale(120, 60, 12, count=3, data="digits"),
            "cpu": Scale(6000, 10_000, 125, count=150),
            "paper": Scale(None, None, 125, count=150),
        },
        run,
        draw,
        held,
    )
]
