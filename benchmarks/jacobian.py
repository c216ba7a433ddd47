"""The way it was done before: the whole Jacobian of every example, by vmap(jacrev) and einsum."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from engram import Posterior


def deviation(model: nn.Module, inputs: Tensor, seed: Tensor, posterior: Posterior) -> Tensor:
    """J S^-1 J' seed for a diagonal S, [B, K], through J [B, K, P] and V [B, K, K]."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    covariance = posterior.solve({name: torch.ones_like(p) for name, p in parameters.items()})

    def outputs(values: dict[str, Tensor], example: Tensor) -> Tensor:
        result: Tensor = functional_call(model, values, (example[None],))[0]
        return result

    with sdpa_kernel(SDPBackend.MATH):  # fused attention has no batched derivative
        jacobian = vmap(jacrev(outputs), (None, 0))(parameters, inputs)
    variance = seed.new_zeros(*seed.shape, seed.shape[1])
    for name, block in jacobian.items():
        flat = block.flatten(2)
        variance += torch.einsum("bkp,p,blp->bkl", flat, covariance[name].flatten(), flat)
    return torch.einsum("bkl,bl->bk", variance, seed)
