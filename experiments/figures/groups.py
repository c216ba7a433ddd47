"""Groups left out: USPS 3 against 5 and MNIST, with both of the paper's approximations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import Tensor

import engram
from experiments import plotting
from experiments.figures.deviations import SGD, Settings, trained, training_again
from experiments.measures import NOT, PARTLY, REPRODUCED, agreement, of_rank_and_size
from experiments.names import net_on
from experiments.panel import Outcome, Panel, Scale
from experiments.training import Training, likelihood_of
from experiments.workplace import SECONDS, Workplace


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
    data = place.data(net.data, scale).standardised()
    own = trained(net, data, scale, place)
    model = own.model
    likelihood, delta = likelihood_of(model), net.training.on(data, scale).prior_precision
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
            folder=place.own / "retraining",
            train=training_again(net, data, scale),
            seed=place.seed,
            progress=place.progress,
        )
        per_row = truth.prediction_deviation.abs().sum(1)
        parts = per_row.split([len(group) for group in groups])
        return Outcome({"true": [float(part.sum()) for part in parts]})

    estimated, truth = place.stage("estimates", estimate), place.stage("truth", retrain)
    lines = {name: values for name, values in estimated.numbers.items() if name != SECONDS}
    true = truth.numbers["true"]
    numbers = {name: agreement(true, values) for name, values in lines.items()}
    arrays = {"true": torch.tensor(true)} | {
        f"estimate {name}": torch.tensor(values) for name, values in lines.items()
    }
    return Outcome({**numbers, **own.accuracies}, arrays)


def draw(settings: Groups, outcome: Outcome) -> Figure:
    title = f"{net_on(settings.net.model, settings.net.data)}, groups of {settings.size}"
    figure, axes = plotting.panel(title)
    found = {n.removeprefix("estimate "): v for n, v in outcome.arrays.items() if "estimate" in n}
    plotting.scatter(axes, outcome.arrays["true"], found, "deviation of the group")
    return figure


def held(outcome: Outcome) -> tuple[str, str]:
    rows = {n: row for n, row in outcome.numbers.items() if isinstance(row, dict)}
    found = {name: of_rank_and_size(row, GOOD, FAIR) for name, row in rows.items()}
    levels = [level for level, _ in found.values()]
    words = "; ".join(f"{name}: {said}" for name, (_, said) in found.items())
    return max(levels, key=(REPRODUCED, PARTLY, NOT).index), words


GOOD, FAIR = 0.7, 0.4  # rank correlations over groups
FINDING = "The estimated deviation of a group goes with the true one, for both approximations."
CRITERION = (
    f"reproduced where both approximations have a rank correlation of at least {GOOD} with the "
    "truth over groups and a mean within a factor of two of the true one; partly where both have "
    f"a rank correlation of at least {FAIR}"
)
PANELS = [
    Panel(
        "fig6a",
        "6 (a)",
        "USPS 3 against 5: groups of 16",
        FINDING,
        CRITERION,
        Groups(
            Settings(
                "usps_3v5", "usps_mlp", Training("sgd", (1e-3, 1e-3), 32, 5.0), (1e-3, 1e-3), 1000
            ),
            16,
        ),
        {
            "smoke": Scale(100, 50, 15, count=3, again=2, data="digits"),
            "cpu": Scale(None, None, 500, count=60, again=250),
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
        CRITERION,
        Groups(Settings("mnist", "mlp_500_300", SGD, (1e-4, 1e-5), 500), 64),
        {
            "smoke": Scale(128, 50, 15, count=2, again=2, data="digits"),
            "cpu": Scale(4000, None, 60, count=24, again=3, again_batch=64, faster=10.0),
            "paper": Scale(None, None, 500, count=100, again=500),
        },
        run,
        draw,
        held,
    ),
]
