"""J S^-1 J' e with each Jacobian by plain autograd, one example and one output at a time."""

from typing import Any

import torch
from torch import Tensor, nn

from single_examples import one_example, outputs_of


def expected_deviation(model: nn.Module, inputs: Any, targets: Tensor, posterior: Any) -> Tensor:
    """What `linear` should be for class numbers, with the model in the mode it has now."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = []
    for n, target in enumerate(targets):
        f = outputs_of(model, one_example(inputs, n))
        jacobian = [
            torch.autograd.grad(
                output,
                list(parameters.values()),
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            for output in f
        ]
        residual = torch.softmax(f.detach(), 0)
        residual[target] -= 1
        gradient = {
            name: sum(e * row[p] for e, row in zip(residual, jacobian, strict=True))
            for p, name in enumerate(parameters)
        }
        step = posterior.solve(gradient)
        rows.append(
            torch.stack(
                [
                    sum((row[p] * step[name]).sum() for p, name in enumerate(parameters))
                    for row in jacobian
                ]
            )
        )
    return torch.stack(rows).detach()
