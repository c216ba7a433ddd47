"""What a change of the parameters does to outputs and losses of any data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engram.core.data.batches import Batch
from engram.core.data.columns import Columns
from engram.core.parameters import Named, trainable
from engram.core.state.model import outputs_at
from engram.engine.gradient_accumulator import DiscardGradients
from engram.engine.session import Observed, Session
from engram.errors import LikelihoodError, NonFiniteError
from engram.likelihoods import Likelihood
from engram.posteriors.gaussian import Posterior
from engram.sensitivity.estimators.base import Estimator, Setting
from engram.sensitivity.estimators.paper import ESTIMATOR

#: Outputs of a batch without the group
Move = Callable[[Observed], Tensor]


@dataclass(frozen=True, eq=False)
class Effect:
    """Outputs and losses of some examples with the group and without it; nats per example.

    Of sequences the outputs are the log probabilities of their tokens.
    """

    indices: Tensor
    outputs: Tensor
    outputs_without: Tensor
    loss: Tensor
    loss_without: Tensor
    likelihood: Likelihood = field(repr=False)

    @property
    def prediction_deviation(self) -> Tensor:
        """Of the predictions, sigma(f + d) - sigma(f) with the deviation d of the outputs."""
        self._check_outputs()
        mean = self.likelihood.mean
        return mean(self.outputs_without) - mean(self.outputs)

    @property
    def linearised_prediction_deviation(self) -> Tensor:
        r"""sigma'(f) d, elementwise.

        With ``estimator="linear"`` and ``at="linearised"`` it is the paper's first approximation of
        a group's deviation in its own predictions, :math:`\Lambda V_M e_M` with all cross terms;
        with ``estimator="paper"`` the second, without them.
        """
        self._check_outputs()
        derivative = self.likelihood.mean_derivative(self.outputs)
        return derivative * (self.outputs_without - self.outputs)

    def _check_outputs(self) -> None:
        if not self.likelihood.keeps_outputs:
            raise LikelihoodError(
                "an effect with all outputs of an example",
                f"one with {self.likelihood!r}, which keeps the losses alone",
                "use loss_without - loss",
            )

    @property
    def is_finite(self) -> bool:
        """Whether all losses and outputs are numbers."""
        parts = (self.outputs_without, self.loss, self.loss_without)
        return all(bool(torch.isfinite(part).all()) for part in parts)

    @property
    def change(self) -> float:
        """Mean loss without the group minus with it."""
        return float((self.loss_without - self.loss).double().mean())


def effect(opened: Session, indices: Tensor | None, delta: Named, at: str) -> Effect:
    """The effect of a change of the parameters, at the moved parameters or linearised."""
    moved = {n: p.detach() + delta[n] for n, p in trainable(opened.model).items() if n in delta}

    def along_tangent(observed: Observed) -> Tensor:
        return observed.outputs + observed.trace.tangent(delta)

    def at_moved(observed: Observed) -> Tensor:
        return outputs_at(opened.model, moved, observed.batch)

    return effect_of(opened, indices, along_tangent if at == "linearised" else at_moved)


def effect_of(opened: Session, indices: Tensor | None, move: Move) -> Effect:
    """The effect of any move of the outputs on the examples with these indices; None for all."""
    own = opened.own_rows(indices)
    collected = _Collected(opened, opened.batches.num_data if own is None else len(own))
    for observed in opened.passes("effect", own):
        collected.add(observed, move(observed))
    return collected.effect()


def paper_effect(
    opened: Session,
    posterior: Posterior,
    chosen: Tensor,
    weights: Tensor,
    rule: Estimator = ESTIMATOR,
) -> tuple[Effect, bool]:
    """Each example moved by its own diag(V) e, as the authors' leave-one-class-out estimate.

    And whether some weight beyond 1 makes an example's curvature more than that of all data.

    Args:
        opened, posterior: model, data and their posterior.
        chosen, weights: the group, [M].
        rule: the paper's, or its expectation over samples.
    """
    weight_of = dict(zip(chosen.tolist(), weights.tolist(), strict=True))
    setting = Setting(opened.likelihood, posterior, 0, DiscardGradients(), opened=opened)
    own = opened.own_rows(chosen)
    assert own is not None
    collected, outweighs = _Collected(opened, len(own)), False
    for observed in opened.passes("paper's estimate", own):
        weight = [weight_of[int(i)] for i in observed.batch.indices]
        found = rule(observed, setting)
        deviation = found.deviation
        weighted = torch.tensor(weight, dtype=torch.float64).to(deviation)[:, None] * deviation
        collected.add(observed, observed.outputs + weighted)
        largest = [math.nan] * len(weight)  # with too many outputs: no telling, which is a yes
        if found.eigenvalues is not None:
            largest = found.eigenvalues.abs().amax(1).tolist()
        outweighs |= any(
            abs(w) > 1 and not abs(w) * m <= 1 for w, m in zip(weight, largest, strict=True)
        )
    return collected.effect(), any(opened.peers.told("outweighing", outweighs))


class _Collected:
    """Batches of an effect, put together."""

    def __init__(self, opened: Session, num_rows: int) -> None:
        self.likelihood, self.peers = opened.likelihood, opened.peers
        self.columns = Columns(num_rows, self.likelihood.padding)

    def add(self, observed: Observed, without: Tensor) -> None:
        loss_without = self.likelihood.loss(without, observed.targets)
        _check_finite(observed.batch, without, loss_without)
        self.columns.add(
            {
                "indices": observed.batch.indices,
                "outputs": self.likelihood.kept(observed.outputs, observed.targets),
                "outputs_without": self.likelihood.kept(without, observed.targets),
                "loss": observed.loss,
                "loss_without": loss_without,
            }
        )

    def effect(self) -> Effect:
        padding = self.likelihood.padding
        whole = self.peers.joined("effect", self.columns.complete(), padding)
        return Effect(**whole, likelihood=self.likelihood)


def _check_finite(batch: Batch, without: Tensor, loss: Tensor) -> None:
    bad = ~(without.isfinite().all(1) & loss.isfinite())
    if bad.any():
        remedy = (
            'give smaller weights (1 takes an example out), or use estimator="linear" with '
            'at="linearised"'
        )
        if without.dtype in (torch.float16, torch.bfloat16):
            remedy = "convert model and data to single precision first (.float()), where more fits"
        raise NonFiniteError(
            "a finite effect of leaving the group out",
            f"NaN or infinity, in {without.dtype}, for example "
            f"{int(batch.indices[int(bad.nonzero()[0])])}",
            remedy,
        )
