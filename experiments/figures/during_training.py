"""Test losses predicted during training: iBLR, SGD and AdamW with fitted curvature, Adam, h_0."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from matplotlib.figure import Figure

import engram
from experiments import plotting
from experiments.measures import NOT, PARTLY, REPRODUCED, agreement, mean_distance
from experiments.models import make
from experiments.panel import Outcome, Panel, Scale, smoke
from experiments.training import Training, figures_on, fit, make_optimizer
from experiments.workplace import Data, Workplace

OURS = "training time"
CLOSE, NEAR = 0.15, 0.4  # mean distance from the test loss, of a good match and of a trend


@dataclass(frozen=True)
class Settings:
    """One training and what is followed.

    Args:
        data, model, training: what is trained.
        posterior: ``optimizer``, or the structure that is fitted at every look.
        second_moment: of Adam: as the paper's table has it.
        good: whether the paper finds a good match here, or shows that there is none.
        starts: h_0 of iBLR to choose from; one training each.
    """

    data: str
    model: str
    training: Training
    posterior: str = "optimizer"
    second_moment: str = "batch"
    good: bool = True
    starts: tuple[float, ...] = ()


def _followed(settings: Settings, data: Data, scale: Scale, place: Workplace) -> Outcome:
    """Losses, estimates and errors at every look."""
    model, training = make(settings.model, place.seed), settings.training
    optimizer = make_optimizer(model, training, data.num_train)
    record = engram.record(optimizer, model, checkpoints=2)
    tracker = engram.Tracker(
        model,
        optimizer,
        data.train,
        prior_precision=training.prior_precision,
        posterior=settings.posterior,
        estimator="linear",
        training_batch_size=training.batch_size,
        second_moment=settings.second_moment,
    )
    rows: dict[str, list[float]] = {
        n: [] for n in ("epoch", "train", "estimate", OURS, "test", "error")
    }

    def look(epoch: int) -> None:
        if epoch > 1 and epoch % scale.every:
            return
        result = tracker.update(step=epoch, diagnostics=False)
        test = figures_on(model, data.test)
        fitted = engram.laplace(
            model,
            data.train,
            training=record,
            structure="kronecker",
            curvature="fisher",
            progress=False,
        )
        ours = engram.sensitivities(
            model, data.train, fitted, estimator="linear", diagnostics=False, progress=False
        )
        values = (epoch, result.train_nll, result.loo_nll, ours.loo_nll, test["nll"], test["error"])
        for name, value in zip(rows, values, strict=True):
            rows[name].append(float(value))

    fit(
        model,
        data.train,
        training,
        scale.epochs,
        seed=place.seed,
        optimizer=optimizer,
        after=look,
        progress=place.progress,
        words=f"{settings.model} on {settings.data}, {training.optimizer}",
    )
    tracker.close()
    return Outcome({}, {name: torch.tensor(values) for name, values in rows.items()})


def run(settings: Settings, scale: Scale, place: Workplace) -> Outcome:
    data = place.data(settings.data, scale)
    if settings.starts:
        return _chosen_start(settings, data, scale, place)
    found = place.stage("followed", lambda: _followed(settings, data, scale, place))
    return Outcome(_numbers(found), found.arrays)


def _numbers(found: Outcome) -> dict[str, object]:
    columns = {name: values.tolist() for name, values in found.arrays.items()}
    return {
        "estimate": {
            "mean distance": mean_distance(columns["estimate"], columns["test"]),
            **agreement(columns["test"], columns["estimate"]),
        },
        OURS: {
            "mean distance": mean_distance(columns[OURS], columns["test"]),
            **agreement(columns["test"], columns[OURS]),
        },
        "test accuracy": 1 - columns["error"][-1],
    }


def _chosen_start(settings: Settings, data: Data, scale: Scale, place: Workplace) -> Outcome:
    """One training for every h_0, and the one whose estimate is nearest to the test loss."""
    numbers: dict[str, object] = {}
    arrays = {}
    for start in settings.starts:
        own = replace(settings, training=replace(settings.training, hessian_start=start))
        found = place.stage(f"h0-{start}", lambda s=own: _followed(s, data, scale, place))
        numbers[f"h0 {start}"] = _numbers(found)["estimate"]
        arrays |= {f"{name} {start}": found.arrays[name] for name in ("estimate", "test")}
        arrays["epoch"] = found.arrays["epoch"]
    return Outcome(numbers, arrays)


def draw(settings: Settings, outcome: Outcome) -> Figure:
    words = f"{settings.model} on {settings.data}, {settings.training.optimizer}"
    figure, axes = plotting.panel(words)
    columns = {name: values.tolist() for name, values in outcome.arrays.items()}
    epochs = columns.pop("epoch")
    if settings.starts:
        lines = {"test": columns[f"test {settings.starts[0]}"]}
        lines |= {f"$h_0$ = {s}": columns[f"estimate {s}"] for s in settings.starts}
    else:
        lines = {
            "test loss": columns["test"],
            f"leave-one-out, {settings.posterior}": columns["estimate"],
            f"leave-one-out, {OURS}": columns[OURS],
            "training loss": columns["train"],
        }
    plotting.curves(axes, epochs, lines, "epoch", "nats per example")
    axes.set_ylim(0, 2.5 * max(lines[next(iter(lines))]))
    return figure


def _held(settings: Settings, outcome: Outcome) -> tuple[str, str]:
    if settings.starts:
        best = min(row["mean distance"] for row in outcome.numbers.values())
        level = REPRODUCED if best <= CLOSE else PARTLY if best <= NEAR else NOT
        return level, f"the best start is {best:.0%} from the test loss"
    far = outcome.numbers["estimate"]["mean distance"]
    words = f"the estimate is {far:.0%} from the test loss; with training time "
    words += f"{outcome.numbers[OURS]['mean distance']:.0%}"
    if not settings.good:
        return (REPRODUCED if far > CLOSE else NOT), words
    return (REPRODUCED if far <= CLOSE else PARTLY if far <= NEAR else NOT), words


FULL = Scale(60_000, 10_000, 30, every=6)
COLOUR_CPU = Scale(4000, 2000, 20, every=4, data="cifar10_10k")


def _panel(
    name: str, figure: str, finding: str, settings: Settings, paper_epochs: int, small: Scale = FULL
) -> Panel:
    smallest = smoke(settings.model, epochs=2, every=2)
    scales = {"smoke": smallest, "cpu": small, "paper": Scale(None, None, paper_epochs, every=5)}
    title = (
        f"{settings.model} on {settings.data}, {settings.training.optimizer} with "
        f"{settings.posterior} curvature"
    )
    return Panel(
        name,
        figure,
        title,
        finding,
        settings,
        scales,
        run,
        draw,
        lambda outcome: _held(settings, outcome),
    )


GOOD = "The estimate from iBLR's own variance follows the test loss through the whole training."
DIAGONAL = "A diagonal Gauss-Newton matrix that is fitted on the way does not give the test loss."
KFAC = "Kronecker factors come nearer than the diagonal, and not as near as iBLR."
OVERFIT = "The estimate turns upwards as the test loss does: of use to stop, not right in size."
ADAM = "Adam's own variance is off, less so with small batches."
START = "Of four starts of the Hessian one gives a good match; the size depends on it."


def _three(
    number: str, place: str, nets: tuple[str, str], ways: tuple[Training, Training], *scales: Any
) -> list[Panel]:
    """iBLR, and SGD with a diagonal and with Kronecker factors.

    Args:
        number, place: of the panels, by name and in the paper.
        nets: data and model.
        ways: trainings with iBLR and without.
        scales: the paper's epochs, and the small scale.
    """
    (iblr, sgd), last = ways, scales
    return [
        _panel(f"{number}a", f"{place} iBLR", GOOD, Settings(*nets, iblr), *last),
        _panel(
            f"{number}b",
            f"{place} diagonal",
            DIAGONAL,
            Settings(*nets, sgd, "diagonal", good=False),
            *last,
        ),
        _panel(
            f"{number}c",
            f"{place} K-FAC",
            KFAC,
            Settings(*nets, sgd, "kronecker"),
            *last,
        ),
    ]


OVERFITTING = Training("adamw", (1e-3, 1e-3), 256, 60.0)
ADAMS = {
    "mnist-mlp": ("mnist", "mlp_32_16", 80.0, FULL),
    "mnist-lenet5": ("mnist", "lenet5", 60.0, FULL),
    "fmnist-lenet5": ("fmnist", "lenet5", 60.0, FULL),
    "cifar-cnn": ("cifar10", "cnn", 50.0, COLOUR_CPU),
}
PANELS = [
    _panel(
        "fig1b",
        "1 (b)",
        GOOD,
        Settings("cifar10", "resnet20", Training("iblr", (0.2, 0.0), 50, 10.0, 0.01)),
        300,
        replace(COLOUR_CPU, epochs=12, every=3),
    ),
    *_three(
        "fig5",
        "5",
        ("fmnist", "lenet5"),
        (Training("iblr", (1e-1, 0.0), 256, 60.0, 0.1), Training("adamw", (1e-2, 1e-4), 256, 60.0)),
        100,
        FULL,
    ),
    *_three(
        "fig8-mnist-mlp-",
        "8, first row,",
        ("mnist", "mlp_32_16"),
        (Training("iblr", (1e-2, 1e-4), 256, 80.0, 0.1), Training("sgd", (1e-3, 1e-4), 256, 80.0)),
        100,
        FULL,
    ),
    *_three(
        "fig8-mnist-lenet5-",
        "8, second row,",
        ("mnist", "lenet5"),
        (Training("iblr", (1e-2, 1e-4), 256, 60.0, 0.1), Training("sgd", (1e-3, 1e-4), 256, 60.0)),
        100,
        FULL,
    ),
    *_three(
        "fig8-cifar-cnn-",
        "8, third row,",
        ("cifar10", "cnn"),
        (
            Training("iblr", (1e-1, 1e-4), 512, 250.0, 0.05),
            Training("sgd", (1e-1, 0.0), 512, 250.0),
        ),
        150,
        COLOUR_CPU,
    ),
    *(
        _panel(
            f"fig9{letter}",
            f"9 ({letter})",
            OVERFIT,
            Settings("fmnist", "lenet5", OVERFITTING, structure, good=False),
            100,
            Scale(10_000, 10_000, 60, every=6),
        )
        for letter, structure in (("a", "diagonal"), ("b", "kronecker"))
    ),
    *(
        _panel(
            f"fig10-{name}-{batch}",
            f"10, {name}, batches of {batch}",
            ADAM,
            Settings(
                data,
                model,
                Training("adam", (1e-3, 0.0), batch, delta),
                second_moment="paper",
                good=False,
            ),
            50,
            replace(small, epochs=6, every=2) if batch == 8 else replace(small, epochs=12, every=3),
        )
        for batch in (8, 32)
        for name, (data, model, delta, small) in ADAMS.items()
    ),
    _panel(
        "h0",
        "choice of h0 (section on iBLR's settings)",
        START,
        Settings(
            "mnist",
            "mlp_32_16",
            Training("iblr", (1e-2, 1e-4), 256, 80.0),
            starts=(0.01, 0.05, 0.1, 0.5),
        ),
        100,
        replace(FULL, epochs=12, every=3),
    ),
]
