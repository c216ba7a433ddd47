"""A training, and estimates of the test loss at looks on the way: its own, fitted ones, ours."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from matplotlib.figure import Figure

import engram
from experiments import plotting
from experiments.measures import agreement, mean_distance
from experiments.models import make
from experiments.names import OPTIMIZERS, net_on
from experiments.panel import Outcome, Scale
from experiments.training import Training, figures_on, fit, make_optimizer
from experiments.workplace import Data, Workplace

OURS = "training time"
OTHER = "other batch size"
LOOKS = (1, 2, 5, 10, 20, 30, 40, 50, 75, 100, 150, 200, 250, 300)  # epochs
STRUCTURES = ("diagonal", "kronecker")


@dataclass(frozen=True)
class Settings:
    """One training and what is followed.

    Args:
        data, model, training: what is trained.
        posterior: ``optimizer``, or the structure that is fitted at every look.
        second_moment: of Adam: as the paper's table has it.
        starts: h_0 of iBLR to choose from; one training each.
        other_batch: a batch size whose estimate is set beside this one's.
    """

    data: str
    model: str
    training: Training
    posterior: str = "optimizer"
    second_moment: str = "batch"
    starts: tuple[float, ...] = ()
    other_batch: int | None = None


def _trackers(
    settings: Settings, model: torch.nn.Module, data: Data, scale: Scale
) -> tuple[torch.optim.Optimizer, dict[str, engram.Tracker]]:
    """The paper's estimates by posterior, elementwise as it computes them, and ours."""
    training = settings.training.on(data, scale)
    optimizer = make_optimizer(model, training, data.num_train)
    engram.record(optimizer, model, checkpoints=2)
    names = STRUCTURES if settings.posterior in STRUCTURES else (settings.posterior,)
    followed = {
        name: engram.Tracker(
            model,
            optimizer,
            data.train,
            prior_precision=training.prior_precision,
            posterior=name,
            estimator="paper",
            examples=scale.looked,
            training_batch_size=training.batch_size,
            second_moment=settings.second_moment,
        )
        for name in names
    }
    ours = engram.Tracker(
        model,
        optimizer,
        data.train,
        posterior="kronecker",  # with the recorded time, since no prior is given
        estimator="linear",
        examples=scale.looked,
    )
    return optimizer, {**followed, OURS: ours}


def _followed(settings: Settings, data: Data, scale: Scale, place: Workplace) -> Outcome:
    """Losses, estimates and errors at every look.

    Where a look goes over some of the examples, what they add to their own training loss is added
    to that of all.
    """
    model = make(settings.model, place.seed)
    optimizer, trackers = _trackers(settings, model, data, scale)
    rows: dict[str, list[float]] = {
        name: [] for name in ("epoch", "train", *trackers, "test", "error")
    }

    def look(epoch: int) -> None:
        if epoch not in LOOKS and epoch != scale.epochs:
            return
        test, train = figures_on(model, data.test), figures_on(model, data.train)
        rows["epoch"].append(float(epoch))
        rows["train"].append(train["nll"])
        rows["test"].append(test["nll"])
        rows["error"].append(test["error"])
        for name, tracker in trackers.items():
            result = tracker.update(step=epoch, diagnostics=False)
            added = result.loo_nll - result.train_nll if result else float("nan")
            rows[name].append(train["nll"] + added)

    fit(
        model,
        data.train,
        settings.training.on(data, scale),
        scale.epochs,
        seed=place.seed,
        optimizer=optimizer,
        after=look,
        progress=place.progress,
        words=f"{net_on(settings.model, settings.data)}, {settings.training.optimizer}",
    )
    for tracker in trackers.values():
        tracker.close()
    return Outcome({}, {name: torch.tensor(values) for name, values in rows.items()})


def run(settings: Settings, scale: Scale, place: Workplace) -> Outcome:
    data = place.data(settings.data, scale).standardised()
    if settings.starts:
        return _chosen_start(settings, data, scale, place)
    found = _shared(settings, data, scale, place)
    numbers = _numbers(found)
    if settings.other_batch:
        training = replace(settings.training, batch_size=settings.other_batch)
        other = _shared(replace(settings, training=training), data, scale, place)
        numbers[OTHER] = _numbers(other)[settings.posterior]
    return Outcome(numbers, found.arrays)


def _shared(settings: Settings, data: Data, scale: Scale, place: Workplace) -> Outcome:
    """One training, which panels that look at it in other ways go on with."""
    alone = replace(settings, posterior="", other_batch=None)
    where = place.at("trainings", alone, scale)
    return where.stage("followed", lambda: _followed(settings, data, scale, where))


def _numbers(found: Outcome) -> dict[str, object]:
    """Of every estimate how far it is from the test loss, over the looks and at the last."""
    columns = {name: values.tolist() for name, values in found.arrays.items()}
    test = columns["test"]
    estimates = [name for name in columns if name not in ("epoch", "test", "error")]
    return {
        **{
            name: {
                "mean distance": mean_distance(columns[name], test),
                "over the test loss at the end": columns[name][-1] / test[-1],
                **agreement(test, columns[name]),
            }
            for name in estimates
        },
        "test loss": test,
        "test accuracy": 1 - columns["error"][-1],
    }


def _chosen_start(settings: Settings, data: Data, scale: Scale, place: Workplace) -> Outcome:
    """One training for every h_0."""
    numbers: dict[str, object] = {}
    arrays = {}
    for start in settings.starts:
        own = replace(settings, training=replace(settings.training, hessian_start=start))
        found = place.stage(f"h0-{start}", lambda s=own: _followed(s, data, scale, place))
        row = _numbers(found)
        numbers[f"h0 {start}"] = {**row["optimizer"], "test accuracy": row["test accuracy"]}
        arrays |= {f"{name} {start}": found.arrays[name] for name in ("optimizer", "test")}
        arrays["epoch"] = found.arrays["epoch"]
    return Outcome(numbers, arrays)


WORDS = {
    "optimizer": "leave-one-out, optimizer's own",
    "diagonal": "leave-one-out, diagonal GGN",
    "kronecker": "leave-one-out, K-FAC",
}


def draw(settings: Settings, outcome: Outcome) -> Figure:
    words = f"{net_on(settings.model, settings.data)}, {OPTIMIZERS[settings.training.optimizer]}"
    figure, axes = plotting.panel(words)
    columns = {name: values.tolist() for name, values in outcome.arrays.items()}
    epochs = columns["epoch"]
    if settings.starts:
        lines = {f"test, $h_0$ = {settings.starts[0]}": columns[f"test {settings.starts[0]}"]}
        lines |= {f"$h_0$ = {s}": columns[f"optimizer {s}"] for s in settings.starts}
    else:
        lines = {
            "test loss": columns["test"],
            WORDS[settings.posterior]: columns[settings.posterior],
            "leave-one-out, training time": columns[OURS],
            "training loss": columns["train"],
        }
    plotting.curves(axes, epochs, lines, "epoch", "nats per example")
    plotting.fit_heights(axes, lines)
    return figure


def distances(outcome: Outcome) -> dict[str, float]:
    rows = outcome.numbers.items()
    return {n: row["mean distance"] for n, row in rows if isinstance(row, dict)}
