"""What engram says about the digits, each number beside the one it estimates.

While the net trains, the test loss as a tracker estimates it; then the losses, the flipped labels
and the classes that are left out; and a picture of the most and the least sensitive examples.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from torch import Tensor, nn

import engram
from engram.core.storage.files import replacing
from engram.demo.digits import NUM_CLASSES, Digits, Settings, adam, mean_loss, outputs, train
from engram.report.page import Neighbours
from engram.sensitivity.class_removals import ClassRemovals

SUSPECTS = 100  # labels whose neighbours are on the page
COLUMNS = 12  # images in a row of the picture: at 100 dots an inch each is about 90 pixels wide
TITLES = (  # of its rows
    "highest leave-one-out loss: the labels that the other examples contradict most",
    "the next ones",
    "highest score: the predictions that hang most on the example itself",
    "lowest score: the other examples say the same",
)
WRONG, RIGHT = "#d62728", "#b0b0b0"  # frames of flipped labels (red) and of right ones (grey)


@dataclass(frozen=True)
class LossComparison:
    """Mean losses, nats per example: estimated from the training data, measured on test data.

    Args:
        train: on the training data, with the labels as given, a share of them wrong.
        estimated: leave-one-out, likewise.
        measured: on test data, labels flipped at the same rate.
        train_right, estimated_right: of the training examples whose label is right.
        measured_right: on test data with their right labels.
    """

    train: float
    estimated: float
    measured: float
    train_right: float
    estimated_right: float
    measured_right: float


def compare_losses(
    model: nn.Module, data: Digits, result: engram.Result, settings: Settings
) -> LossComparison:
    """Like with like: noisy labels against noisy labels, right ones against right ones."""
    logits = outputs(model, data.test_inputs)
    return LossComparison(
        train=result.train_nll,
        estimated=result.loo_nll,
        measured=loss_with_flips(logits, data.test_labels, settings.flipped_share),
        train_right=float(result.loss[~data.flipped].mean()),
        estimated_right=float(result.loo_loss[~data.flipped].mean()),
        measured_right=loss_with_flips(logits, data.test_labels, 0.0),
    )


def loss_with_flips(logits: Tensor, labels: Tensor, share: float) -> float:
    """Mean loss if a share of the labels were flipped, averaged over which ones and to what."""
    surprise = -logits.log_softmax(1)
    right = surprise.gather(1, labels[:, None])[:, 0]
    wrong = (surprise.sum(1) - right) / (NUM_CLASSES - 1)
    return float(((1 - share) * right + share * wrong).mean())


def flips_found(data: Digits, result: engram.Result) -> dict[str, float]:
    """By ranking: how many flipped labels are among the top as many examples."""
    count = int(data.flipped.sum())
    rankings = {
        "leave-one-out loss": result.loo_loss,
        "its increase over the loss": result.loo_loss - result.loss,
        "training loss": result.loss,
        "score (how far the prediction moves)": result.score,
    }
    found: dict[str, float] = {
        name: int(data.flipped[values.argsort(descending=True)[:count]].sum())
        for name, values in rankings.items()
    }
    return found | {"chance": count * count / len(data.labels)}


def suspects_neighbours(
    model: nn.Module, data: Digits, posterior: engram.Posterior, result: engram.Result
) -> Neighbours:
    """Which digits speak for and against the labels that the others contradict most."""
    suspects = result.loo_loss.argsort(descending=True)[:SUSPECTS]
    chosen = data.inputs[suspects], data.labels[suspects]
    influence = engram.influence(model, data.train, chosen, posterior, progress=False)
    return Neighbours.of_influence(influence, suspects)


@dataclass(frozen=True)
class ClassEffect:
    """Change of mean losses without a class, nats per example: estimated, and by retraining."""

    label: int
    examples: int
    own_estimated: float
    own_retrained: float
    test_estimated: float
    test_retrained: float
    flagged: bool


def estimate_classes(model: nn.Module, data: Digits, settings: Settings) -> ClassRemovals:
    """The effect of leaving out each class, by the full Gauss-Newton matrix.

    A class is a tenth of the data: the step is long, so the curvature of what remains matters
    (``corrected``), which asks for the exact matrix, and the model is taken as linear along it.
    """
    posterior = engram.laplace(
        model,
        data.train,
        structure="full",
        prior_precision=settings.prior_precision,
        progress=False,
    )
    return engram.remove_classes(
        model,
        data.train,
        posterior,
        evaluate_on=data.test,
        estimator="corrected",
        at="linearised",
        progress=False,
    )


def check_classes(
    model: nn.Module, data: Digits, settings: Settings, removals: ClassRemovals
) -> Iterator[ClassEffect]:
    """Train again without each class and set the change beside its estimate."""
    before = mean_loss(model, data.test)
    for label, removal in removals.items():
        kept = data.labels != label
        own = data.inputs[~kept], data.labels[~kept]
        other = copy.deepcopy(model)
        losses = train(other, data.inputs[kept], data.labels[kept], settings, settings.refit_epochs)
        deque(losses, maxlen=0)
        evaluation = removal.evaluation
        assert evaluation is not None
        yield ClassEffect(
            label=label,
            examples=len(removal.indices),
            own_estimated=removal.group.change,
            own_retrained=mean_loss(other, own) - mean_loss(model, own),
            test_estimated=evaluation.change,
            test_retrained=mean_loss(other, data.test) - before,
            flagged=removal.flagged,
        )


@dataclass(frozen=True)
class Moment:
    """One look at the net; losses in nats per example.

    Args:
        epoch: of the training.
        train: loss on the training data, with the labels as given.
        estimated: leave-one-out, from the training data alone.
        measured: on test data, labels flipped at the same rate.
        accuracy: on test data with their right labels.
    """

    epoch: int
    train: float
    estimated: float
    measured: float
    accuracy: float


def tracker_of(model: nn.Module, data: Digits, settings: Settings) -> engram.Tracker:
    """A tracker with the Kronecker-factored curvature of each moment.

    The whole training set is one batch here, so that Adam's own state holds the square of the
    mean gradient, which says nothing about the curvature near a minimum.
    """
    return engram.Tracker(
        model,
        adam(model, len(data.labels), settings),
        data.train,
        posterior="kronecker",
        prior_precision=settings.prior_precision,
    )


def follow(
    tracker: engram.Tracker, data: Digits, settings: Settings, every: int
) -> Iterator[Moment]:
    """Train the tracker's model, and look at it every so many epochs."""
    model = tracker.model
    losses = train(model, *data.train, settings, settings.epochs, tracker.optimizer)
    for epoch, _ in enumerate(losses, 1):
        if epoch % every:
            continue
        tracker.update(step=epoch)
        record = tracker.history.records[-1]
        logits = outputs(model, data.test_inputs)
        right = logits.argmax(1) == data.test_labels
        yield Moment(
            epoch=epoch,
            train=record.train,
            estimated=record.estimate,
            measured=loss_with_flips(logits, data.test_labels, settings.flipped_share),
            accuracy=float(right.float().mean()),
        )


def draw(data: Digits, result: engram.Result, path: Path) -> None:
    """Write the picture; red marks a label that was flipped."""
    by_loss = result.loo_loss.argsort(descending=True)
    by_score = result.score.argsort(descending=True)
    rows = (
        by_loss[:COLUMNS],
        by_loss[COLUMNS : 2 * COLUMNS],
        by_score[:COLUMNS],
        by_score[-COLUMNS:],
    )
    figure = Figure(figsize=(12, 7.2))
    strips = GridSpec(len(rows), COLUMNS, figure, left=0.01, right=0.99, top=0.87, bottom=0.06)
    strips.update(hspace=0.75, wspace=0.15)
    count = int(data.flipped.sum())
    figure.suptitle(
        f"{len(data.labels):,} training digits, {count} labels flipped on purpose (red)",
        fontsize=14,
        x=0.01,
        ha="left",
    )
    for row, (title, chosen) in enumerate(zip(TITLES, rows, strict=True)):
        for column, index in enumerate(chosen.tolist()):
            axes = figure.add_subplot(strips[row, column])
            _example(axes, data, result.outputs, index)
            if column == 0:
                axes.set_title(title, loc="left", fontsize=11)
    with replacing(path) as written:
        figure.savefig(written, dpi=100, format="png")


def _example(axes: Axes, data: Digits, outputs: Tensor, index: int) -> None:
    wrong = bool(data.flipped[index])
    axes.imshow(data.inputs[index].numpy(), cmap="gray_r", vmin=0, vmax=1)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color(WRONG if wrong else RIGHT)
        spine.set_linewidth(3 if wrong else 1)
    caption = f"given {int(data.labels[index])}\npredicted {int(outputs[index].argmax())}"
    axes.set_xlabel(caption, fontsize=8.5, color=WRONG if wrong else "black")
