"""Classes left out: leave-one-class-out losses against the test loss of nets trained without."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from matplotlib.figure import Figure

import engram
from experiments import plotting
from experiments.figures.deviations import Settings, trained
from experiments.measures import agreement, graded
from experiments.panel import Outcome, Panel, Scale
from experiments.training import Training
from experiments.workplace import Workplace


@dataclass(frozen=True)
class Classes:
    """The nets that classes are left out of, on one data set."""

    nets: tuple[Settings, ...]


def _of_net(net: Settings, scale: Scale, place: Workplace) -> Outcome:
    data = place.data(net.data, scale)
    model = trained(net, data, scale, place)
    delta = net.training.prior_precision

    def estimate() -> Outcome:
        posterior = engram.laplace(
            model, data.train, structure="kronecker", prior_precision=delta, progress=False
        )
        paper = engram.remove_classes(
            model, data.train, posterior, estimator="paper", progress=False
        )
        whole = engram.remove_classes(
            model, data.train, posterior, evaluate_on=data.test, progress=False
        )
        found: dict[str, list[float]] = {"paper": [], "own": [], "test": []}
        for label in paper:
            effect = whole[label].evaluation
            assert effect is not None
            found["paper"].append(float(paper[label].group.loss_without.sum()))
            found["own"].append(float(whole[label].group.loss_without.sum()))
            found["test"].append(float(effect.loss_without.mean()))
        return Outcome(found)

    def retrain() -> Outcome:
        truth = engram.retrain(
            model,
            data.train,
            classes=True,
            prior_precision=delta,
            evaluate_on=data.test,
            folder=place.folder / "retraining",
            train=engram.recipes.SGD(
                learning_rate=scale.rate or net.rates_again[0],
                epochs=scale.again,
                batch_size=net.training.batch_size,
            ),
            seed=place.seed,
            progress=place.progress,
        )
        assert truth.evaluation_loss is not None
        return Outcome({"test": truth.evaluation_loss.double().mean(1).tolist()})

    estimated, truth = place.stage("estimates", estimate), place.stage("truth", retrain)
    numbers = {
        "LOCO, the paper's form": agreement(truth.numbers["test"], estimated.numbers["paper"]),
        "LOCO, all cross terms": agreement(truth.numbers["test"], estimated.numbers["own"]),
        "test loss, all cross terms": agreement(truth.numbers["test"], estimated.numbers["test"]),
    }
    arrays = {name: torch.tensor(estimated.numbers[name]) for name in ("paper", "own", "test")}
    return Outcome(numbers, arrays | {"true": torch.tensor(truth.numbers["test"])})


def run(settings: Classes, scale: Scale, place: Workplace) -> Outcome:
    numbers, arrays = {}, {}
    for net in settings.nets:
        own = Workplace(place.folder / net.model, place.seed, place.data_dir, place.progress)
        found = _of_net(net, scale, own)
        numbers[net.model] = dict(found.numbers)
        arrays |= {f"{net.model}.{name}": values for name, values in found.arrays.items()}
    return Outcome(numbers, arrays)


def draw(settings: Classes, outcome: Outcome) -> Figure:
    figure, axes = plotting.panel(f"classes of {settings.nets[0].data} left out")
    for net, colour in zip(settings.nets, (plotting.BLUE, plotting.RED), strict=False):
        true, loco = (outcome.arrays[f"{net.model}.{name}"] for name in ("true", "paper"))
        axes.scatter(true, loco / loco.max(), s=14, color=colour, label=net.model)
        for label, (x, y) in enumerate(zip(true, loco / loco.max(), strict=True)):
            axes.annotate(str(label), (float(x), float(y)), fontsize=7)
    axes.set_xlabel("test loss of the net trained without the class")
    axes.set_ylabel("estimated LOCO, over the largest")
    axes.legend(frameon=False, fontsize=8)
    return figure


def held(outcome: Outcome) -> tuple[str, str]:
    found = [row["LOCO, the paper's form"]["spearman"] for row in outcome.numbers.values()]
    return graded(min(found), 0.6, 0.3, "smallest rank correlation over classes")


FINDING = (
    "Classes whose removal hurts the test loss most have the largest leave-one-class-out loss, "
    "although the estimate takes each example's own gradient in place of the class's."
)
SCALES = {
    "smoke": Scale(120, 40, 2, again=1, rate=1e-3, data="digits"),
    "cpu": Scale(3000, 2000, 40, again=30, rate=1e-3),
    "paper": Scale(None, None, 300, again=1000),
}
SGD = Training("sgd", (1e-2, 1e-3), 256, 100.0)
LENET = Training("sgd", (1e-1, 1e-3), 256, 100.0)
PANELS = [
    Panel(
        "fig3a",
        "3 (a)",
        "Fashion-MNIST: classes left out of an MLP and of LeNet5",
        FINDING,
        Classes(
            (
                Settings("fmnist", "mlp_32_16", SGD, (1e-5, 1e-6)),
                Settings("fmnist", "lenet5", LENET, (1e-4, 1e-5)),
            )
        ),
        SCALES,
        run,
        draw,
        held,
    ),
    Panel(
        "fig11d",
        "11 (d)",
        "MNIST: classes left out of an MLP and of LeNet5",
        FINDING,
        Classes(
            (
                Settings("mnist", "mlp_500_300", SGD, (1e-4, 1e-5)),
                Settings("mnist", "lenet5", LENET, (1e-5, 1e-6)),
            )
        ),
        SCALES,
        run,
        draw,
        held,
    ),
]
