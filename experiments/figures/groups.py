"""Groups left out: USPS 3 against 5 and MNIST, with both of the paper's approximations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import Tensor

import engram
from experiments import plotting
from experiments.figures.deviations import Settings, trained
from experiments.measures import agreement, graded
from experiments.panel import Outcome, Panel, Scale
from experiments.training import Training, likelihood_of
from experiments.workplace import Workplace


@dataclass(frozen=True)
class Groups:
    """Which net, and how many examples are left out together."""

    net: Settings
    size: int


def _moved(likelihood: str, before: Tensor, after: Tensor) -> float:
    """L1 norm of the change of a group's predictions, all its examples together."""
    squash = torch.sigmoid if likelihood == "bernoulli" else (lambda f: f.softmax(1))
    return float((squash(after) - squash(before)).abs().sum())


def run(settings: Groups, scale: Scale, place: Workplace) -> Outcome:
    net = settings.net
    data = place.data(net.data, scale)
    model = trained(net, data, scale, place)
    likelihood, delta = likelihood_of(model), net.training.prior_precision
    order = torch.randperm(data.num_train, generator=place.generator())
    groups = list(order[: scale.count * settings.size].split(settings.size))

    def estimate() -> Outcome:
        posterior = engram.laplace(
            model,
            data.train,
            likelihood=likelihood,
            structure="kronecker",
            prior_precision=delta,
            progress=False,
        )
        found: dict[str, list[float]] = {"the group's gradients": [], "own gradient alone": []}
        for group in groups:
            for name, rule in zip(found, ("linear", "paper"), strict=True):
                removal = engram.remove(
                    model, data.train, posterior, group, estimator=rule, progress=False
                )
                effect = removal.group
                found[name].append(_moved(likelihood, effect.outputs, effect.outputs_without))
        return Outcome(found)

    def retrain() -> Outcome:
        truth = engram.retrain(
            model,
            data.train,
            groups=groups,
            likelihood=likelihood,
            prior_precision=delta,
            folder=place.folder / "retraining",
            train=engram.recipes.SGD(
                learning_rate=scale.rate or net.rates_again[0],
                epochs=scale.again,
                batch_size=net.training.batch_size,
            ),
            seed=place.seed,
            progress=place.progress,
        )
        per_row = truth.prediction_deviation.abs().sum(1)
        parts = per_row.split([len(group) for group in groups])
        return Outcome({"true": [float(part.sum()) for part in parts]})

    estimated, truth = place.stage("estimates", estimate), place.stage("truth", retrain)
    lines = {name: values for name, values in estimated.numbers.items() if name != "seconds"}
    true = truth.numbers["true"]
    numbers = {name: agreement(true, values) for name, values in lines.items()}
    arrays = {"true": torch.tensor(true)} | {
        f"estimate {name}": torch.tensor(values) for name, values in lines.items()
    }
    return Outcome(numbers, arrays)


def draw(settings: Groups, outcome: Outcome) -> Figure:
    title = f"{settings.net.model} on {settings.net.data}, groups of {settings.size}"
    figure, axes = plotting.panel(title)
    found = {n.removeprefix("estimate "): v for n, v in outcome.arrays.items() if "estimate" in n}
    plotting.scatter(axes, outcome.arrays["true"], found, "deviation of the group")
    return figure


def held(outcome: Outcome) -> tuple[str, str]:
    best = max(row["spearman"] for row in outcome.numbers.values() if isinstance(row, dict))
    return graded(best, 0.7, 0.4, "rank correlation over groups")


FINDING = "The estimated deviation of a group goes with the true one, for both approximations."
PANELS = [
    Panel(
        "fig6a",
        "6 (a)",
        "USPS 3 against 5: groups of 16",
        FINDING,
        Groups(
            Settings("usps_3v5", "usps_mlp", Training("sgd", (1e-3, 1e-3), 32, 5.0), (1e-3, 1e-3)),
            16,
        ),
        {
            "smoke": Scale(100, 50, 15, count=3, again=2, data="digits"),
            "cpu": Scale(None, None, 200, count=30, again=60),
            "paper": Scale(None, None, 500, count=80, again=1000),
        },
        run,
        draw,
        held,
    ),
    Panel(
        "fig6b",
        "6 (b)",
        "MNIST: groups of 64",
        FINDING,
        Groups(
            Settings(
                "mnist", "mlp_500_300", Training("sgd", (1e-2, 1e-3), 256, 100.0), (1e-4, 1e-5)
            ),
            64,
        ),
        {
            "smoke": Scale(128, 50, 15, count=2, again=2, data="digits"),
            "cpu": Scale(2000, 2000, 60, count=20, again=40),
            "paper": Scale(None, None, 500, count=100, again=500),
        },
        run,
        draw,
        held,
    ),
]
