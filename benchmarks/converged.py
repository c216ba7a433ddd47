"""Small converged problems in float64, and the truth about leaving one example out of each."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

import engram
from engram.core.parameters import Layout
from engram.likelihoods import Likelihood

Arrays = tuple[Tensor, Tensor]
ROWS_AT_ONCE = 32


def digits() -> Arrays:
    """500 images of 8 x 8."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images[:500]) / 16, torch.tensor(labels[:500])


def fashion() -> Arrays:
    """1000 images of Fashion-MNIST, pooled to 14 x 14."""
    pixels, labels = _arrays("fmnist")
    images = torch.tensor(pixels[:1000]).double()[:, None] / 255
    return nn.functional.avg_pool2d(images, 2), torch.tensor(labels[:1000]).long()


def threes_and_fives() -> Arrays:
    """1000 images of USPS."""
    pixels, labels = _arrays("usps")
    chosen = np.isin(labels, (3, 5))
    images = torch.tensor(pixels[chosen][:1000]).double().flatten(1) / 255
    return images, torch.tensor(labels[chosen][:1000] == 5).long()


def breast_cancer() -> Arrays:
    """569 patients, 30 columns."""
    columns, labels = load_breast_cancer(return_X_y=True)
    return torch.tensor((columns - columns.mean(0)) / columns.std(0)), torch.tensor(labels).long()


def diabetes() -> Arrays:
    """442 patients, 10 columns, a regression."""
    columns, values = load_diabetes(return_X_y=True)
    values = (values - values.mean()) / values.std()
    return torch.tensor((columns - columns.mean(0)) / columns.std(0)), torch.tensor(values)[:, None]


def _arrays(name: str) -> tuple[np.ndarray, np.ndarray]:
    path = Path(os.environ.get("ENGRAM_DATA", "")) / f"{name}.npz"
    if not path.is_file():
        raise SystemExit(f"expected ENGRAM_DATA to name a folder with {name}.npz")
    with np.load(path) as arrays:
        return arrays["x_train"], arrays["y_train"]


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Module:
    """One hidden layer, tanh."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs)
    )


def cnn() -> nn.Module:
    """A convolution of 6 channels and a linear layer."""
    return nn.Sequential(nn.Conv2d(1, 6, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(216, 10))


@dataclass(frozen=True)
class Problem:
    """Data, a net and how it is trained."""

    data: Callable[[], Arrays]
    net: Callable[[], nn.Module]
    prior_precision: float
    likelihood: Likelihood


PROBLEMS = {
    "digits, MLP(12), delta 3": Problem(
        digits, lambda: mlp(64, 12, 10), 3.0, engram.likelihoods.Categorical()
    ),
    "digits, MLP(12), delta 10": Problem(
        digits, lambda: mlp(64, 12, 10), 10.0, engram.likelihoods.Categorical()
    ),
    "Fashion-MNIST, MLP(10)": Problem(
        fashion, lambda: mlp(196, 10, 10), 5.0, engram.likelihoods.Categorical()
    ),
    "USPS 3 against 5, MLP(8)": Problem(
        threes_and_fives, lambda: mlp(256, 8, 2), 3.0, engram.likelihoods.Categorical()
    ),
    "breast cancer, MLP(10)": Problem(
        breast_cancer, lambda: mlp(30, 10, 2), 1.0, engram.likelihoods.Categorical()
    ),
    "diabetes, MLP(10)": Problem(
        diabetes, lambda: mlp(10, 10, 1), 3.0, engram.likelihoods.Gaussian()
    ),
    "Fashion-MNIST, CNN": Problem(fashion, cnn, 5.0, engram.likelihoods.Categorical()),
}


@dataclass(frozen=True)
class Truth:
    """A trained net and what happens to some examples when they are left out.

    Args:
        model, data: the net at its minimum, and the training data.
        left_out: positions of the examples, [M].
        outputs, without: their outputs with and without themselves, [M, K].
        smallest_eigenvalue: of the Hessian at the minimum.
        gradient_norm: the largest over all refits.
    """

    model: nn.Module
    data: Arrays
    left_out: Tensor
    outputs: Tensor
    without: Tensor
    smallest_eigenvalue: float
    gradient_norm: float


class Objective:
    """The sum of weighted losses plus the regulariser, as a function of a flat vector."""

    def __init__(self, problem: Problem, model: nn.Module, data: Arrays) -> None:
        self.problem, self.model, self.data = problem, model, data
        self.layout = Layout.of({n: p.detach() for n, p in model.named_parameters()})

    def outputs(self, vector: Tensor, inputs: Tensor) -> Tensor:
        """f at these parameters."""
        result: Tensor = functional_call(self.model, self.layout.unflatten(vector), (inputs,))
        return result

    def __call__(self, vector: Tensor, weights: Tensor) -> Tensor:
        inputs, targets = self.data
        losses = self.problem.likelihood.loss(self.outputs(vector, inputs), targets)
        return (weights * losses).sum() + 0.5 * self.problem.prior_precision * (vector**2).sum()

    def hessian(self, vector: Tensor, weights: Tensor) -> Tensor:
        """[P, P], a few rows at a time."""
        gradient = grad(self)
        rows = [
            vmap(lambda v: jvp(lambda at: gradient(at, weights), (vector,), (v,))[1])(part)
            for part in torch.eye(len(vector)).to(vector).split(ROWS_AT_ONCE)
        ]
        matrix = torch.cat(rows)
        return 0.5 * (matrix + matrix.mT)


def minimise(objective: Objective, start: Tensor, turn: Tensor | None, weights: Tensor) -> Tensor:
    """L-BFGS until the gradient vanishes, in coordinates u with vector = start + turn u."""
    position = torch.zeros_like(start).requires_grad_()
    optimizer = torch.optim.LBFGS(
        [position],
        max_iter=4000 if turn is None else 200,
        history_size=30,
        tolerance_grad=1e-8,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def at() -> Tensor:
        return start + (position if turn is None else turn @ position)

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = objective(at(), weights)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(closure)  # type: ignore[arg-type]
    return at().detach()


def truth(problem: Problem, count: int, seed: int) -> Truth:
    """Train to a minimum, then again without each of ``count`` random examples."""
    torch.manual_seed(seed)
    model, data = problem.net().double(), problem.data()
    objective, everything = Objective(problem, model, data), torch.ones(len(data[0])).double()
    trained = minimise(
        objective, nn.utils.parameters_to_vector(model.parameters()).detach(), None, everything
    )
    hessian = objective.hessian(trained, everything)
    factor = torch.linalg.cholesky(hessian)
    turn = torch.linalg.solve_triangular(factor.mT, torch.eye(len(trained)).to(trained), upper=True)
    left_out = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(seed))[:count]
    without, norms = [], []
    for i in left_out.tolist():
        weights = everything.clone()
        weights[i] = 0.0
        refit = minimise(objective, trained, turn, weights)
        norms.append(float(grad(objective)(refit, weights).norm()))
        without.append(objective.outputs(refit, data[0][i : i + 1])[0].detach())
    nn.utils.vector_to_parameters(trained, model.parameters())
    return Truth(
        model,
        data,
        left_out,
        objective.outputs(trained, data[0][left_out]).detach(),
        torch.stack(without),
        float(torch.linalg.eigvalsh(hessian)[0]),
        max(norms),
    )
