r"""Influence traced over a training, with the optimizer's own preconditioner.

.. math:: \sum_t \eta_t \, \nabla\ell_j(\theta_t)' \, S_t^{-1} \, \nabla\ell_i(\theta_t)

for training examples i and test examples j: how much, to first order, the loss of j would be higher
at the end if the steps had not followed i. :math:`S_t` is the precision that the optimizer has at
step t, of the sum of the losses, and :math:`\eta_t` its learning rate; with :math:`S = I` it is
TracIn. The terms are added where :meth:`InfluenceTrace.add` is called, each with the learning rates
of all steps since the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engram.core.arguments import whole
from engram.core.data.batches import Batches, Data
from engram.core.data.columns import finite
from engram.core.parameters import Layout, Named, trainable
from engram.core.selection import check_indices
from engram.engine.session import Session
from engram.errors import ArgumentError
from engram.posteriors.gaussian import Posterior
from engram.problem import Opener
from engram.sensitivity.trajectory.influence import products, stepped

if TYPE_CHECKING:
    from engram.tracking.tracker import Tracker


class InfluenceTrace:
    """The sum so far of learning rate times preconditioned inner product, by pair.

    Args:
        model, optimizer: in training.
        opener: of the model with its training data.
        test: data with targets.
        posterior: gives the precision at the present weights.
        num_data: N.
        examples: positions of the training examples; all if not given.

    Attributes:
        values: the sum, [examples, test]; positive where the training example has lowered the
            loss of the test example.
        examples: positions of the training examples.
        terms: how often it was added to.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        opener: Opener,
        test: Data,
        posterior: Callable[[], Posterior],
        num_data: int,
        examples: Sequence[int] | Tensor | None = None,
    ) -> None:
        self.model, self.optimizer, self.opener, self.test = model, optimizer, opener, test
        self._posterior = posterior
        self.examples = check_indices(examples, num_data, "name each example once")
        count = Batches(test, 1).num_data
        self.values = torch.zeros(len(self.examples), count, dtype=torch.float64)
        self.terms = 0
        self._rates: dict[str, float] = {}
        self._hook = optimizer.register_step_post_hook(self._stepped)

    @classmethod
    def of(
        cls, tracker: Tracker, test: Data, examples: Sequence[int] | Tensor | None = None
    ) -> InfluenceTrace:
        """A trace of a tracker's training, with the tracker's posterior.

        Args:
            tracker: of the model and optimizer.
            test: data with targets.
            examples: positions of the training examples; all if not given.

        Example:
            >>> import engram
            >>> model, x, y = nn.Linear(3, 2), torch.randn(20, 3), torch.arange(20) % 2
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> tracker = engram.Tracker(model, optimizer, (x, y))
            >>> trace = InfluenceTrace.of(tracker, (x[:2], y[:2]))
            >>> for _ in range(3):
            ...     optimizer.zero_grad()
            ...     nn.functional.cross_entropy(model(x), y).backward()
            ...     _ = optimizer.step()
            ...     _ = trace.add()
            >>> trace.values.shape, trace.terms
            (torch.Size([20, 2]), 3)
        """
        known = (tracker.model, tracker.optimizer, tracker.opener)
        return cls(*known, test, tracker.posterior, tracker.num_data, examples)

    def _stepped(self, optimizer: Optimizer, *given: Any) -> None:
        """Add the learning rates of a step, each parameter's its own."""
        names = {id(p): name for name, p in trainable(self.model).items()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name is not None:
                    rate = float(group["lr"])
                    self._rates[name] = self._rates.get(name, 0.0) + rate

    @property
    def is_due(self) -> bool:
        """Whether the optimizer has stepped since the last term."""
        return bool(self._rates)

    def add(self, posterior: Posterior | None = None) -> Tensor:
        """Add the term of the present weights, with the rates of all steps since the last one.

        Args:
            posterior: at the present weights; that of the optimizer if not given.

        Returns:
            The term, [examples, test].
        """
        if not self.is_due:
            raise ArgumentError(
                "a step of the optimizer since the last term",
                "none",
                "call it after optimizer.step()",
            )
        rates, self._rates = self._rates, {}
        posterior = self._posterior() if posterior is None else posterior
        with self.opener.session(self.model, progress=False) as opened:
            term = finite("influences", self._term(opened, posterior, rates)).double()
        self.values += term
        self.terms += 1
        return term

    def _term(self, opened: Session, posterior: Posterior, rates: dict[str, float]) -> Tensor:
        covered = {n: p for n, p in trainable(opened.model).items() if n in posterior.block_of}
        layout = Layout.of(covered)
        tested = replace(opened, batches=Batches(self.test, opened.batches.batch_size))

        def step(gradient: Named) -> Named:
            return _rated(posterior.solve(gradient), rates)

        columns = [
            products(opened, vectors, chosen=self.examples)
            for vectors in stepped(tested, layout, step)
        ]
        return torch.cat(columns, dim=1)

    def top(self, test: int, count: int = 10) -> list[tuple[int, float]]:
        """The training examples that have helped a test example most, with their values."""
        number = whole("test", test, 0, self.values.shape[1] - 1, "name a test example")
        count = min(whole("count", count, remedy="ask for top(0, 10)"), len(self.examples))
        found = self.values[:, number].topk(count)
        return [
            (int(self.examples[i]), float(value))
            for value, i in zip(found.values, found.indices, strict=True)
        ]

    def close(self) -> None:
        """Stop listening to the optimizer; the values stay."""
        self._hook.remove()

    def __repr__(self) -> str:
        rows, columns = self.values.shape
        return f"InfluenceTrace({rows:,} examples x {columns:,} test examples, {self.terms} terms)"


def _rated(step: Named, rates: dict[str, float]) -> Named:
    return {name: rates.get(name, 0.0) * value for name, value in step.items()}
