"""Small nets at a minimum of their objective."""

import torch
from torch import Tensor, nn


def to_minimum(model: nn.Module, data: tuple[Tensor, Tensor], prior_precision: float) -> None:
    """Train until the gradient of the summed losses and the regulariser vanishes."""
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=1000, tolerance_grad=1e-10, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        squares = sum((p**2).sum() for p in model.parameters())
        loss = nn.functional.cross_entropy(model(data[0]), data[1], reduction="sum")
        loss = loss + 0.5 * prior_precision * squares
        loss.backward()
        return loss

    optimizer.step(closure)
