"""The estimators, densely: what leaving out an example or a group does."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call

from reference import Dense, DensePrecision
from single_examples import one_example, raw_outputs

GUARD = 0.99
"""Largest eigenvalue of V Lambda that `corrected` may invert; larger ones are clipped to it."""


@dataclass(frozen=True)
class Deviation:
    """What leaving each example out does to its own outputs, predictions and loss."""

    deviation: Tensor
    prediction_deviation: Tensor
    loss: Tensor
    loo_loss: Tensor
    leverage: Tensor
    flagged: Tensor

    @property
    def score(self) -> Tensor:
        return self.prediction_deviation.abs().sum(1)


def variance(dense: Dense, precision: DensePrecision) -> Tensor:
    """V_i = J_i S^-1 J_i', [N, K, K]."""
    return torch.einsum("nkp,pq,nlq->nkl", dense.jacobian, precision.covariance, dense.jacobian)


def deviations(
    dense: Dense, precision: DensePrecision, estimator: str, rounds: int = 3
) -> Deviation:
    """Every example's deviation by one estimator."""
    spread = variance(dense, precision)
    weights = spread @ dense.output_hessian
    flagged = torch.zeros(dense.num_data, dtype=torch.bool)
    first = torch.einsum("nkl,nl->nk", spread, dense.residual)
    if estimator == "linear":
        deviation = first
    elif estimator == "paper":
        deviation = spread.diagonal(dim1=1, dim2=2) * dense.residual
    elif estimator == "iterated":
        deviation, flagged = _rounds(dense, spread, first, rounds)
    else:
        deviation, flagged = corrected(spread, dense.output_hessian, dense.residual)
    return _describe(dense, estimator, deviation, torch.einsum("nkk->n", weights), flagged)


def _rounds(dense: Dense, spread: Tensor, first: Tensor, rounds: int) -> tuple[Tensor, Tensor]:
    """Each example by itself: d <- V e(f + d) for as long as it moves less than before."""
    result, flagged = first.clone(), torch.zeros(dense.num_data, dtype=torch.bool)
    for i in range(dense.num_data):
        before = first[i].norm()
        for _ in range(rounds):
            outputs = dense.outputs.index_copy(0, torch.tensor([i]), (dense.outputs + result)[[i]])
            moved = spread[i] @ dense.likelihood.residuals(outputs, dense.targets)[i]
            change = (moved - result[i]).norm()
            if not change <= before:
                flagged[i] = True
                break
            result[i], before = moved, change
    return result, flagged


def corrected(spread: Tensor, hessian: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """(I - V Lambda)^-1 V e with the eigenvalues of V Lambda clipped at the guard.

    V Lambda has the eigenvalues of the symmetric R Lambda R, with R the root of V, and
    (I - V Lambda)^-1 V = R (I - R Lambda R)^-1 R.
    """
    values, vectors = torch.linalg.eigh(spread)
    root = vectors @ torch.diag_embed(values.clamp(min=0).sqrt()) @ vectors.mT
    values, vectors = torch.linalg.eigh(root @ hessian @ root)
    flagged = (values > GUARD).any(1)
    inverse = vectors @ torch.diag_embed(1 / (1 - values.clamp(max=GUARD))) @ vectors.mT
    return (root @ inverse @ root @ residual[:, :, None])[:, :, 0], flagged


def newton(dense: Dense, precision: DensePrecision) -> Deviation:
    """J_i (S - H_i)^-1 grad_i, or `corrected` where that is longer than twice as far."""
    spread = variance(dense, precision)
    cautious, flagged = corrected(spread, dense.output_hessian, dense.residual)
    deviation = cautious.clone()
    for i in range(dense.num_data):
        without = DensePrecision(precision.matrix - dense.own_hessians[i], precision.mask)
        if not without.is_positive_definite:
            continue
        found = dense.jacobian[i] @ without.covariance @ dense.gradients[i]
        gain, usual = dense.residual[i] @ found, dense.residual[i] @ cautious[i]
        if 0 <= gain <= 2 * usual:
            deviation[i] = found
    leverage = torch.einsum("nkl,nlk->n", spread, dense.output_hessian)
    return _describe(dense, "newton", deviation, leverage, flagged)


def downdated(dense: Dense, prior_precision: float) -> Deviation:
    """J_i S_i^-1 grad_i with Kronecker factors that never saw example i's own input.

    Only where a layer acts once per example has an example much of a factor, and is left out.
    """
    whole = dense.precision("kronecker", prior_precision)
    blocks = [block for block in dense.blocks() if block.acts_once]
    deviation = []
    for i in range(dense.num_data):
        matrix = whole.matrix.clone()
        for block in blocks:
            place = block.layout.reshape(-1)
            rows = block.factors()[0] / dense.num_data
            own = block.activations[i].T @ block.activations[i]
            matrix[place[:, None], place[None, :]] -= torch.kron(rows.contiguous(), own)
        covariance = DensePrecision(matrix, whole.mask).covariance
        deviation.append(dense.jacobian[i] @ covariance @ dense.gradients[i])
    leverage = torch.einsum("nkl,nlk->n", variance(dense, whole), dense.output_hessian)
    none = torch.zeros(dense.num_data, dtype=torch.bool)
    return _describe(dense, "downdated", torch.stack(deviation), leverage, none)


def _describe(
    dense: Dense, estimator: str, deviation: Tensor, leverage: Tensor, flagged: Tensor
) -> Deviation:
    likelihood, f, y = dense.likelihood, dense.outputs, dense.targets
    moved = likelihood.means(f + deviation) - likelihood.means(f)
    if estimator == "paper":
        moved = likelihood.mean_derivatives(f) * deviation
    return Deviation(
        deviation=deviation,
        prediction_deviation=moved,
        loss=likelihood.losses(f, y),
        loo_loss=likelihood.losses(f + deviation, y),
        leverage=leverage,
        flagged=flagged,
    )


@dataclass(frozen=True)
class GroupRemoval:
    """The move of the parameters, [P], when a weighted group is taken out."""

    dense: Dense
    delta: Tensor

    def outputs_without(self, other: Dense, at: str) -> Tensor:
        """Outputs of any data set's examples after the move, [n, K]."""
        if at == "linearised":
            return other.outputs + other.jacobian @ self.delta
        moved = {
            name: parameter.detach() + self.dense.unflatten(self.delta)[name]
            for name, parameter in self.dense.parameters.items()
        }
        rows = []
        for n in range(other.num_data):
            bound = _Bound(self.dense, moved)
            rows.append(raw_outputs(bound, one_example(other.inputs, n)).reshape(-1))
        return torch.stack(rows).detach()


class _Bound(torch.nn.Module):
    """The model at other parameters."""

    def __init__(self, dense: Dense, parameters: dict[str, Tensor]) -> None:
        super().__init__()
        self.dense, self.values = dense, parameters

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return functional_call(self.dense.model, self.values, args, kwargs)


def remove_group(
    dense: Dense, precision: DensePrecision, weights: Tensor, estimator: str
) -> GroupRemoval:
    """delta = S_without^-1 sum_j w_j grad_j; weights [N] are zero for those that stay."""
    gradient = weights @ dense.gradients
    if estimator == "linear":
        return GroupRemoval(dense, precision.covariance @ gradient)
    without = DensePrecision(precision.matrix - dense.ggn(weights=weights), precision.mask)
    return GroupRemoval(dense, without.covariance @ gradient)


def influence(train: Dense, test: Dense, precision: DensePrecision) -> Tensor:
    """grad_j' S^-1 grad_i, [N_train, N_test]."""
    return train.gradients @ precision.covariance @ test.gradients.T
