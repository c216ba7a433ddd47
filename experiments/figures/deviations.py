"""Estimated against true deviations of single examples: K-FAC after SGD (the paper's figure 2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import engram
from experiments import plotting
from experiments.measures import agreement, graded
from experiments.models import make
from experiments.panel import Outcome, Panel, Scale, smoke
from experiments.training import Training, figures_on, fit, weights_of, with_weights
from experiments.workplace import Data, Workplace

SHOWN = 4  # images of high and as many of low sensitivity, of each of two classes


@dataclass(frozen=True)
class Settings:
    """Data, net, its training, and the rates of training again from its weights."""

    data: str
    model: str
    training: Training
    rates_again: tuple[float, float]


def trained(settings: Settings, data: Data, scale: Scale, place: Workplace) -> nn.Module:
    """The net, from the folder where it is finished."""

    def make_it() -> Outcome:
        model = fit(
            make(settings.model, place.seed),
            data.train,
            settings.training,
            scale.epochs,
            seed=place.seed,
            progress=place.progress,
        )
        test, train = figures_on(model, data.test), figures_on(model, data.train)
        numbers = {"test_error": test["error"], "train_error": train["error"]}
        return Outcome(numbers, weights_of(model))

    kept = place.stage("training", make_it)
    return with_weights(make(settings.model, place.seed), kept.arrays)


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
    data = place.data(settings.data, scale)
    model = trained(settings, data, scale, place)
    chosen = torch.randperm(data.num_train, generator=place.generator())[: scale.count]
    delta = settings.training.prior_precision

    def estimate() -> Outcome:
        found = estimates(model, data, delta)
        return Outcome({}, {name: result.score for name, result in found.items()})

    def retrain() -> Outcome:
        truth = engram.retrain(
            model,
            data.train,
            chosen,
            train=_again(settings, scale),
            prior_precision=delta,
            folder=place.folder / "retraining",
            seed=place.seed,
            progress=place.progress,
        )
        return Outcome({"noise": truth.noise_floor.level}, {"score": truth.score})

    scores, truth = place.stage("estimates", estimate).arrays, place.stage("truth", retrain)
    true = truth.arrays["score"].double()
    numbers = {name: agreement(true, values[chosen].double()) for name, values in scores.items()}
    accuracy = place.stage("training", lambda: Outcome({})).numbers
    kept = {"examples": chosen, "true": true, **_pictures(data, scores["engram"])}
    return Outcome(
        {**numbers, "noise": truth.numbers["noise"], **accuracy},
        kept | {f"estimate {name}": values[chosen].double() for name, values in scores.items()},
    )


def _again(settings: Settings, scale: Scale) -> engram.recipes.Recipe:
    return engram.recipes.SGD(
        learning_rate=scale.rate or settings.rates_again[0],
        epochs=scale.again,
        batch_size=settings.training.batch_size,
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
    return {"images": images[rows], "labels": labels[rows], "scores": score[rows]}


def draw(settings: Settings, outcome: Outcome) -> Figure:
    figure = Figure(figsize=(6.4, 6.2))
    axes = figure.add_axes((0.12, 0.55, 0.84, 0.4))
    found = {n.removeprefix("estimate "): v for n, v in outcome.arrays.items() if "estimate" in n}
    plotting.scatter(axes, outcome.arrays["true"], found, "deviation")
    axes.set_title(f"{settings.model} on {settings.data}", fontsize=10)
    below = figure.add_axes((0.12, 0.4, 0.84, 0.08))
    below.hist(outcome.arrays["true"], bins=30, color=plotting.GREY)
    below.set_yticks([])
    below.set_xlabel("true deviation", fontsize=8)
    images, scores = outcome.arrays["images"], outcome.arrays["scores"]
    words = [f"{value:.2g}" for value in scores.tolist()]
    half = len(images) // 2
    plotting.pictures(figure, images[:half], words[:half], 0.19)
    plotting.pictures(figure, images[half:], words[half:], 0.01)
    return figure


def held(outcome: Outcome) -> tuple[str, str]:
    return graded(outcome.numbers["paper's rule"]["spearman"], 0.8, 0.5, "rank correlation")


FINDING = (
    "The estimate keeps the order of the examples by their true deviation; most examples have "
    "hardly any, and a small share has nearly all of it."
)
SMALL = Scale(2000, 2000, 60, count=40, again=30)


def _panel(letter: str, settings: Settings, paper: Scale, small: Scale) -> Panel:
    smallest = smoke(settings.model, epochs=2, count=3, again=1)
    scales = {"smoke": smallest, "cpu": small, "paper": paper}
    title = f"{settings.model} on {settings.data}: single examples, estimated against true"
    return Panel(
        f"fig2{letter}", f"2 ({letter})", title, FINDING, settings, scales, run, draw, held
    )


PANELS = [
    _panel(
        "a",
        Settings("mnist", "mlp_500_300", Training("sgd", (1e-2, 1e-3), 256, 100.0), (1e-3, 1e-4)),
        Scale(None, None, 500, count=1000, again=300),
        SMALL,
    ),
    _panel(
        "b",
        Settings("fmnist", "lenet5", Training("sgd", (1e-1, 1e-3), 256, 100.0), (1e-3, 1e-4)),
        Scale(None, None, 300, count=1000, again=200),
        SMALL,
    ),
    _panel(
        "c",
        Settings("cifar10", "cnn", Training("sgd", (1e-2, 1e-4), 512, 250.0), (1e-4, 1e-6)),
        Scale(None, None, 500, count=100, again=300),
        Scale(1000, 1000, 40, count=16, again=15, data="cifar10_10k"),
    ),
]
