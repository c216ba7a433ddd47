"""The nets of the golden results: weights and data in closed form, so that no generator decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian

import architectures as nets
from cases import CASES
from likelihood_cases import CATEGORICAL, GAUSSIAN, LikelihoodCase
from problems import Case, net, real

NUM_DATA, NUM_TEST, VOCABULARY = 6, 2, 5
PRIOR_PRECISION, STRONG_PRIOR = 8.0, 60.0


def wave(shape: torch.Size | tuple[int, ...], phase: float) -> Tensor:
    """sin(0.7 k^2 + phase): the square, because the values of a plain sine have rank two."""
    count = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return torch.sin(0.7 * count * count + phase).reshape(shape)


def fill(model: nn.Module) -> nn.Module:
    """Weights of the usual size, scales of norms and statistics near 1."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            values = wave(parameter.shape, number + 1.0)
            if parameter.dim() < 2:
                scales = bool((parameter == 1).all())
                parameter.copy_(0.3 * values + float(scales))
            else:
                parameter.copy_(values * (parameter[0].numel() ** -0.5) * 1.2)
        for number, (name, buffer) in enumerate(model.named_buffers()):
            if buffer.is_floating_point():
                buffer.copy_(0.3 * wave(buffer.shape, 20.0 + number) + float("var" in name))
    return model.eval()


def inputs_like(drawn: Tensor, phase: float) -> Tensor:
    values = wave(drawn.shape, phase)
    if drawn.is_floating_point():
        return 1.3 * values
    return ((values + 1) * 0.5 * VOCABULARY).long().clamp(max=VOCABULARY - 1)


def targets_like(name: str, num_data: int, num_outputs: int, phase: float) -> Tensor:
    """Targets that the likelihood of this name has a meaning for."""
    count = torch.arange(num_data)
    values = wave((num_data, num_outputs), phase)
    by_name: dict[str, Callable[[], Tensor]] = {
        "categorical": lambda: (count * count + count // 2) % num_outputs,
        "soft_categorical": lambda: (2 * values).softmax(1),
        "bernoulli": lambda: (count * count + count // 2) % 2,
        "gaussian_one": lambda: values[:, 0],
        "poisson": lambda: (2 + 2 * values).round().abs(),
    }
    return by_name.get(name, lambda: values)()


@dataclass(frozen=True)
class Problem:
    """A case of the other tests with other weights and data."""

    case: Case
    dtype: torch.dtype = torch.float64
    converged: bool = False

    @property
    def name(self) -> str:
        return self.case.name + (".float32" if self.dtype == torch.float32 else "")

    @property
    def likelihood(self) -> Any:
        return self.case.public_likelihood

    @property
    def prior_precision(self) -> float:
        steep = self.case.likelihood.name in ("poisson", "from_loss_with_mean")
        return STRONG_PRIOR if steep else PRIOR_PRECISION

    @property
    def tolerance(self) -> float:
        """Largest difference over the largest entry."""
        return 1e-10 if self.dtype == torch.float64 else 1e-4

    @cached_property
    def model(self) -> nn.Module:
        with torch.random.fork_rng():
            model = fill(self.case.build(self._num_outputs).double())
        if self.converged:
            to_minimum(model, self._draw(NUM_DATA, 0.0), self.likelihood, self.prior_precision)
        return model.to(self.dtype)

    @cached_property
    def data(self) -> tuple[Tensor, Tensor]:
        return self._in_dtype(self._draw(NUM_DATA, 0.0))

    @cached_property
    def test_data(self) -> tuple[Tensor, Tensor]:
        return self._in_dtype(self._draw(NUM_TEST, 0.4))

    @property
    def _num_outputs(self) -> int:
        return self.case.num_outputs or self.case.likelihood.num_outputs

    def _draw(self, num_data: int, phase: float) -> tuple[Tensor, Tensor]:
        x = inputs_like(self.case.inputs(num_data, torch.Generator().manual_seed(0)), phase)
        kind = self.case.likelihood.name
        return x, targets_like(kind, num_data, self._num_outputs, phase + 0.2)

    def _in_dtype(self, data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        first, second = (part.to(self.dtype) if part.is_floating_point() else part for part in data)
        return first, second


def to_minimum(
    model: nn.Module, data: tuple[Tensor, Tensor], likelihood: Any, prior_precision: float
) -> None:
    """Gradient descent into the basin, then Newton's method to rounding."""
    x, targets = data
    names, shapes = zip(*((n, p.shape) for n, p in model.named_parameters()), strict=True)
    sizes = [shape.numel() for shape in shapes]
    prepared = likelihood.prepare(model(x).detach(), targets)

    def objective(flat: Tensor) -> Tensor:
        parts = [v.reshape(s) for v, s in zip(flat.split(sizes), shapes, strict=True)]
        outputs = functional_call(model, dict(zip(names, parts, strict=True)), (x,))
        return likelihood.loss(outputs, prepared).sum() + 0.5 * prior_precision * flat @ flat

    point = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    for _ in range(200):
        point = point - 0.05 * torch.func.grad(objective)(point)
    for _ in range(8):
        step = torch.linalg.solve(hessian(objective)(point), torch.func.grad(objective)(point))
        point = point - step
    with torch.no_grad():
        for parameter, values in zip(model.parameters(), point.split(sizes), strict=True):
            parameter.copy_(values.reshape(parameter.shape))


class Gated(nn.Module):
    """A recurrent layer with gates of another kind than an LSTM's."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(3, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.recurrent(x)[0]
        return hidden


def linear(name: str, likelihood: LikelihoodCase) -> Case:
    return Case(name, lambda k: nn.Linear(4, k), real(4), likelihood)


CONVERGED = (
    linear("linear_categorical", CATEGORICAL),
    linear("linear_gaussian", GAUSSIAN),
    Case("mlp_at_minimum", nets.mlp, real(4)),
)
AS_THEY_ARE = (
    *("mlp", "mlp_soft_categorical", "mlp_bernoulli", "mlp_gaussian", "mlp_poisson"),
    *("mlp_from_loss_with_mean", "mlp_without_bias", "used_twice", "frozen_layer", "conv1d"),
    *("conv2d_groups", "conv2d_depthwise", "in_place_residual", "layer_norm"),
    *("group_norm", "batch_norm2d", "filter_response_norm", "embedding"),
    *("tied_embedding", "encoder_layer", "vision_transformer"),
)
SINGLE = ("mlp", "mlp_gaussian", "in_place_residual", "encoder_layer")

LISTED = (
    *(Problem(case, converged=True) for case in CONVERGED),
    *(Problem(CASES[name]) for name in AS_THEY_ARE),
    Problem(net("lstm_two_steps", nets.Recurrent, 3, 2, 3)),
    Problem(net("gru_two_steps", Gated, 3, 2, 3)),
    *(Problem(CASES[name], torch.float32) for name in SINGLE),
)
PROBLEMS = {problem.name: problem for problem in LISTED}
