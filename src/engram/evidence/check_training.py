"""What a user's training does by chance: to be known before training many times.

Whether it is the same for the same seed, whether examples of a batch see each other, and how much
losses differ from seed to seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from textwrap import wrap

import torch
from torch import Tensor, nn

from engram.core.arguments import MANY, is_number, seed_number, shown, whole
from engram.core.data.batches import Batches, Data, call
from engram.core.progress import Bar, announce
from engram.core.state.copies import private_copy
from engram.core.state.model import device_of, locked
from engram.core.state.process import kept_surroundings
from engram.errors import ArgumentError
from engram.likelihoods import Likelihood, resolve
from engram.retraining.one_by_one import seeded
from engram.retraining.retrain import Function
from engram.retraining.run_folder import Part
from engram.retraining.selection import Selection, Task
from engram.retraining.subset_design import Design
from engram.retraining.subsets import (
    BAR,
    Make,
    SubsetWorker,
    check_loop,
    losses_of,
    made_model,
    subset_worker,
    targets_of,
)
from engram.sensitivity.groups import Removal

FEWEST_SEEDS = 2  # below which nothing differs
OWN, OTHERS = 4, 4  # examples that are watched, and that stand beside them in a batch
SAME_OUTPUTS = 1e-4  # relative difference up to which it is rounding
BESIDE = 31  # column of the printed findings
SURE = 2.0  # standard errors that an effect has to exceed


@dataclass(frozen=True)
class EffectNoise:
    """An effect beside what seeds alone change.

    Args:
        of: the loss that changes, in words.
        effect: without some examples minus with them.
        noise: standard deviation of that loss over seeds.
    """

    of: str
    effect: float
    noise: float

    @property
    def pairs(self) -> float:
        """Pairs of trainings, with other seeds, whose mean difference shows the effect."""
        if self.effect == 0:
            return math.inf if self.noise else 1.0
        return max(1.0, math.ceil(2 * (SURE * self.noise / self.effect) ** 2))

    @property
    def shows(self) -> bool:
        """Whether it is larger than the noise of seeds."""
        return abs(self.effect) > self.noise


@dataclass(frozen=True, eq=False)
class TrainingCheck:
    """What a training does by chance.

    Attributes:
        repeat_difference: largest difference of any output between two trainings with one seed.
        batch_dependence: largest change of an output, relative to the outputs' size, where other
            examples stand beside it in a batch in train mode.
        losses: of every training example under every seed, [S, N].
        evaluation_losses: of those of ``evaluate_on``, [S, M].
        effect: that was asked for, beside the noise of its loss.
        seconds: of a training, their mean.
        from_one_start: whether all trainings began with the same weights.
    """

    repeat_difference: float
    batch_dependence: float
    losses: Tensor
    evaluation_losses: Tensor | None
    effect: EffectNoise | None
    seconds: float
    from_one_start: bool

    @property
    def deterministic(self) -> bool:
        """Whether two trainings with one seed gave the same outputs, bit for bit."""
        return self.repeat_difference == 0

    @property
    def mixes_batches(self) -> bool:
        """Whether examples of a batch see each other in training, as with batch normalisation."""
        return not self.batch_dependence <= SAME_OUTPUTS

    @property
    def mean_noise(self) -> float:
        """Standard deviation over seeds of the mean loss on the training data."""
        return float(self.losses.double().mean(1).std())

    @property
    def example_noise(self) -> Tensor:
        """Standard deviation over seeds of each example's loss, [N]."""
        return self.losses.double().std(0)

    def __repr__(self) -> str:
        same = "the same, bit for bit"
        if not self.deterministic:
            same = f"outputs differ by up to {self.repeat_difference:.2g}: not decided by the seed"
        mixed = "do not see each other"
        if self.mixes_batches:
            mixed = f"see each other: outputs change by {self.batch_dependence:.0%} with the others"
        typical = float(self.example_noise.square().mean().sqrt())
        begun = ", from the same first weights" if self.from_one_start else ""
        said = {
            "training twice with one seed": same,
            "examples of a batch": mixed,
            f"{len(self.losses)} seeds differ by": f"{self.mean_noise:.2g} in the mean loss, "
            f"{typical:.2g} in that of an example{begun}",
        }
        if self.effect is not None:
            said["effect asked for"] = _judged(self.effect, len(self.losses))
        return "\n".join(_line(what, text) for what, text in said.items())


def _line(what: str, text: str) -> str:
    """What was looked at, and beside it what was found."""
    return "\n".join(wrap(f"{what:<{BESIDE}}{text}", 100, subsequent_indent=" " * BESIDE))


def _judged(effect: EffectNoise, seeds: int) -> str:
    """One sentence on an effect."""
    changes = f"{effect.effect:+.2g} in {effect.of}"
    if effect.shows:
        needed = "one pair of trainings shows it"
        if effect.pairs > 1:
            needed = f"the mean of {effect.pairs:,.0f} pairs of trainings shows it"
        return f"{changes}, more than {seeds} seeds differ by ({effect.noise:.2g}): {needed}"
    least = "no number" if math.isinf(effect.pairs) else f"it takes {effect.pairs:,.0f} pairs"
    return (
        f"{changes}, less than {seeds} seeds differ by ({effect.noise:.2g}): no estimate can tell "
        f"for one training; {least} of trainings to see it in the mean"
    )


def check_training(
    model: nn.Module | Make,
    data: Data,
    *,
    train: Function,
    seeds: int = 3,
    effect: Removal | float | None = None,
    likelihood: str | Likelihood = "categorical",
    evaluate_on: Data | None = None,
    seed: int = 0,
    progress: bool = True,
) -> TrainingCheck:
    r"""What a training does by chance: by seed, by the batch, and against an effect.

    An effect :math:`\Delta` shows in the mean over k pairs of trainings where

    .. math:: |\Delta| > 2 \sigma \sqrt{2 / k}

    with the standard deviation :math:`\sigma` of the same loss over seeds, which from three seeds
    is known to a factor of two or so.

    Args:
        model: where training begins, which is not changed; or better a function that makes a new
            one by seed, as for ``engram.retrain(..., subsets=)``.
        data: the training data.
        train: ``fit(model, data)``, your training loop; it takes random numbers from torch, numpy
            or random, which are seeded.
        seeds: from 2 on; there are ``seeds + 1`` trainings, the first twice.
        effect: a removal, or a change of the mean loss. Of a removal with ``evaluate_on`` it is the
            change there, else that of the group's own loss; a number is one on ``evaluate_on``
            where that is given, else on the training data.
        likelihood: of the losses.
        evaluate_on: other data, for instance the test set of a removal.
        seed: the first.
        progress: say how many trainings there will be, and show a bar.

    Returns:
        ``deterministic``, ``mixes_batches``, ``mean_noise``, ``example_noise`` and ``effect``;
        printed, a line each.

    Example:
        >>> def fit(model, data):
        ...     return nn.init.constant_(model.weight, 0.5) is None or model
        >>> x = torch.randn(8, 2)
        >>> data = (x, x.sum(1, keepdim=True))
        >>> make = lambda: nn.Linear(2, 1, bias=False)
        >>> check = check_training(make, data, train=fit, likelihood="gaussian", progress=False)
        >>> check.deterministic, check.mixes_batches, check.mean_noise
        (True, False, 0.0)
    """
    check_loop(train)
    count = whole("number of seeds", seeds, FEWEST_SEEDS, MANY, "use seeds=3")
    first, chosen = seed_number(seed), resolve(likelihood)
    template = made_model(model, first)
    _check_effect(effect)
    with locked(template), kept_surroundings(), torch.inference_mode(False):
        num_data = Batches(data, 1).num_data
        # a training takes two seeds, for its first weights and for its loop
        numbers = (first, *(first + 2 * n for n in range(count)))
        design = Design(torch.ones(count + 1, num_data, dtype=torch.bool), numbers, "")
        task = Task(Selection("seeds", (), ()), chosen, evaluate_on, 0, False, first)
        worker = subset_worker(model, template, data, task, train, design)
        # a model that knows its data may be trained on: nothing is left out that it could know
        worker = replace(worker, trained_before="")
        parts = _trained(worker, progress)
        outputs = torch.cat([part["outputs"] for part in parts])
        losses, _ = losses_of(chosen, outputs[1:], targets_of(data))
        evaluated = None
        if evaluate_on is not None:
            other = torch.cat([part["evaluation"] for part in parts[1:]])
            evaluated, _ = losses_of(chosen, other, targets_of(evaluate_on))
        return TrainingCheck(
            repeat_difference=float((outputs[0] - outputs[1]).abs().max()),
            batch_dependence=_batch_dependence(template, data, first),
            losses=losses,
            evaluation_losses=evaluated,
            effect=_effect_noise(effect, losses, evaluated),
            seconds=float(torch.cat([part["seconds"] for part in parts]).mean()),
            from_one_start=isinstance(model, nn.Module),
        )


def _trained(worker: SubsetWorker, progress: bool) -> list[Part]:
    """All trainings of a design, announced and counted."""
    count = len(worker.design)
    announce(f"check_training: {count} trainings, the first seed twice", progress)
    parts = []
    with Bar(count, "training with other seeds", progress, BAR) as bar:
        for number in range(count):
            parts.append(worker.part(number))
            bar.update()
    return parts


def _check_effect(effect: object) -> None:
    if effect is None or isinstance(effect, Removal):
        return
    if not is_number(effect) or not math.isfinite(float(effect)):  # type: ignore[arg-type]
        raise ArgumentError(
            "an effect that is a removal or a finite change of the mean loss",
            shown(effect),
            "pass what engram.remove returned, or a number",
        )


def _effect_noise(
    effect: Removal | float | None, losses: Tensor, evaluated: Tensor | None
) -> EffectNoise | None:
    """The effect, and the standard deviation over seeds of the mean loss that it changes."""
    if effect is None:
        return None
    of, among = "the mean loss", losses if evaluated is None else evaluated
    if not isinstance(effect, Removal):
        change = float(effect)
    elif effect.evaluation is not None and evaluated is not None:
        change, of = effect.evaluation.change, "the evaluation loss"
    else:
        if int(effect.indices.max()) >= losses.shape[1]:
            raise ArgumentError(
                f"a removal of some of the {losses.shape[1]:,} examples of the data",
                f"one of example {int(effect.indices.max()):,}",
                "pass the data that the removal is about",
            )
        change, of, among = effect.group.change, "the group's own loss", losses[:, effect.indices]
    return EffectNoise(of, change, float(among.double().mean(1).std()))


def _batch_dependence(model: nn.Module, data: Data, seed: int) -> float:
    """Change of some outputs, relative to their size, with other examples beside them.

    The numbers drawn are the same both times, and by place, so that dropout changes nothing.
    """
    batches = Batches(data, OWN + OTHERS)
    size = min(OWN, batches.num_data // 3)
    if size == 0:  # there are no two others to stand beside an example
        return 0.0
    own, rest = torch.arange(size), torch.arange(size, batches.num_data)
    count = min(OTHERS, len(rest) // 2)
    others = rest[:count], rest[-count:]
    found = []
    for beside in others:
        copy = private_copy(model).train()
        with seeded(seed), torch.no_grad():
            rows = [
                call(copy, b.to(device_of(copy)).inputs)
                for b in batches.subset(torch.cat([own, beside]))
            ]
        found.append(torch.cat(rows)[:size].cpu())
    return float((found[0] - found[1]).abs().max() / found[0].abs().max().clamp(min=1e-30))
