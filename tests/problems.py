"""One small float64 problem: an architecture, a likelihood, data and what to ask of it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from architectures import Headed
from likelihood_cases import CATEGORICAL, LikelihoodCase
from reference import Dense
from single_examples import select

NUM_DATA = 7
STRUCTURES = ("isotropic", "diagonal", "kronecker", "ekfac", "full")
ESTIMATORS = ("linear", "corrected", "iterated", "paper")


class Examples(Dataset):
    """A map-style data set of (x, y), or of dicts with "labels" where x is a dict."""

    def __init__(self, inputs: Any, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Any:
        x = select(self.inputs, index)
        return (
            {**x, "labels": self.targets[index]}
            if isinstance(x, dict)
            else (x, self.targets[index])
        )


@dataclass(frozen=True)
class Case:
    """One problem; the seed makes it the same wherever it is built."""

    name: str
    build: Callable[[int], nn.Module]
    inputs: Callable[[int, torch.Generator], Any]
    likelihood: LikelihoodCase = CATEGORICAL
    structures: tuple[str, ...] = STRUCTURES
    last_layer: str | None = "head"
    num_outputs: int | None = None

    @cached_property
    def model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = self.build(self.num_outputs or self.likelihood.num_outputs).double()
            for module in model.modules():
                _give_statistics(module)
        return model.eval()

    def draw(self, num_data: int, seed: int) -> tuple[Any, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        inputs = self.inputs(num_data, generator)
        num_outputs = self.num_outputs or self.likelihood.num_outputs
        return inputs, self.likelihood.targets(num_data, num_outputs, generator)

    @cached_property
    def data(self) -> Any:
        return as_data(*self.draw(NUM_DATA, seed=1))

    @cached_property
    def test_data(self) -> Any:
        return as_data(*self.draw(4, seed=2))

    @cached_property
    def dense(self) -> Dense:
        return Dense(self.model, *self.draw(NUM_DATA, seed=1), self.likelihood.dense)

    @cached_property
    def dense_test(self) -> Dense:
        return Dense(self.model, *self.draw(4, seed=2), self.likelihood.dense)

    @property
    def prior_precision(self) -> float:
        return self.likelihood.prior_precision

    @property
    def public_likelihood(self) -> Any:
        return self.likelihood.make()


def as_data(inputs: Any, targets: Tensor) -> Any:
    """Two tensors as they are, anything else as a data set."""
    return (inputs, targets) if isinstance(inputs, Tensor) else Examples(inputs, targets)


def _give_statistics(module: nn.Module) -> None:
    """Norm layers start at identities, which would hide mistakes."""
    if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
        module.running_mean.normal_()
        module.running_var.uniform_(0.5, 2.0)
    if isinstance(
        module, nn.BatchNorm1d | nn.BatchNorm2d | nn.LayerNorm | nn.GroupNorm | nn.RMSNorm
    ):
        for parameter in module.parameters():
            parameter.data.uniform_(0.5, 1.5)


def real(*shape: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda n, g: torch.randn(n, *shape, generator=g, dtype=torch.float64)


def tokens(vocabulary: int, length: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda n, g: torch.randint(vocabulary, (n, length), generator=g)


def headed(
    body: Callable[[], nn.Module], width: int, channels_first: bool = False
) -> Callable[[int], nn.Module]:
    return lambda k: Headed(body(), width, k, channels_first)


def sequence(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*[layer() for layer in layers])


def net(name: str, body: Callable[[], nn.Module], width: int, *shape: int, **rest: Any) -> Case:
    """A body under a linear head, on real inputs; channels first where they are images."""
    channels_first = rest.pop("channels_first", False)
    return Case(name, headed(body, width, channels_first), real(*shape), **rest)


def conv(name: str, body: Callable[[], nn.Module], width: int, *shape: int, **rest: Any) -> Case:
    return net(name, body, width, *shape, channels_first=True, **rest)
