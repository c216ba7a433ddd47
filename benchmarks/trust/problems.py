"""Small nets on several data sets: trained well, or in one of the ways that spoil an estimate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from benchmarks.data import data_file
from engram.likelihoods import Categorical, Gaussian, Likelihood
from engram.retraining.recipes import Adam

NUM_DATA = 400
Arrays = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Problem:
    """A data set, a net and its training.

    Args:
        data: name of the data set.
        widths: of the net's layers between inputs and outputs.
        prior_precision: delta of the training.
        early: the training that stops early; None for one that converges.
        noise: share of the labels replaced by random ones.
        activation: between the layers.
    """

    data: str
    widths: tuple[int, ...]
    prior_precision: float
    early: Adam | None = None
    noise: float = 0.0
    activation: Callable[[], nn.Module] = nn.Tanh

    @property
    def name(self) -> str:
        """Data, net, regulariser and training in words."""
        net = "-".join(map(str, self.widths)) or "linear"
        kind = "" if self.activation is nn.Tanh else f" {self.activation.__name__}"
        ends = "converged" if self.early is None else f"{self.early.epochs} epochs"
        noise = f", {self.noise:.0%} random labels" if self.noise else ""
        return f"{self.data}, {net}{kind}, delta {self.prior_precision:g}, {ends}{noise}"

    @property
    def likelihood(self) -> Likelihood:
        """Regression only on the diabetes data."""
        return Gaussian(0.5) if self.data == "diabetes" else Categorical()

    def tensors(self, seed: int) -> tuple[Tensor, Tensor]:
        """Inputs in float64 and targets."""
        inputs, targets = LOADERS[self.data]()
        x = torch.tensor(inputs[:NUM_DATA], dtype=torch.float64)
        if self.data == "diabetes":
            return x, torch.tensor(targets[:NUM_DATA, None], dtype=torch.float64)
        y = torch.tensor(targets[:NUM_DATA], dtype=torch.int64)
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(int(y.max()) + 1, y.shape, generator=generator)
        return x, torch.where(torch.rand(len(y), generator=generator) < self.noise, drawn, y)

    def net(self, seed: int) -> nn.Sequential:
        """The untrained net; the random state is left alone."""
        x, y = self.tensors(seed)
        outputs = 1 if y.is_floating_point() else int(y.max()) + 1
        sizes = (x.shape[1], *self.widths, outputs)
        layers: list[nn.Module] = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for wide, narrow in pairwise(sizes):
                layers += [nn.Linear(wide, narrow), self.activation()]
            return nn.Sequential(*layers[:-1]).double()


def _digits() -> Arrays:
    images, labels = load_digits(return_X_y=True)
    return images / 16, labels


def _cancer() -> Arrays:
    measurements, labels = load_breast_cancer(return_X_y=True)
    return StandardScaler().fit_transform(measurements), labels


def _wine() -> Arrays:
    measurements, labels = load_wine(return_X_y=True)
    return StandardScaler().fit_transform(measurements), labels


def _diabetes() -> Arrays:
    measurements, target = load_diabetes(return_X_y=True)
    return StandardScaler().fit_transform(measurements), (target - target.mean()) / target.std()


def _fashion() -> Arrays:
    with np.load(data_file("fmnist.npz")) as arrays:
        images, labels = arrays["x_train"][:NUM_DATA] / 255, arrays["y_train"][:NUM_DATA]
    pooled = images.reshape(len(images), 7, 4, 7, 4).mean((2, 4))
    return pooled.reshape(len(images), -1), labels


def _usps() -> Arrays:
    with np.load(data_file("usps.npz")) as arrays:
        images, labels = arrays["x_train"], arrays["y_train"]
    chosen = np.flatnonzero((labels == 3) | (labels == 5))[:NUM_DATA]
    pooled = images[chosen].reshape(len(chosen), 8, 2, 8, 2).mean((2, 4)) / 255
    return pooled.reshape(len(chosen), -1), labels[chosen] == 5


def _questions() -> Arrays:
    lines = data_file("text/trec_train_5500.label").read_text(encoding="latin-1").splitlines()
    pairs = [line.split(" ", 1) for line in lines[:NUM_DATA]]
    words = TfidfVectorizer(max_features=100, token_pattern=r"(?u)\b\w+\b")
    features = words.fit_transform([question for _, question in pairs]).toarray()
    kinds = [label.split(":")[0] for label, _ in pairs]
    return features, np.unique(kinds, return_inverse=True)[1]


LOADERS: dict[str, Callable[[], Arrays]] = {
    "digits": _digits,
    "cancer": _cancer,
    "wine": _wine,
    "diabetes": _diabetes,
    "fashion": _fashion,
    "usps": _usps,
    "questions": _questions,
}


def _adam(epochs: int, rate: float = 1e-2) -> Adam:
    return Adam(learning_rate=rate, epochs=epochs, batch_size=40)


PROBLEMS = (
    Problem("digits", (12,), 3.0),
    Problem("digits", (12,), 0.3),
    Problem("digits", (12,), 0.01),
    Problem("digits", (12,), 3.0, _adam(10)),
    Problem("digits", (12,), 3.0, _adam(1, 2e-3)),
    Problem("digits", (12, 10), 1.0),
    Problem("digits", (12,), 0.03, noise=0.4),
    Problem("digits", (12,), 3.0, noise=0.2),
    Problem("digits", (), 1.0),
    Problem("cancer", (12, 8), 3.0),
    Problem("cancer", (12, 8), 0.01),
    Problem("cancer", (12, 8), 3.0, _adam(3)),
    Problem("wine", (10,), 1.0),
    Problem("wine", (10,), 0.01),
    Problem("diabetes", (10,), 3.0),
    Problem("diabetes", (10,), 0.01),
    Problem("diabetes", (10,), 3.0, _adam(2, 2e-3)),
    Problem("fashion", (12,), 3.0),
    Problem("fashion", (12,), 0.1),
    Problem("fashion", (12,), 3.0, _adam(15)),
    Problem("fashion", (12,), 3.0, activation=nn.ReLU),
    Problem("fashion", (12,), 3.0, activation=nn.GELU),
    Problem("usps", (10,), 3.0),
    Problem("usps", (10,), 0.03),
    Problem("usps", (10,), 3.0, _adam(2, 2e-3)),
    Problem("questions", (6,), 1.0),
    Problem("questions", (6,), 0.1),
    Problem("questions", (6,), 1.0, _adam(6)),
    Problem("questions", (6,), 0.03, noise=0.4),
)
