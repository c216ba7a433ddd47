"""A model, its training data and its posterior: opened, checked and planned once.

Every question about a trained model begins in the same way. The posterior is one of the model at
its present weights; the likelihood comes with it; the model is put into eval mode, its passes are
planned and the plan is checked against autograd. Whoever has a :class:`Problem` has all of that,
and passes it on to what it calls instead of opening the model again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from engram.core.arguments import AUTO
from engram.core.data.batches import Batches, Data
from engram.core.processes.group import Processes
from engram.engine.prepare import Engine
from engram.engine.session import ALONE, Session, session
from engram.likelihoods import Likelihood
from engram.posteriors.gaussian import Posterior
from engram.posteriors.laplace_torch import as_posterior


@dataclass(frozen=True)
class Problem:
    """A posterior, and the model and data that it belongs to, ready for passes.

    Args:
        session: the model in eval mode with the plan of its passes, the data and the likelihood.
        posterior: at the model's present weights, fitted with that likelihood.
    """

    session: Session
    posterior: Posterior

    @property
    def model(self) -> nn.Module:
        """The caller's model, in eval mode while this lasts."""
        return self.session.model

    @property
    def batches(self) -> Batches:
        """The data."""
        return self.session.batches

    @property
    def num_data(self) -> int:
        """N."""
        return self.session.batches.num_data

    @property
    def likelihood(self) -> Likelihood:
        """That of the posterior."""
        return self.session.likelihood


class Opener:
    """Opens a model again and again, and copies of it at other weights; planned the first time.

    Args:
        data: with targets.
        likelihood: of the data.
        engine: of a model that was opened before.
    """

    def __init__(self, data: Data, likelihood: Likelihood, engine: Engine | None = None) -> None:
        self.data, self.likelihood, self.engine = data, likelihood, engine

    @contextmanager
    def session(
        self,
        model: nn.Module,
        batch_size: int | str = AUTO,
        progress: bool = True,
        peers: Processes = ALONE,
        only: Collection[str] | None = None,
    ) -> Iterator[Session]:
        """The model, opened for passes; it is as before when this ends, in any way."""
        given = (model, self.data, self.likelihood, batch_size, progress)
        with session(*given, planned=self.engine, peers=peers, only=only) as opened:
            self.engine = opened.engine
            yield opened


@contextmanager
def opened_problem(
    model: nn.Module,
    data: Data,
    posterior: Posterior | Any,
    batch_size: int | str = AUTO,
    progress: bool = True,
    peers: Processes = ALONE,
    only: Collection[str] | None = None,
) -> Iterator[Problem]:
    """Open a model with its data and posterior; it is as before when this ends, in any way.

    Args:
        model: trained; not changed.
        data: with targets.
        posterior: of this model at its present weights; a fitted laplace-torch object works too.
        batch_size: most examples at a time; ``"auto"`` is what the free memory has room for.
        progress: show bars where passes take longer than a few seconds.
        peers: processes that share the examples.
        only: parameters that are wanted, where the others are to be held fixed.
    """
    posterior = as_posterior(posterior, model)
    given = (model, data, posterior.known_likelihood, batch_size, progress)
    with session(*given, peers=peers, only=only) as opened:
        yield Problem(opened, posterior)
