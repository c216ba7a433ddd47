"""How sensitivities concentrate on few examples while iBLR trains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from matplotlib.figure import Figure

import engram
from experiments import plotting
from experiments.measures import NOT, PARTLY, REPRODUCED
from experiments.models import make
from experiments.panel import Outcome, Panel, Scale, smoke
from experiments.training import Training, figures_on, fit, make_optimizer
from experiments.workplace import Workplace

GROUPS = 60
TOP = 0.1  # share of the examples whose part in all sensitivity is followed


@dataclass(frozen=True)
class Settings:
    """Data, net, training, and samples of the posterior that a look averages over."""

    data: str
    model: str
    training: Training
    samples: int = 0


def run(settings: Settings, scale: Scale, place: Workplace) -> Outcome:
    data = place.data(settings.data, scale)

    def follow() -> Outcome:
        model = make(settings.model, place.seed)
        optimizer = make_optimizer(model, settings.training, data.num_train)
        tracker = engram.Tracker(
            model,
            optimizer,
            data.train,
            prior_precision=settings.training.prior_precision,
            estimator="linear",
            samples=settings.samples,
        )

        def look(epoch: int) -> None:
            if epoch == 1 or epoch % scale.every == 0 or epoch == scale.epochs:
                tracker.update(step=epoch, diagnostics=False)

        fit(
            model,
            data.train,
            settings.training,
            scale.epochs,
            seed=place.seed,
            optimizer=optimizer,
            after=look,
            progress=place.progress,
        )
        scores = tracker.history.score_matrix()
        steps = [record.step for record in tracker.history]
        tracker.close()
        return Outcome(
            {"steps": steps, "test accuracy": 1 - figures_on(model, data.test)["error"]},
            {"scores": scores.float()},
        )

    found = place.stage("followed", follow)
    return outcome_of(found.arrays["scores"], found.numbers, data.train[0])


def outcome_of(scores: torch.Tensor, numbers: dict[str, object], images: torch.Tensor) -> Outcome:
    """Means over groups of examples, sorted by the last look [T, N], and some images."""
    order = scores[-1].argsort()
    groups = torch.stack([part.mean(1) for part in scores[:, order].chunk(GROUPS, dim=1)], 1)
    count = max(1, round(TOP * scores.shape[1]))
    shares = scores.topk(count, 1).values.sum(1) / scores.sum(1)
    return Outcome(
        {**numbers, "share of the top tenth": [round(float(s), 4) for s in shares]},
        {"groups": groups, "low": images[order[:6]], "high": images[order[-6:]]},
    )


def draw(settings: object, outcome: Outcome) -> Figure:
    figure = Figure(figsize=(6.4, 5.0))
    axes = figure.add_axes((0.12, 0.12, 0.84, 0.5))
    groups, steps = outcome.arrays["groups"], outcome.numbers["steps"]
    chosen = torch.linspace(0, len(steps) - 1, min(4, len(steps))).round().long().unique()
    for number in chosen.tolist():
        values = groups[number] / groups[number].sum()
        axes.plot(range(len(values)), values, label=f"step {steps[number]}")
    axes.set_xlabel("examples in groups, from least to most sensitive at the end")
    axes.set_ylabel("share of all sensitivity")
    axes.legend(frameon=False, fontsize=8)
    plotting.pictures(figure, outcome.arrays["high"], ["high"] * 6, 0.82)
    plotting.pictures(figure, outcome.arrays["low"], ["low"] * 6, 0.64)
    return figure


def held(outcome: Outcome) -> tuple[str, str]:
    shares = outcome.numbers["share of the top tenth"]
    words = f"the top tenth has {shares[0]:.0%} of it at first, {shares[-1]:.0%} at the end"
    if shares[-1] > 1.3 * shares[0]:
        return REPRODUCED, words
    return (PARTLY if shares[-1] > shares[0] else NOT), words


FINDING = (
    "As training goes on, the model becomes sensitive to a smaller and smaller share of the data."
)


def _panel(name: str, figure: str, settings: Settings, paper: Scale, small: Scale) -> Panel:
    title = f"{settings.model} on {settings.data}: sensitivities while iBLR trains"
    scales = {"smoke": smoke(settings.model, epochs=2), "cpu": small, "paper": paper}
    return Panel(name, figure, title, FINDING, settings, scales, run, draw, held)


PANELS = [
    _panel(
        "fig3b",
        "3 (b)",
        Settings("fmnist", "lenet5", Training("iblr", (1e-1, 0.0), 256, 60.0, 0.1)),
        Scale(None, None, 100, every=5),
        Scale(60_000, 10_000, 30, every=6),
    ),
    _panel(
        "fig11b",
        "11 (b)",
        Settings("mnist", "mlp_500_300", Training("iblr", (1e-2, 1e-4), 256, 30.0, 0.1)),
        Scale(None, None, 100, every=5),
        Scale(30_000, 10_000, 20, every=5),
    ),
    _panel(
        "fig11c",
        "11 (c)",
        Settings("cifar10", "resnet20", Training("iblr", (0.2, 0.0), 512, 35.0, 0.01)),
        Scale(None, None, 300, every=15),
        Scale(4000, 2000, 12, every=3, data="cifar10_10k"),
    ),
]
