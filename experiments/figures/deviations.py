"""Estimated against true deviations of single examples: K-FAC after SGD (the paper's figure 2)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import engram
from experiments import plotting
from experiments.measures import PARTLY, REPRODUCED, agreement, of_rank_and_size, top_share
from experiments.models import make
from experiments.names import net_on
from experiments.panel import Outcome, Panel, Scale, smoke
from experiments.training import (
    STABLE,
    Training,
    figures_on,
    fit,
    make_optimizer,
    weights_of,
    with_weights,
)
from experiments.workplace import Data, Workplace

PARTS = ("train", "test")
RULES = ("paper's rule", "engram")
SHOWN = 4  # images of high and as many of low sensitivity, of each of two classes


@dataclass(frozen=True)
class Settings:
    """Data, net, its training, and the rates and epochs of training again from its weights."""

    data: str
    model: str
    training: Training
    rates_again: tuple[float, float]
    epochs_again: int


@dataclass(frozen=True)
class Trained:
    """A net, its accuracies, and where the record of its training is."""

    model: nn.Module
    accuracies: dict[str, float]
    folder: Path

    def record(self) -> engram.Training:
        """Of its training, for estimates that have its time."""
        found: engram.Training = engram.load(self.folder)
        return found


def trained(settings: Settings, data: Data, scale: Scale, place: Workplace) -> Trained:
    """The net, from the folder where it is finished; panels of one share it."""
    training = settings.training.on(data, scale)
    where = place.at(
        "trainings", settings.model, settings.data, training, scale.num_train, scale.epochs
    )

    def make_it() -> Outcome:
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
        )
        record.save(where.own / "record")
        test, train = figures_on(model, data.test), figures_on(model, data.train)
        numbers = {"test_error": test["error"], "train_error": train["error"]}
        return Outcome(numbers, weights_of(model))

    kept = where.stage("training", make_it)
    accuracies = {f"{name} accuracy": 1 - kept.numbers[f"{name}_error"] for name in PARTS}
    model = with_weights(make(settings.model, place.seed), kept.arrays)
    return Trained(model, accuracies, where.own / "record")


def training_again(settings: Settings, data: Data, scale: Scale) -> engram.recipes.Recipe:
    """From the trained weights, with the paper's sum of rates over all steps, if that is stable."""
    first, last = settings.rates_again
    size = scale.again_batch or settings.training.batch_size
    steps = settings.epochs_again * data.whole / settings.training.batch_size
    own_steps = scale.again * data.num_train / size
    rate = min(STABLE, first * steps / own_steps)
    return engram.recipes.SGD(
        learning_rate=rate,
        final_learning_rate=rate * last / first,
        epochs=scale.again,
        batch_size=size,
    )


def estimates(model: nn.Module, data: Data, delta: float) -> dict[str, engram.Result]:
    """By the paper's rule, and by ours."""
    posterior = engram.laplace(
        model, data.train, structure="kronecker", prior_precision=delta, progress=False
    )
    return {
        "paper's rule": engram.sensitivities(
            model, data.train, posterior, estimator="paper", progress=False
        ),
        "engram": engram.sensitivities(model, data.train, posterior, progress=False),
    }


def run(settings: Settings, scale: Scale, place: Workplace) -> Outcome:
    raw = place.data(settings.data, scale)
    data = raw.standardised()
    net = trained(settings, data, scale, place)
    model, accuracies = net.model, net.accuracies
    chosen = torch.randperm(data.num_train, generator=place.generator())[: scale.count]
    delta = settings.training.on(data, scale).prior_precision

    def estimate() -> Outcome:
        found = estimates(model, data, delta)
        return Outcome({}, {name: result.score for name, result in found.items()})

    def retrain() -> Outcome:
        truth = engram.retrain(
            model,
            data.train,
            chosen,
            train=training_again(settings, data, scale),
            prior_precision=delta,
            folder=place.own / "retraining",
            seed=place.seed,
            progress=place.progress,
        )
        return Outcome({"noise": truth.noise_floor.level}, {"score": truth.score})

    scores, truth = place.stage("estimates", estimate).arrays, place.stage("truth", retrain)
    true = truth.arrays["score"].double()
    numbers = {name: agreement(true, values[chosen].double()) for name, values in scores.items()}
    shares = {"share of the top tenth": top_share(true), "noise": truth.numbers["noise"]}
    kept = {"examples": chosen, "true": true, **_pictures(raw, scores["engram"])}
    return Outcome(
        {**numbers, **shares, **accuracies},
        kept | {f"estimate {name}": values[chosen].double() for name, values in scores.items()},
    )


def _pictures(data: Data, score: Tensor) -> dict[str, Tensor]:
    """Images of high and of low score from two classes."""
    images, labels = data.train
    chosen = []
    for label in labels.unique()[:2]:
        own = (labels == label).nonzero()[:, 0]
        order = own[score[own].argsort()]
        chosen += [order[-SHOWN:], order[:SHOWN]]
    rows = torch.cat(chosen)
    return {"images": images[rows], "scores": score[rows]}


def draw(settings: Settings, outcome: Outcome) -> Figure:
    figure = Figure(figsize=(6.4, 6.6), layout="constrained")
    grid = figure.add_gridspec(4, 2 * SHOWN, height_ratios=(5, 0.9, 1.5, 1.5))
    axes = figure.add_subplot(grid[0, :])
    found = {name: outcome.arrays[f"estimate {name}"] for name in RULES}
    plotting.scatter(axes, outcome.arrays["true"], found, "deviation")
    axes.set_title(net_on(settings.model, settings.data), fontsize=10)
    below = figure.add_subplot(grid[1, :], sharex=axes)
    below.hist(outcome.arrays["true"], bins=30, color=plotting.GREY)
    below.set_ylabel("count", fontsize=8)
    below.tick_params(labelbottom=False)
    images, scores = outcome.arrays["images"], outcome.arrays["scores"].tolist()
    for place, image in enumerate(images):
        row, column = divmod(place, 2 * SHOWN)
        words = {0: "most sensitive", SHOWN: "least sensitive"}.get(column, "")
        own = figure.add_subplot(grid[2 + row, column])
        plotting.picture(own, image, words, f"{scores[place]:.1e}")
    return figure


def held(outcome: Outcome) -> tuple[str, str]:
    level, words = of_rank_and_size(outcome.numbers["paper's rule"], GOOD, FAIR)
    own, share = outcome.numbers["engram"], outcome.numbers["share of the top tenth"]
    if share < CONCENTRATED and level == REPRODUCED:
        level = PARTLY
    words += f" (engram's own rule {own['spearman']:.2f} and {own['ratio']:.2f})"
    return level, f"{words}; the top tenth has {share:.0%} of all true deviation"


GOOD, FAIR = 0.8, 0.5  # rank correlations
CONCENTRATED = 0.3  # of all true deviation, in the top tenth
FINDING = (
    "The estimate keeps the order of the examples by their true deviation; most examples have "
    "hardly any, and a small share has nearly all of it."
)
CRITERION = (
    f"reproduced where the paper's rule has a rank correlation of at least {GOOD} with the truth, "
    "its mean is within a factor of two of the true one, and the top tenth of the examples has "
    f"at least {CONCENTRATED:.0%} of all true deviation; partly where the rank correlation is at "
    f"least {FAIR}"
)


def _panel(letter: str, settings: Settings, paper: Scale, small: Scale) -> Panel:
    smallest = smoke(settings.model, epochs=2, count=3, again=1)
    scales = {"smoke": smallest, "cpu": small, "paper": paper}
    title = f"{net_on(settings.model, settings.data)}: single examples, estimated against true"
    return Panel(
        f"fig2{letter}",
        f"2 ({letter})",
        title,
        FINDING,
        CRITERION,
        settings,
        scales,
        run,
        draw,
        held,
    )


SGD = Training("sgd", (1e-2, 1e-3), 256, 100.0)
LENET = Training("sgd", (1e-1, 1e-3), 256, 100.0)
PANELS = [
    _panel(
        "a",
        Settings("mnist", "mlp_500_300", SGD, (1e-3, 1e-4), 300),
        Scale(None, None, 500, count=1000, again=300),
        Scale(4000, None, 60, count=16, again=6, again_batch=32, faster=10.0),
    ),
    _panel(
        "b",
        Settings("fmnist", "lenet5", LENET, (1e-3, 1e-4), 200),
        Scale(None, None, 300, count=1000, again=200),
        Scale(4000, None, 60, count=12, again=2, again_batch=16),
    ),
    _panel(
        "c",
        Settings("cifar10", "cnn", Training("sgd", (1e-2, 1e-4), 512, 250.0), (1e-4, 1e-6), 300),
        Scale(None, None, 500, count=100, again=300),
        Scale(
            10_000,
            None,
            14,
            count=8,
            again=1,
            batch=64,
            again_batch=32,
            faster=3.0,
            data="cifar10_10k",
        ),
    ),
]
