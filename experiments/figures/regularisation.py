"""Leave-one-out losses over the strength of the regulariser, each net trained from the start."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from matplotlib.figure import Figure

import engram
from experiments import plotting
from experiments.measures import NOT, PARTLY, REPRODUCED, agreement, mean_distance
from experiments.models import make
from experiments.names import net_on
from experiments.panel import Outcome, Panel, Scale, smoke
from experiments.training import Training, figures_on, fit, make_optimizer
from experiments.workplace import Data, Workplace

OURS = "training time"


@dataclass(frozen=True)
class Settings:
    """Data, net, training, the grid's ends and how many neighbours a curve is smoothed over."""

    data: str
    model: str
    training: Training
    strengths: tuple[float, float]
    window: int


def _at(settings: Settings, delta: float, data: Data, scale: Scale, place: Workplace) -> Outcome:
    """At one delta, which is that of as many images as there are; what is kept is the paper's."""
    training = replace(settings.training.on(data, scale), prior_precision=delta)
    model = make(settings.model, place.seed)
    optimizer = make_optimizer(model, training, data.num_train)
    record = engram.record(optimizer, model, checkpoints=2)
    fit(
        model,
        data.train,
        training,
        scale.epochs,
        seed=place.seed,
        optimizer=optimizer,
        progress=place.progress,
        words=f"delta {delta:.3g}",
    )
    found = {
        name: engram.sensitivities(
            model,
            data.train,
            engram.laplace(model, data.train, structure="kronecker", progress=False, **given),
            estimator=estimator,
            diagnostics=False,
            progress=False,
        )
        for name, estimator, given in (
            ("loo", "paper", {"prior_precision": delta}),
            (OURS, "linear", {"training": record}),
        )
    }
    test = figures_on(model, data.test)
    return Outcome(
        {
            "delta": delta / data.share,
            "train": found["loo"].train_nll,
            "loo": found["loo"].loo_nll,
            OURS: found[OURS].loo_nll,
            "test": test["nll"],
            "error": test["error"],
        }
    )


def run(settings: Settings, scale: Scale, place: Workplace) -> Outcome:
    data = place.data(settings.data, scale).standardised()
    first, last = (math.log10(value) for value in settings.strengths)
    grid = torch.logspace(first, last, scale.count, dtype=torch.float64).tolist()
    rows = [
        place.stage(
            f"delta-{number:03d}", lambda d=delta: _at(settings, d * data.share, data, scale, place)
        ).numbers
        for number, delta in enumerate(grid)
    ]
    columns = {
        name: [row[name] for row in rows]
        for name in ("delta", "train", "loo", OURS, "test", "error")
    }
    numbers = {
        "agreement": agreement(columns["test"], columns["loo"]),
        "mean distance": mean_distance(columns["loo"], columns["test"]),
        "best by estimate": columns["delta"][columns["loo"].index(min(columns["loo"]))],
        "best by test": columns["delta"][columns["test"].index(min(columns["test"]))],
        "test loss at the estimate's best": columns["test"][
            columns["loo"].index(min(columns["loo"]))
        ],
        "best test loss": min(columns["test"]),
        OURS: {"mean distance": mean_distance(columns[OURS], columns["test"])},
        "training loss": {"mean distance": mean_distance(columns["train"], columns["test"])},
        "test accuracy": 1 - columns["error"][columns["loo"].index(min(columns["loo"]))],
    }
    return Outcome(numbers, {name: torch.tensor(values) for name, values in columns.items()})


def draw(settings: Settings, outcome: Outcome) -> Figure:
    figure, axes = plotting.panel(net_on(settings.model, settings.data))
    columns = {name: values.tolist() for name, values in outcome.arrays.items()}
    lines = {
        "test loss": plotting.smoothed(columns["test"], settings.window),
        "leave-one-out estimate": plotting.smoothed(columns["loo"], settings.window),
        "leave-one-out, training time": plotting.smoothed(columns[OURS], settings.window),
        "training loss": plotting.smoothed(columns["train"], settings.window),
    }
    plotting.curves(
        axes,
        columns["delta"],
        lines,
        "regulariser $\\delta$ (as of all of the paper's images)",
        "nats per example",
    )
    axes.set_xscale("log")
    plotting.fit_heights(axes, lines)
    beside = axes.twinx()
    beside.plot(columns["delta"], columns["error"], color=plotting.RED, linewidth=0.8, alpha=0.6)
    beside.set_ylabel("test error (red)", fontsize=8)
    return figure


def held(outcome: Outcome) -> tuple[str, str]:
    found = outcome.numbers
    lost = found["test loss at the estimate's best"] / found["best test loss"] - 1
    correlated, far = found["agreement"]["spearman"], found["mean distance"]
    words = f"the estimate is {far:.0%} from the test loss over the grid (the training loss "
    words += f"{found['training loss']['mean distance']:.0%}, with training "
    words += f"time {found[OURS]['mean distance']:.0%}), rank correlation {correlated:.2f}; "
    words += f"at its least the test loss is {lost:.1%} above the best"
    if lost <= LOST and correlated >= RANKED and far <= CLOSE:
        return REPRODUCED, words
    return (PARTLY if lost <= LOST or far <= CLOSE else NOT), words


LOST, RANKED, CLOSE = 0.03, 0.7, 0.15
FINDING = "The estimate nearly lies on the test loss over three orders of magnitude."
CRITERION = (
    f"reproduced where the estimate is on average within {CLOSE:.0%} of the test loss over the "
    f"grid, their rank correlation is at least {RANKED}, and the test loss at the estimate's least "
    f"is at most {LOST:.0%} above the best; partly where one of the first and the last holds"
)


def _panel(letter: str, settings: Settings, paper: Scale, small: Scale) -> Panel:
    title = (
        f"{net_on(settings.model, settings.data)}: leave-one-out over the regulariser, with errors"
    )
    return Panel(
        f"fig4{letter}",
        f"4 ({letter}), 7 ({letter})",
        title,
        FINDING,
        CRITERION,
        settings,
        {"smoke": smoke(settings.model, epochs=2, count=2), "cpu": small, "paper": paper},
        run,
        draw,
        held,
    )


PANELS = [
    _panel(
        "a",
        Settings("mnist", "mlp_500_300", Training("sgd", (1e-2, 1e-3), 256, 1.0), (1.0, 1000.0), 3),
        Scale(None, None, 500, count=96),
        Scale(10_000, 10_000, 60, count=4, batch=64, faster=3.0),
    ),
    _panel(
        "b",
        Settings("fmnist", "lenet5", Training("adam", (1e-3, 1e-5), 256, 1.0), (10.0, 1000.0), 5),
        Scale(None, None, 300, count=96),
        Scale(16_000, 10_000, 8, count=4, batch=32, faster=3.0),
    ),
    _panel(
        "c",
        Settings("cifar10", "cnn", Training("adamw", (1e-3, 1e-5), 512, 1.0), (10.0, 1000.0), 3),
        Scale(None, None, 150, count=30),
        Scale(1000, 2000, 20, count=4, batch=32, data="cifar10_10k"),
    ),
]
