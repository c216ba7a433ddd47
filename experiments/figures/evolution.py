"""How sensitivities concentrate on few examples while iBLR trains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from matplotlib.figure import Figure

import engram
from experiments import plotting
from experiments.measures import NOT, PARTLY, REPRODUCED, top_share
from experiments.models import make
from experiments.names import net_on
from experiments.panel import Outcome, Panel, Scale, smoke
from experiments.training import Training, figures_on, fit, make_optimizer
from experiments.workplace import Workplace

GROUPS = 60
LOOKS = 4
SHOWN = 8


@dataclass(frozen=True)
class Settings:
    """Data, net and training."""

    data: str
    model: str
    training: Training


def run(settings: Settings, scale: Scale, place: Workplace) -> Outcome:
    raw = place.data(settings.data, scale)
    data, looks = raw.standardised(), _looks(scale.epochs)
    training = settings.training.on(data, scale)

    def follow() -> Outcome:
        model = make(settings.model, place.seed)
        optimizer = make_optimizer(model, training, data.num_train)
        tracker = engram.Tracker(
            model,
            optimizer,
            data.train,
            prior_precision=training.prior_precision,
            estimator="linear",
            samples=scale.count,
            expectation="deviation",
            examples=scale.looked,
        )

        def look(epoch: int) -> None:
            if epoch in looks:
                tracker.update(step=epoch, diagnostics=False)

        fit(
            model,
            data.train,
            training,
            scale.epochs,
            seed=place.seed,
            optimizer=optimizer,
            after=look,
            progress=place.progress,
        )
        return followed(tracker, figures_on(model, data.test)["error"])

    found = place.stage("followed", follow)
    return outcome_of(found, raw.train[0], "epoch")


def _looks(epochs: int) -> list[int]:
    """From the first epoch to the last, at equal ratios."""
    return sorted({round(epochs ** (number / (LOOKS - 1))) for number in range(LOOKS)})


def followed(tracker: engram.Tracker, error: float) -> Outcome:
    """What a tracker that has ended kept of the examples it looked at."""
    scores = tracker.history.score_matrix()
    looked = (~scores[0].isnan()).nonzero()[:, 0]
    steps = [record.step for record in tracker.history]
    tracker.close()
    return Outcome(
        {"steps": steps, "test accuracy": 1 - error},
        {"scores": scores[:, looked].float(), "looked": looked},
    )


def outcome_of(found: Outcome, images: torch.Tensor, unit: str) -> Outcome:
    """Means over groups of examples, sorted by the last look, and some images."""
    scores, images = found.arrays["scores"], images[found.arrays["looked"]]
    order = scores[-1].argsort()
    parts = scores[:, order].tensor_split(min(GROUPS, len(order)), dim=1)
    groups = torch.stack([part.mean(1) for part in parts], 1)
    shares = [round(top_share(row), 4) for row in scores]
    return Outcome(
        {**found.numbers, "unit": unit, "share of the top tenth": shares},
        {"groups": groups, "low": images[order[:SHOWN]], "high": images[order[-SHOWN:]]},
    )


def draw(settings: object, outcome: Outcome) -> Figure:
    figure = Figure(figsize=(6.4, 5.6), layout="constrained")
    grid = figure.add_gridspec(3, SHOWN, height_ratios=(1, 1, 2.6))
    for row, (name, words) in enumerate((("high", "most sensitive"), ("low", "least sensitive"))):
        for place, image in enumerate(outcome.arrays[name]):
            above = f"{words} at the end" if not place else ""
            plotting.picture(figure.add_subplot(grid[row, place]), image, above)
    axes = figure.add_subplot(grid[2, :])
    groups, steps = outcome.arrays["groups"], outcome.numbers["steps"]
    for number, step in enumerate(steps):
        values = groups[number] / groups[number].sum()
        axes.plot(range(len(values)), values, label=f"{outcome.numbers['unit']} {step}")
    axes.set_xlabel(
        f"{groups.shape[1]} groups of examples, from least to most sensitive at the end"
    )
    axes.set_ylabel("share of all sensitivity")
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def held(outcome: Outcome) -> tuple[str, str]:
    shares = outcome.numbers["share of the top tenth"]
    words = f"the top tenth has {shares[0]:.0%} of it at first, {shares[-1]:.0%} at the end"
    if shares[-1] >= GROWN * shares[0]:
        return REPRODUCED, words
    return (PARTLY if shares[-1] > shares[0] else NOT), words


GROWN = 1.3
FINDING = (
    "As training goes on, the model becomes sensitive to a smaller and smaller share of the data."
)
CRITERION = (
    "reproduced where the share of all sensitivity that the top tenth of the examples has grows "
    f"at least {GROWN} times from the first look to the last, partly where it grows; only shares "
    "are compared, as in the paper"
)


def _panel(name: str, figure: str, settings: Settings, paper: Scale, small: Scale) -> Panel:
    title = f"{net_on(settings.model, settings.data)}: sensitivities while iBLR trains"
    scales = {"smoke": smoke(settings.model, epochs=2, count=2), "cpu": small, "paper": paper}
    return Panel(name, figure, title, FINDING, CRITERION, settings, scales, run, draw, held)


PANELS = [
    _panel(
        "fig3b",
        "3 (b)",
        Settings("fmnist", "lenet5", Training("iblr", (1e-1, 0.0), 256, 60.0, 0.1)),
        Scale(None, None, 100, count=150),
        Scale(10_000, 10_000, 20, count=5, looked=1200, faster=8.0),
    ),
    _panel(
        "fig11b",
        "11 (b)",
        Settings("mnist", "mlp_500_300", Training("iblr", (1e-1, 0.0), 256, 30.0, 0.1)),
        Scale(None, None, 100, count=150),
        Scale(10_000, 10_000, 20, count=5, looked=1200, faster=8.0),
    ),
    _panel(
        "fig11c",
        "11 (c)",
        Settings("cifar10", "resnet20", Training("iblr", (1e-1, 0.0), 512, 35.0, 0.1)),
        Scale(None, None, 300, count=150),
        Scale(
            3000,
            2000,
            8,
            count=3,
            batch=50,
            looked=200,
            faster=4.0,
            hessian_start=0.5,
            data="cifar10_10k",
        ),
    ),
]
