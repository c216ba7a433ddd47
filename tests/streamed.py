"""Small models, data and steps for streaming."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

NUM_DATA, BATCH = 24, 8


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(self.first(x))
        hidden = torch.cat([hidden[:, :3], 2 * hidden[:, 3:]], dim=1)
        output: Tensor = self.head(self.norm(hidden + functional.softplus(self.second(hidden))))
        return output


class Divided(nn.Module):
    """A bare parameter that divides: no rule, so that the batch is run again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.divisor = nn.Linear(4, 3), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x) / self.divisor
        return output


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)),
        nn.Conv2d(1, 3, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(3, 2, 2, padding=1, bias=False),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2, 3),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "tanh": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), "tape"),
    "relu": (lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), "tape"),
    "convolutions": (convolutions, "tape"),
    "residual": (Residual, "tape"),
    "bare parameter": (Divided, "again"),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Dropout(0.5), nn.Linear(9, 3)),
        "tape",
    ),
    "dropout again": (lambda: nn.Sequential(Divided(), nn.Dropout(0.5), nn.Linear(3, 3)), "again"),
}


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_DATA, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (NUM_DATA,), generator=generator)


def build(name: str = "tanh") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = MODELS[name][0]().double()
    return model, torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=0.01)


def batches(epochs: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    order = [torch.randperm(NUM_DATA, generator=generator) for _ in range(epochs)]
    return [batch for epoch in order for batch in epoch.split(BATCH)]


def backward(model: nn.Module, batch: Tensor) -> None:
    x, y = data()
    functional.cross_entropy(model(x[batch]), y[batch]).backward()


def thinned(model: nn.Module, seed: int) -> Callable[[Tensor], Tensor]:
    """The model as it ran: dropout drew its mask right after the seed."""

    def run(inputs: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            output: Tensor = model(inputs)
            return output

    return run


def dense_deviation(model: nn.Module, batch: Tensor, seed: int, precision: Tensor) -> Tensor:
    """J S^-1 J' e from the Jacobian of the whole batch."""
    x, y = data()
    run, parameters = thinned(model, seed), list(model.parameters())

    def gradient(output: Tensor) -> Tensor:
        found = torch.autograd.grad(output, parameters, retain_graph=True)
        return torch.cat([g.flatten() for g in found])

    outputs = run(x[batch])
    residual = (outputs.softmax(1) - functional.one_hot(y[batch], 3)).detach()
    rows = []
    for i in range(len(batch)):
        jacobian = torch.stack([gradient(output) for output in outputs[i]])
        rows.append(jacobian @ ((jacobian.mT @ residual[i]) / precision))
    return torch.stack(rows)
