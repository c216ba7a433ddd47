r"""The prior precision that a model's weights fit best, for where none is given.

At a minimum of the regularised sum of the losses :math:`\sum_i \nabla \ell_i + \delta \theta = 0`,
so that the weights themselves say what they were regularised with:

.. math:: \delta = \arg\min_{\delta} \Bigl\| \sum_i \nabla \ell_i + \delta \theta \Bigr\|
    = -\frac{\langle \theta, \sum_i \nabla \ell_i \rangle}{\|\theta\|^2}

Short of a minimum it is the regulariser whose minimum they are nearest to, as far as the gradient
tells: stopping early has the effect of a stronger one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engram.core.parameters import trainable
from engram.core.state.model import device_of
from engram.engine.gradient_accumulator import GradientAccumulator
from engram.engine.session import Session
from engram.errors import PosteriorError
from engram.posteriors.gaussian import Posterior


@dataclass(frozen=True)
class FittingPrior:
    """The regulariser that weights fit best.

    Attributes:
        prior_precision: delta, above 0.
        relative_gradient: what it leaves of the gradient, over the norms of its two parts: 0 at a
            minimum, 1 far from one.
    """

    prior_precision: float
    relative_gradient: float

    def noted(self, posterior: Posterior) -> Posterior:
        """The posterior with this prior, which says that nobody gave it."""
        words = f"fits the weights best, relative gradient {self.relative_gradient:.2g}"
        settings = {**posterior.settings, "prior_precision": words}
        return replace(posterior, settings=settings, prior_fitted=True)


def fitting_prior(opened: Session) -> FittingPrior:
    """The regulariser that an opened model's weights fit best: a backward pass over the data.

    Raises:
        PosteriorError: where the losses do not pull the weights away from 0, as they do at any
            regulariser's minimum: a model that is untrained, or all 0.
    """
    total, parameters = GradientAccumulator(), trainable(opened.model)
    for observed in opened.passes("prior precision", opened.own_rows()):
        found = opened.pull_back(observed.batch, observed.residual, parameters)
        for name, gradient in found.items():
            total.add(name, gradient)
    total.take_sums(opened.peers, device_of(opened.model))
    weights = {name: p.detach() for name, p in parameters.items()}
    delta, relative = total.fitting_share(weights, lambda name: 1.0)
    if not delta > 0:
        raise PosteriorError(
            "a prior_precision, or weights that are near the minimum of some regulariser",
            "none, and weights that the losses do not pull away from 0",
            "pass prior_precision=, N times the weight decay of the mean loss, or train the model",
        )
    return FittingPrior(delta, relative)
