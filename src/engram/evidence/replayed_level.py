"""The level of the test loss, by replaying a recorded training without a few examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engram.core.arguments import fraction, seed_number, whole
from engram.core.data.batches import Data
from engram.core.data.columns import Columns
from engram.core.progress import Bar
from engram.core.state.model import device_of, outputs_at, state_preserved
from engram.evidence.regression_estimator import increase_of_all, standard_error
from engram.likelihoods import Likelihood, resolve
from engram.training.memorisation import prequential
from engram.training.replay import Loss, MakeOptimizer, Path, loss_of
from engram.training.training import Training

SHARE = 0.1  # of the examples that are left out: few among all, and enough for their mean
BATCH = 256  # examples of a forward pass


@dataclass(frozen=True, eq=False)
class ReplayedLevel:
    """What a training without some of its examples says about them.

    Attributes:
        level: the estimate of the test loss, nats per example.
        standard_error: of it, from which examples happened to be left out; not from the seeds.
        train_nll: mean loss of the trained net on all its data.
        indices: of the examples that were left out, [m].
        loss: theirs under the trained net, [m].
        loss_without: under the net that was trained on without them, [m].
        start: the step after which they were left out.
        passes: over the data, forward and backward, that it took.
    """

    level: float
    standard_error: float
    train_nll: float
    indices: Tensor
    loss: Tensor
    loss_without: Tensor
    start: int
    passes: float

    def __repr__(self) -> str:
        return (
            f"ReplayedLevel({self.level:.4g} +- {self.standard_error:.2g} nats per example, "
            f"training loss {self.train_nll:.4g}; {len(self.indices):,} examples left out after "
            f"step {self.start:,}, {self.passes:.1f} passes)"
        )


def replayed_level(
    model: nn.Module,
    data: Data,
    training: Training,
    *,
    share: float = SHARE,
    start: int = 0,
    likelihood: str | Likelihood = "categorical",
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    before_step: Callable[[nn.Module], object] | None = None,
    seed: int = 0,
    progress: bool = True,
) -> ReplayedLevel:
    r"""The loss on unseen data, also of a net that knows its training data by heart.

    .. math:: \frac{1}{N} \sum_i \ell_i(\theta) + \overline{\ell_j(\theta_{\setminus F}) -
        \ell_j(\theta)}, \qquad j \in F

    A memorised net has forgotten what it would say of an example that it had not seen, and no
    estimate at its end has the size of it. So a fold F is left out of the recorded training, from
    its start or an early checkpoint on, and the rest is trained again, once. Where the steps named
    their examples, the mean over the fold is brought to that over all data by their prequential
    loss.

    Args:
        model: that was trained; it is not changed.
        data: the training data, in the order of the recorded indices.
        training: of ``engram.record(optimizer, model, replay=True)``.
        share: of the examples that are left out, chosen at random.
        start: step to begin after; the last checkpoint up to there is taken. Later is cheaper, and
            what the fold has done before stays in the weights: on a memorised CNN the level from a
            tenth of the steps on was 0.87 of that from the start, from a third on 0.58
            (docs/results/replayed-level.md).
        likelihood: whose losses are compared.
        loss: of a batch in the training, where it is not the mean of that likelihood's.
        optimizer, before_step: as in :func:`engram.replay`.
        seed: of the choice.
        progress: show a bar.

    Returns:
        The level with its standard error, and both losses of every example that was left out.

    Example:
        >>> import torch, engram
        >>> model, x = nn.Linear(2, 2), torch.randn(40, 2)
        >>> y = (x[:, 0] > 0).long()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> training = engram.record(optimizer, model, replay=True)
        >>> for batch in torch.arange(40).repeat(5).view(-1, 8):
        ...     training.note(batch)
        ...     optimizer.zero_grad()
        ...     nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        ...     _ = optimizer.step()
        >>> found = engram.replayed_level(model, (x, y), training)
        >>> len(found.indices), found.passes
        (4, 4.5)

    Reference:
        Nickl et al., *The Memory-Perturbation Equation*, NeurIPS 2023.
    """
    share = fraction("share", share, "use share=0.1")
    chosen = resolve(likelihood)
    path = Path(model, data, training, loss or loss_of(chosen), optimizer, before_step)
    number = path.batches.num_data
    count = whole("number of examples left out", round(share * number), 1, number - 1)
    generator = torch.Generator().manual_seed(seed_number(seed))
    fold = torch.randperm(number, generator=generator)[:count].sort().values
    begun = path.checkpoint(start)
    replayed = path.walked(begun, fold, progress=progress)
    losses = _losses(path, path.model, chosen, torch.arange(number), progress)
    without = _losses(path, replayed.model, chosen, fold, progress=False)
    increase = without - losses[fold]
    difficulty = prequential(training, data)
    if difficulty is None or not bool(difficulty.isfinite().all()):
        difficulty = torch.zeros(number)
    difficulty = difficulty.double()
    gain = increase_of_all(increase, difficulty[fold], float(difficulty.mean()))
    return ReplayedLevel(
        float(losses.mean()) + gain,
        standard_error(increase, difficulty[fold]),
        float(losses.mean()),
        fold,
        losses[fold],
        without,
        begun.step,
        replayed.examples / number,
    )


def _losses(
    path: Path, model: nn.Module, likelihood: Likelihood, indices: Tensor, progress: bool
) -> Tensor:
    """Of examples under a model in eval mode, which is as it was afterwards."""
    columns = Columns(len(indices))
    with state_preserved(model), Bar(len(indices), "losses", progress) as bar:
        for batch in path.batches.subset(indices, BATCH):
            batch = batch.to(device_of(model))
            outputs = outputs_at(model, {}, batch)
            prepared = likelihood.prepare(outputs, batch.targets)
            columns.add({"loss": likelihood.loss(outputs, prepared).double()})
            bar.update(len(batch))
    return columns["loss"]
