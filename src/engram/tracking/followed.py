r"""What a training would know of some examples had they never been in it, along the way.

What a model has learnt by heart leaves no trace at its present weights: the residual vanishes, and
the curvature with it. What the example did to the weights on the way is still in them. The
memory-perturbation equation of every single step, with what came of it since, is a training beside
the training: a :class:`~engram.tracking.twin.Twin` that takes every step with a weight of zero on
the followed examples. They are left out together, and are few among all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engram.core.arguments import whole
from engram.core.data.batches import Batches, Data
from engram.core.errors import ArgumentError, DataError
from engram.core.storage.values import objects, typed, wrong
from engram.engine.witness import Witness
from engram.likelihoods import Likelihood
from engram.tracking.announced import Announced, check_length
from engram.tracking.history import Record
from engram.tracking.twin import Twin
from engram.tracking.visits import Indices, check_batch_indices, check_loss, loss_factor

FOLLOWED = "the saved state of followed examples"
SEED = 0  # of the choice of examples
LARGEST_SHARE = 0.5  # of the data that may be left out together


class Followed:
    r"""The losses of some examples at the weights of a training that left them out.

    .. math:: \bar\ell + \bar d + \beta\, (\bar h_{\mathrm{all}} - \bar h), \qquad
        d_i = \ell_i(\theta') - \ell_i(\theta)

    with :math:`\theta'` the twin's weights, bars for means over the followed examples, and the last
    term for how easy these happen to be; see :func:`increase_of_all`.

    Args:
        model, optimizer, data, likelihood: of the training; make it before the first step.
        count: examples that are followed, chosen at random.
        reduction: of the user's loss over a batch, ``mean`` or ``sum``.

    Attributes:
        indices: of the followed examples.
        twin: trained without them.

    Example:
        >>> from engram.likelihoods import resolve
        >>> model = nn.Linear(3, 2)
        >>> x, y = torch.randn(40, 3), torch.randint(0, 2, (40,))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> followed = Followed(model, optimizer, (x, y), resolve("categorical"), 10, "mean")
        >>> for _ in range(5):
        ...     with followed.step(torch.arange(40), y, 1.0):
        ...         nn.functional.cross_entropy(model(x), y).backward()
        ...     _ = optimizer.step()
        >>> followed.twin.missed
        0
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        data: Data,
        likelihood: Likelihood,
        count: int,
        reduction: str,
    ) -> None:
        self.model, self.likelihood, self.reduction = model, likelihood, reduction
        self.optimizer, self.batches = optimizer, Batches(data, 1)
        self.announced, self.steps = Announced(self.batches), 0
        num_data = self.batches.num_data
        count = _check_count(count, num_data)
        generator = torch.Generator().manual_seed(SEED)
        self.indices = torch.randperm(num_data, generator=generator)[:count]
        self.kept = torch.ones(num_data, dtype=torch.float32)
        self.kept[self.indices] = 0.0
        self.twin = Twin(model, optimizer)
        self.total, self.total_of_all, self.updates = (
            torch.zeros(count, dtype=torch.float64),
            0.0,
            0,
        )

    @contextmanager
    def step(self, indices: Indices, targets: Tensor | None, scale: float) -> Iterator[None]:
        """The step that runs inside is taken by the twin too, without the followed examples."""
        check_length(self.batches)
        chosen = check_batch_indices(indices, self.batches.num_data)
        factor = loss_factor(self.optimizer, scale, self.reduction, len(chosen))
        witness = Witness(self.model, len(chosen))
        self.twin.begin()
        try:
            with witness.watching():
                yield
            witness.check()
            given = self.announced.targets(witness, chosen, targets, self.steps)
            self._check(witness, given, factor)
            self.learn(witness, chosen, given, factor)
        finally:
            witness.release()
        self.steps += 1

    def _check(self, witness: Witness, targets: Tensor, factor: float) -> None:
        """The loss must be the likelihood's; one that is not finite is no reason to stop."""
        outputs, gradient = witness.outputs, witness.output_gradient
        if torch.isfinite(outputs).all() and torch.isfinite(gradient).all():
            prepared = self.likelihood.prepare(outputs, targets.to(outputs.device))
            residual = self.likelihood.residual(outputs, prepared).detach()
            check_loss(gradient, residual, factor, self.likelihood)

    def learn(self, witness: Witness, chosen: Tensor, targets: Tensor, factor: float) -> None:
        """Give the twin the gradient of a batch, without the followed examples.

        Args:
            witness: of the model's call, after its backward pass.
            chosen: indices of the batch.
            targets: of the batch.
            factor: the user's loss over the sum of the likelihood's losses.
        """
        kept = self.kept[chosen].to(witness.outputs)

        def objective(own: Tensor) -> Tensor:
            prepared = self.likelihood.prepare(own, targets.to(own.device))
            losses = self.likelihood.loss(own, prepared)
            return factor * (kept * losses).sum()

        self.twin.learn(witness, objective)

    def estimated(self, record: Record, losses: Tensor) -> Record:
        """The record with the estimate of the training without the followed examples.

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
                "every step of the training inside `with tracker.follow(indices, targets):` or "
                "`with tracker.step(indices, targets):`",
                f"{self.twin.missed:,} outside",
                "put the model's call and backward of every batch inside, or leave follow out",
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
        values = objects(state or dict.fromkeys((*kinds, "twin")), FOLLOWED, (*kinds, "twin"))
        given = values["indices"] if state else torch.zeros(0)
        if not isinstance(given, Tensor) or given.shape != self.indices.shape:
            raise DataError(
                f"a state with {len(self.indices):,} followed examples",
                f"one with {given.numel() if isinstance(given, Tensor) else 0:,}",
                "resume with the follow= that the run was started with",
            )
        found = {name: typed(kind, values[name], FOLLOWED) for name, kind in kinds.items()}
        for name in ("indices", "total"):
            wanted = getattr(self, name)
            if found[name].shape != wanted.shape or found[name].dtype != wanted.dtype:
                raise wrong(f"{FOLLOWED}: {name}", f"{wanted.dtype} {list(wanted.shape)}", given)
        if not bool(((given >= 0) & (given < len(self.kept))).all()):
            raise wrong(FOLLOWED, "examples of the data", given)
        return found


def given_followed(followed: Followed | None) -> Followed:
    """ArgumentError where there is none."""
    if followed is None:
        raise ArgumentError(
            "a tracker that follows examples",
            "one without follow",
            "make it with Tracker(..., follow=1000)",
        )
    return followed


def increase_of_all(increase: Tensor, difficulty: Tensor, difficulty_of_all: float) -> float:
    r"""The mean increase over all data, from that of a few examples.

    .. math:: \bar d + \beta\, (\bar h_{\mathrm{all}} - \bar h), \qquad
        \beta = \mathrm{cov}(d_i, h_i) / \mathrm{var}(h_i)

    The regression estimator of survey sampling: an example that took long to learn is one that is
    got wrong when it is left out. So by how much the few happen to be easier than all data, whose
    mean is known, can be taken out.

    Args:
        increase: d of the few, [m].
        difficulty: h of the few, [m]: the mean of an example's loss over the training so far.
        difficulty_of_all: its mean over all data.

    Example:
        >>> difficulty = torch.tensor([0.1, 0.3, 0.5])
        >>> round(increase_of_all(2 * difficulty, difficulty, 0.4), 6)
        0.8
    """
    centred = difficulty - difficulty.mean()
    spread = float(centred.square().sum())
    slope = float((increase * centred).sum()) / spread if spread > 0 else 0.0
    return float(increase.mean()) + slope * (difficulty_of_all - float(difficulty.mean()))


def _check_count(count: int, num_data: int) -> int:
    """At most half of the data."""
    highest = max(1, int(LARGEST_SHARE * num_data))
    remedy = "use a tenth of the data, at most half of the data and some thousands"
    return whole("number of examples to follow", count, 1, highest, remedy)
