"""The dense reference: every quantity of the theory from explicit matrices, in float64.

Obviously right and slow. Per example and per output one backward pass gives the Jacobian
J [N, K, P]; every precision S is a P x P matrix; V = J S^-1 J' is a matrix product. Nothing here
shares code or ideas with the engine it judges: losses are differentiated by autograd, layers are
seen through hooks, systems are solved by `torch.linalg`.
"""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dense_blocks import LayerBlock, layer_blocks
from single_examples import one_example, outputs_of


@dataclass(frozen=True)
class DenseLikelihood:
    """A loss of one example, `loss(f [K], y) -> scalar`, and the mean it predicts."""

    loss: Callable[[Tensor, Tensor], Tensor]
    mean: Callable[[Tensor], Tensor]

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.stack([self.loss(f, y) for f, y in zip(outputs, targets, strict=True)])

    def means(self, outputs: Tensor) -> Tensor:
        return torch.stack([self.mean(f) for f in outputs])

    def residuals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        rows = []
        for f, y in zip(outputs, targets, strict=True):
            leaf = f.detach().clone().requires_grad_(True)
            rows.append(torch.autograd.grad(self.loss(leaf, y), leaf)[0])
        return torch.stack(rows)

    def hessians(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.stack(
            [
                torch.autograd.functional.hessian(lambda leaf, y=y: self.loss(leaf, y), f.detach())
                for f, y in zip(outputs, targets, strict=True)
            ]
        )

    def mean_derivatives(self, outputs: Tensor) -> Tensor:
        """Elementwise: d mean_k / d f_k, the diagonal of the mean's Jacobian."""
        jacobian = torch.autograd.functional.jacobian
        return torch.stack([jacobian(self.mean, f.detach()).diagonal() for f in outputs])


class Dense:
    """All matrices of one model on one data set."""

    def __init__(
        self, model: nn.Module, inputs: Any, targets: Tensor, likelihood: DenseLikelihood
    ) -> None:
        self.model = copy.deepcopy(model).double().eval()
        self.inputs, self.targets, self.likelihood = inputs, targets, likelihood
        self.num_data = len(targets)
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.places: dict[str, Tensor] = {}
        offset = 0
        for name, parameter in self.parameters.items():
            place = torch.arange(offset, offset + parameter.numel())
            self.places[name] = place.reshape(parameter.shape)
            offset += parameter.numel()
        self.num_params = offset

    def flatten(self, vectors: dict[str, Tensor]) -> Tensor:
        """Named tensors with equal leading dimensions to one [..., P]."""
        parts = []
        for name, parameter in self.parameters.items():
            vector = vectors[name].double()
            parts.append(vector.reshape(*vector.shape[: vector.ndim - parameter.ndim], -1))
        return torch.cat(parts, dim=-1)

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        return {name: vector[..., place] for name, place in self.places.items()}

    @cached_property
    def _outputs_and_jacobian(self) -> tuple[Tensor, Tensor]:
        return self.linearise(self.inputs, self.num_data)

    def linearise(self, inputs: Any, count: int) -> tuple[Tensor, Tensor]:
        """Outputs [n, K] and Jacobian [n, K, P] by one backward pass per example and output."""
        outputs, jacobians = [], []
        leaves = list(self.parameters.values())
        for n in range(count):
            f = outputs_of(self.model, one_example(inputs, n))
            rows = []
            for k in range(len(f)):
                grads = torch.autograd.grad(f[k], leaves, retain_graph=True, allow_unused=True)
                filled = [
                    torch.zeros_like(leaf) if grad is None else grad
                    for leaf, grad in zip(leaves, grads, strict=True)
                ]
                rows.append(torch.cat([grad.reshape(-1) for grad in filled]))
            outputs.append(f.detach())
            jacobians.append(torch.stack(rows))
        return torch.stack(outputs), torch.stack(jacobians)

    @property
    def outputs(self) -> Tensor:
        return self._outputs_and_jacobian[0]

    @property
    def jacobian(self) -> Tensor:
        return self._outputs_and_jacobian[1]

    @cached_property
    def residual(self) -> Tensor:
        return self.likelihood.residuals(self.outputs, self.targets)

    @cached_property
    def output_hessian(self) -> Tensor:
        return self.likelihood.hessians(self.outputs, self.targets)

    @cached_property
    def gradients(self) -> Tensor:
        """grad loss_i = J_i' e_i, [N, P]."""
        return torch.einsum("nkp,nk->np", self.jacobian, self.residual)

    def columns(self, curvature: str) -> Tensor:
        """C_i [K, R] with curvature_i = J_i' C_i C_i' J_i: root of Lambda_i, or e_i itself."""
        if curvature == "empirical":
            return self.residual[:, :, None]
        values, vectors = torch.linalg.eigh(self.output_hessian)
        return vectors * values.clamp(min=0).sqrt()[:, None, :]

    def ggn(self, curvature: str = "ggn", weights: Tensor | None = None) -> Tensor:
        """sum_i w_i J_i' C_i C_i' J_i, [P, P]."""
        weights = torch.ones(self.num_data).double() if weights is None else weights
        rows = torch.einsum("nkp,nkr->nrp", self.jacobian, self.columns(curvature))
        return torch.einsum("nrp,nrq,n->pq", rows, rows, weights)

    @cached_property
    def hessian(self) -> Tensor:
        """Hessian of the sum of the losses, one row per parameter, [P, P]."""
        return self._hessian_of(range(self.num_data))

    @cached_property
    def own_hessians(self) -> Tensor:
        """H_i, the Hessian of each example's loss, [N, P, P]."""
        return torch.stack([self._hessian_of([n]) for n in range(self.num_data)])

    def _hessian_of(self, examples: Iterable[int]) -> Tensor:
        leaves = list(self.parameters.values())
        total = torch.zeros(()).double()
        with sdpa_kernel(SDPBackend.MATH):  # the only one with a second derivative
            for n in examples:
                f = outputs_of(self.model, one_example(self.inputs, n))
                total = total + self.likelihood.loss(f, self.targets[n])
        options = {"materialize_grads": True, "allow_unused": True}
        grads = torch.autograd.grad(total, leaves, create_graph=True, **options)
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        rows = []
        for entry in flat:
            second = torch.autograd.grad(entry, leaves, retain_graph=True, **options)
            rows.append(torch.cat([grad.reshape(-1) for grad in second]))
        return torch.stack(rows).detach()

    def blocks(self, curvature: str = "ggn") -> list[LayerBlock]:
        """The layers with a Kronecker block; all other parameters are diagonal."""
        columns = self.columns(curvature)
        return layer_blocks(self.model, self.inputs, self.places, columns, self.jacobian)

    def curvature_matrix(self, structure: str, curvature: str = "ggn") -> Tensor:
        """The [P, P] curvature of the sum of losses in a structure, without the prior."""
        if curvature == "hessian":
            return self.hessian
        exact = self.ggn(curvature)
        if structure in ("full", "last_layer"):
            return exact
        if structure == "isotropic":
            return exact.trace() / self.num_params * torch.eye(self.num_params).double()
        matrix = torch.diag(exact.diagonal())
        if structure == "diagonal":
            return matrix
        for block in self.blocks(curvature):
            place = block.layout.reshape(-1)
            dense = block.ekfac() if structure == "ekfac" else block.kronecker(self.num_data)
            matrix[place[:, None], place[None, :]] = dense
        return matrix

    def covered(self, structure: str, last_layer: str | None = None) -> Tensor:
        """Which of the P parameters the posterior speaks of, bool [P]."""
        mask = torch.ones(self.num_params, dtype=torch.bool)
        if structure == "last_layer":
            for name, place in self.places.items():
                mask[place.reshape(-1)] = name.rpartition(".")[0] == last_layer
        return mask

    def precision(
        self,
        structure: str,
        prior_precision: float,
        curvature: str = "ggn",
        last_layer: str | None = None,
    ) -> "DensePrecision":
        matrix = self.curvature_matrix(structure, curvature)
        matrix = matrix + prior_precision * torch.eye(self.num_params).double()
        return DensePrecision(matrix, self.covered(structure, last_layer))


@dataclass(frozen=True)
class DensePrecision:
    """S on the covered parameters; the others are fixed, so their covariance is zero."""

    matrix: Tensor
    mask: Tensor

    @property
    def _covered(self) -> Tensor:
        return self.matrix[self.mask][:, self.mask]

    @cached_property
    def covariance(self) -> Tensor:
        full = torch.zeros_like(self.matrix)
        place = self.mask.nonzero()[:, 0]
        full[place[:, None], place[None, :]] = torch.linalg.inv(self._covered)
        return full

    def multiply(self, vectors: Tensor) -> Tensor:
        masked = vectors * self.mask
        return (masked @ self.matrix) * self.mask

    @property
    def is_positive_definite(self) -> bool:
        return bool(torch.linalg.cholesky_ex(self._covered).info == 0)

    def log_det(self) -> float:
        return float(torch.linalg.slogdet(self._covered).logabsdet)
