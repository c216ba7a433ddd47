"""Classes left out: leave-one-class-out losses against the test loss of nets trained without."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from matplotlib.figure import Figure

import engram
from experiments import plotting
from experiments.figures.deviations import LENET, SGD, Settings, trained, training_again
from experiments.measures import NOT, PARTLY, REPRODUCED, agreement
from experiments.names import net_on
from experiments.panel import Outcome, Panel, Scale
from experiments.workplace import Workplace


@dataclass(frozen=True)
class Classes:
    """The nets that classes are left out of, on one data set."""

    nets: tuple[Settings, ...]


def _of_net(net: Settings, scale: Scale, place: Workplace) -> Outcome:
    data = place.data(net.data, scale).standardised()
    own = trained(net, data, scale, place)
    model = own.model
    delta = net.training.on(data, scale).prior_precision

    def estimate() -> Outcome:
        posterior = engram.laplace(
            model, data.train, structure="kronecker", prior_precision=delta, progress=False
        )
        paper = engram.remove_classes(
            model, data.train, posterior, estimator="paper", progress=False
        )
        timed = engram.laplace(
            model, data.train, structure="kronecker", training=own.record(), progress=False
        )
        whole, with_time = (
            engram.remove_classes(model, data.train, way, evaluate_on=data.test, progress=False)
            for way in (posterior, timed)
        )
        found = {
            "paper": [float(paper[label].group.loss_without.sum()) for label in paper],
            "own": [float(whole[label].group.loss_without.sum()) for label in paper],
            "test": [_test_loss(whole[label]) for label in paper],
            "timed": [_test_loss(with_time[label]) for label in paper],
        }
        return Outcome(found)

    def retrain() -> Outcome:
        truth = engram.retrain(
            model,
            data.train,
            classes=True,
            prior_precision=delta,
            evaluate_on=data.test,
            folder=place.own / f"{net.model}-retraining",
            train=training_again(net, data, scale),
            seed=place.seed,
            progress=place.progress,
        )
        assert truth.evaluation_loss is not None
        return Outcome({"test": truth.evaluation_loss.double().mean(1).tolist()})

    estimated, truth = (
        place.stage(f"{net.model}-{name}", make)
        for name, make in (("estimates", estimate), ("truth", retrain))
    )
    # a mean in place of a sum: classes of a part of the images are not quite of one size
    counts = data.train[1].bincount()
    loco = {
        name: (torch.tensor(estimated.numbers[name]) / counts).tolist() for name in ("paper", "own")
    }
    numbers = {
        "LOCO, the paper's form": agreement(truth.numbers["test"], loco["paper"]),
        "LOCO, all cross terms": agreement(truth.numbers["test"], loco["own"]),
        "test loss, all cross terms": agreement(truth.numbers["test"], estimated.numbers["test"]),
        "test loss, training time": agreement(truth.numbers["test"], estimated.numbers["timed"]),
    }
    arrays = {name: torch.tensor(loco[name]) for name in ("paper", "own")}
    return Outcome(
        {**numbers, **own.accuracies}, arrays | {"true": torch.tensor(truth.numbers["test"])}
    )


def _test_loss(removal: engram.Removal) -> float:
    assert removal.evaluation is not None
    return float(removal.evaluation.loss_without.mean())


def run(settings: Classes, scale: Scale, place: Workplace) -> Outcome:
    numbers, arrays = {}, {}
    for net in settings.nets:
        found = _of_net(net, scale, place)
        numbers[net.model] = dict(found.numbers)
        arrays |= {f"{net.model}.{name}": values for name, values in found.arrays.items()}
    numbers["classes"] = place.data(settings.nets[0].data, scale).classes
    return Outcome(numbers, arrays)


def draw(settings: Classes, outcome: Outcome) -> Figure:
    figure = Figure(figsize=(9.0, 4.0), layout="constrained")
    for number, net in enumerate(settings.nets):
        axes = figure.add_subplot(1, len(settings.nets), number + 1)
        true, loco = (outcome.arrays[f"{net.model}.{name}"] for name in ("true", "paper"))
        axes.scatter(true, loco, s=14, color=plotting.RED)
        slope, height = np.polyfit(true, loco, 1)
        ends = np.array([float(true.min()), float(true.max())])
        axes.plot(ends, slope * ends + height, color=plotting.GREY, linestyle="--", linewidth=1)
        for name, x, y in zip(outcome.numbers["classes"], true, loco, strict=True):
            axes.annotate(name, (float(x), float(y)), fontsize=7, xytext=(3, 3),
                          textcoords="offset points")  # fmt: skip
        axes.set_title(net_on(net.model, net.data), fontsize=10)
        axes.set_xlabel("test loss of the net trained without the class")
        axes.set_ylabel("estimated loss of the class left out")
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.15)
    return figure


def held(outcome: Outcome) -> tuple[str, str]:
    rows = [(name, row) for name, row in outcome.numbers.items() if isinstance(row, dict)]
    ranks = {name: row["LOCO, the paper's form"]["spearman"] for name, row in rows}
    least = min(ranks.values())
    level = REPRODUCED if least >= GOOD else PARTLY if least >= FAIR else NOT
    words = "rank correlation " + ", ".join(f"{v:.2f} ({name})" for name, v in ranks.items())
    sizes = ", ".join(
        f"{row['test loss, all cross terms']['ratio']:.2f} and with the training time "
        f"{row['test loss, training time']['ratio']:.2f} ({name})"
        for name, row in rows
    )
    return level, f"{words}; the test loss by all cross terms is {sizes} of the true one"


GOOD, FAIR = 0.6, 0.3  # rank correlations over ten classes
FINDING = (
    "Classes whose removal hurts the test loss most have the largest leave-one-class-out loss, "
    "although the estimate takes each example's own gradient in place of the class's."
)
CRITERION = (
    f"reproduced where the paper's form has a rank correlation of at least {GOOD} with the test "
    f"loss over the ten classes for both nets, partly where it is at least {FAIR}; its sizes are "
    "those of another loss (the class's own), so that none are compared"
)
SMALL = Scale(4000, None, 60, again=3, again_batch=64, faster=10.0)
SCALES = {
    "smoke": Scale(120, 40, 2, again=1, data="digits"),
    "paper": Scale(None, None, 300, again=1000),
}


def _panel(name: str, figure: str, title: str, nets: tuple[Settings, ...], small: Scale) -> Panel:
    scales = {**SCALES, "cpu": small}
    return Panel(name, figure, title, FINDING, CRITERION, Classes(nets), scales, run, draw, held)


PANELS = [
    _panel(
        "fig3a",
        "3 (a)",
        "Fashion-MNIST: classes left out of an MLP and of LeNet5",
        (
            Settings("fmnist", "mlp_32_16", SGD, (1e-5, 1e-6), 1000),
            Settings("fmnist", "lenet5", LENET, (1e-4, 1e-5), 1000),
        ),
        SMALL,
    ),
    _panel(
        "fig11d",
        "11 (d)",
        "MNIST: classes left out of an MLP and of LeNet5",
        (
            Settings("mnist", "mlp_500_300", SGD, (1e-4, 1e-5), 1000),
            Settings("mnist", "lenet5", LENET, (1e-5, 1e-6), 1000),
        ),
        replace(SMALL, num_train=2000, num_test=1000, again=2, again_batch=16),
    ),
]
