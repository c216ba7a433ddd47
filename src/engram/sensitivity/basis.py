"""How a result was computed: the facts about posterior and likelihood that later calls need."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from engram.core.storage.values import ADDED_LATER
from engram.errors import LikelihoodError, ModelMismatchError
from engram.likelihoods import Likelihood, resolve
from engram.likelihoods.remembered import Remembered
from engram.posteriors.gaussian import SAME_PRIOR, Posterior


@dataclass(frozen=True)
class Basis:
    """Facts about how a result was computed; None where one is not known.

    Args:
        estimator: the rule.
        structure, curvature: of the posterior.
        whole_matrix: whether its precision couples all parameters: there is no richer structure.
        prior_precision: of the posterior; its mean over the entries where it differs.
        prior_by_name: of each parameter, where parameters have different ones.
        likelihood: of the data; only remembered where it was a function's and the result comes
            from a file.
        posterior_digest: by which the same posterior is known again.
        threshold: the output above which a binary classifier with one output says 1.
        loss_unit: of the losses; another one than nats where they are no log likelihoods.
        prior_fitted: whether nobody gave the prior precision, and the weights' own was taken.
        in_eval_mode: kinds of layers of the model in training that were in eval mode for this.
        not_estimated: what training does and the estimate does not, in words.
        stopped: whether the posterior has the time of a training that was stopped in it.
        along: whether the estimate goes along the checkpoints of that training.
        training_seconds: that it took; None where that is not known.
        walkable: whether checkpoints of it were recorded, along which an estimate can go.
    """

    estimator: str | None = None
    structure: str | None = None
    curvature: str | None = None
    whole_matrix: bool = False
    prior_precision: float | None = None
    prior_by_name: Mapping[str, float] = field(default_factory=dict)
    likelihood: Likelihood | Remembered | None = None
    posterior_digest: str | None = None
    threshold: float | None = None
    loss_unit: str = "nats"
    in_eval_mode: tuple[str, ...] = ()
    prior_fitted: bool = field(default=False, metadata=ADDED_LATER)
    not_estimated: tuple[str, ...] = field(default=(), metadata=ADDED_LATER)
    stopped: bool = field(default=False, metadata=ADDED_LATER)
    along: bool = field(default=False, metadata=ADDED_LATER)
    training_seconds: float | None = field(default=None, metadata=ADDED_LATER)
    walkable: bool = field(default=False, metadata=ADDED_LATER)

    @classmethod
    def of(
        cls,
        estimator: str,
        posterior: Posterior,
        likelihood: Likelihood,
        threshold: float | None = None,
        in_eval_mode: tuple[str, ...] = (),
        not_estimated: tuple[str, ...] = (),
        along: bool = False,
        walkable: bool = False,
    ) -> Basis:
        """The facts of a posterior and a likelihood."""
        return cls(
            estimator,
            posterior.structure,
            str(posterior.curvature),
            posterior.is_whole_matrix,
            posterior.prior_precision,
            dict(posterior.prior_by_name),
            likelihood,
            posterior.digest,
            threshold,
            likelihood.unit,
            in_eval_mode,
            posterior.prior_fitted,
            not_estimated,
            posterior.stopped,
            along,
            None if posterior.training is None else posterior.training.seconds,
            walkable,
        )

    @property
    def known_likelihood(self) -> Likelihood:
        """The likelihood; LikelihoodError where there is none, or only its name is left."""
        if isinstance(self.likelihood, Likelihood):
            return self.likelihood
        raise LikelihoodError(
            f"the likelihood of the result, {self.likelihood}"
            if self.likelihood
            else "a result of a model with a likelihood",
            "none: a function cannot be saved" if self.likelihood else "one without",
            "pass likelihood= to engram.load, made from the same function as before"
            if self.likelihood
            else "pass a result of engram.sensitivities",
        )

    def with_likelihood(self, given: str | Likelihood) -> Basis:
        """The same with the likelihood itself, where a file could only name it."""
        likelihood = resolve(given)
        self.check_likelihood(likelihood)
        return replace(self, likelihood=likelihood)

    def check_likelihood(self, likelihood: Likelihood) -> None:
        """Raise if the result was computed with another likelihood."""
        mine = self.likelihood
        if mine is not None and mine.identity != likelihood.identity:
            raise ModelMismatchError(
                f"a posterior with the likelihood of the result, {mine}",
                repr(likelihood),
                "pass the posterior that the result was computed with",
            )

    def check_posterior(self, posterior: Posterior) -> None:
        """Raise unless the result was computed with this very posterior."""
        if self.posterior_digest != posterior.digest:
            raise ModelMismatchError(
                f"the posterior that the result was computed with ({self.structure})",
                f"another one, {posterior!r}",
                "pass the posterior that was given to engram.sensitivities",
            )

    def check_priors(self, posterior: Posterior) -> None:
        """Raise unless the posterior has the priors of the result's, whatever its structure."""
        if self.prior_precision is None:
            return
        names = posterior.mean
        mine = [self.prior_by_name.get(name, self.prior_precision) for name in names]
        theirs = [posterior.prior_of(name) for name in names]
        if not all(map(partial(math.isclose, rel_tol=SAME_PRIOR), mine, theirs)):
            raise ModelMismatchError(
                f"a posterior with the prior precision of the result, {self.prior_precision:g}",
                f"{posterior!r}",
                "fit it with the same prior_precision: rows of two objectives do not mix",
            )
