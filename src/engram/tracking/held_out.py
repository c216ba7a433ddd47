r"""Held-out estimate: losses of some examples at the weights of a twin that trains without them.

What a model has memorised leaves no trace at its present weights: the residual vanishes, and the
curvature with it. What the example did to the weights on the way is still in them. The
memory-perturbation equation of every single step, with what came of it since, is a training beside
the training: a twin that takes every step with a weight of zero on the held-out examples
(:mod:`engram.tracking.held_out_twin`). They are left out together, and are few among all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engram.core.arguments import whole
from engram.core.processes.group import Processes
from engram.core.storage.values import objects, typed, wrong
from engram.errors import ArgumentError, DataError
from engram.evidence.regression_estimator import increase_of_all
from engram.tracking.held_out_twin import HeldOutTwin
from engram.tracking.history import Record
from engram.tracking.training_steps import Training, TrainingStep

HELD_OUT = "the saved state of held-out examples"
SEED = 0  # of the choice of examples, so that a resumed run holds out the same
LARGEST_SHARE = 0.5  # of the data that may be held out: the twin has to learn what is left


class HeldOut:
    r"""The losses of some examples at the weights of a training that left them out.

    .. math:: \bar\ell + \bar d + \beta\, (\bar h_{\mathrm{all}} - \bar h), \qquad
        d_i = \ell_i(\theta') - \ell_i(\theta)

    with :math:`\theta'` the twin's weights, bars for means over the held-out examples, and the last
    term for how easy these happen to be; see
    :func:`engram.evidence.regression_estimator.increase_of_all`.

    Args:
        training: that the twin runs beside; make it before the first step.
        count: examples that are held out, chosen at random.

    Attributes:
        indices: of the held-out examples.
        twin: trained without them.

    Example:
        >>> import engram
        >>> from torch import nn
        >>> model = nn.Linear(3, 2)
        >>> x, y = torch.randn(40, 3), torch.randint(0, 2, (40,))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> tracker = engram.Tracker(model, optimizer, (x, y), held_out=10)
        >>> for _ in range(5):
        ...     with tracker.twin_step(torch.arange(40), y):
        ...         nn.functional.cross_entropy(model(x), y).backward()
        ...     _ = optimizer.step()
        >>> tracker.held_out.twin.missed
        0
    """

    def __init__(self, training: Training, count: int) -> None:
        self.batches, self.likelihood = training.batches, training.likelihood
        num_data = self.batches.num_data
        count = _check_count(count, num_data)
        generator = torch.Generator().manual_seed(SEED)
        self.indices = torch.randperm(num_data, generator=generator)[:count]
        self.kept = torch.ones(num_data, dtype=torch.float32)
        self.kept[self.indices] = 0.0
        self.twin = HeldOutTwin(training.model, training.optimizer)
        self.total = torch.zeros(count, dtype=torch.float64)
        self.total_of_all, self.updates = 0.0, 0

    def begin_step(self) -> None:
        """Before a forward pass of the training."""
        self.twin.begin()

    def take(self, step: TrainingStep) -> None:
        """Give the twin the gradient of the batch, without the held-out examples."""
        kept = self.kept[step.indices].to(step.call.outputs)

        def objective(own: Tensor) -> Tensor:
            prepared = self.likelihood.prepare(own, step.targets.to(own.device))
            losses = self.likelihood.loss(own, prepared)
            return step.factor * (kept * losses).sum()

        self.twin.learn(step.call, objective)

    def estimated(self, record: Record, losses: Tensor) -> Record:
        """The record with the estimate of the training without the held-out examples.

        Args:
            record: of an update or of a streamed epoch.
            losses: of all data at it, [N]; NaN where they are not known.
        """
        self._check_told()
        if not math.isfinite(record.train):
            return record
        own = losses[self.indices].cpu().double()
        seen = own.isfinite()
        if not seen.any():
            return replace(record, estimate=math.nan, examples=0)
        self.total += torch.where(seen, own, record.train)
        self.total_of_all += record.train
        self.updates += 1
        left_out = self.twin.losses(self.batches, self.indices[seen], self.likelihood)
        difficulty, of_all = self.total[seen] / self.updates, self.total_of_all / self.updates
        increase = increase_of_all(left_out - own[seen], difficulty, of_all)
        return replace(record, estimate=record.train + increase, examples=int(seen.sum()))

    def _check_told(self) -> None:
        if self.twin.missed:
            raise ArgumentError(
                "every step of the training inside `with tracker.twin_step(indices, targets):` or "
                "`with tracker.step(indices, targets):`",
                f"{self.twin.missed:,} outside",
                "put the model's call and backward of every batch inside, or leave held_out out",
            )

    def state_dict(self) -> dict[str, Any]:
        """What has to be remembered across a restart."""
        return {
            "indices": self.indices,
            "twin": self.twin.state_dict(),
            "total": self.total.clone(),
            "total_of_all": self.total_of_all,
            "updates": self.updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave."""
        found = self._checked(state)
        self.twin.load_state_dict(state["twin"])
        self.indices = found["indices"].cpu()
        self.kept.fill_(1.0)[self.indices] = 0.0
        self.total, self.total_of_all = found["total"].cpu().clone(), found["total_of_all"]
        self.updates = found["updates"]

    def _checked(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """DataError for the state of other examples, StorageError for none at all."""
        kinds = {"indices": Tensor, "total": Tensor, "total_of_all": float, "updates": int}
        values = objects(state or dict.fromkeys((*kinds, "twin")), HELD_OUT, (*kinds, "twin"))
        given = values["indices"] if state else torch.zeros(0)
        if not isinstance(given, Tensor) or given.shape != self.indices.shape:
            raise DataError(
                f"a state with {len(self.indices):,} held-out examples",
                f"one with {given.numel() if isinstance(given, Tensor) else 0:,}",
                "resume with the held_out= that the run was started with",
            )
        found = {name: typed(kind, values[name], HELD_OUT) for name, kind in kinds.items()}
        for name in ("indices", "total"):
            wanted = getattr(self, name)
            if found[name].shape != wanted.shape or found[name].dtype != wanted.dtype:
                raise wrong(f"{HELD_OUT}: {name}", f"{wanted.dtype} {list(wanted.shape)}", given)
        if not bool(((given >= 0) & (given < len(self.kept))).all()):
            raise wrong(HELD_OUT, "examples of the data", given)
        return found


def _check_count(count: int, num_data: int) -> int:
    """At most half of the data."""
    highest = max(1, int(LARGEST_SHARE * num_data))
    remedy = "use a tenth of the data, at most half of the data and some thousands"
    return whole("number of held-out examples", count, 1, highest, remedy)


def check_alone(peers: Processes) -> None:
    """A twin takes this process's gradients, and DDP's steps are means over all of them."""
    if peers.count > 1:
        raise ArgumentError(
            "held_out in a training of one process",
            f"{peers.count} processes that train together",
            "leave held_out out, or train on one",
        )


def check_whole(examples: int | None) -> None:
    """What is held out is compared with the losses of all examples."""
    if examples is not None:
        raise ArgumentError(
            "held_out with updates that look at all examples",
            f"examples={examples!r}",
            "leave one of the two out",
        )


def check_given(held_out: HeldOut | None) -> HeldOut:
    """ArgumentError for a tracker without a twin."""
    if held_out is None:
        raise ArgumentError(
            "a tracker with a held-out twin",
            "one without held_out",
            "make it with Tracker(..., held_out=1000)",
        )
    return held_out
