"""Data sets and the nets that are trained on them, in float64: small ones, and larger ones.

The larger ones have too many parameters for a full matrix: engram takes the Hessian in some
directions there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from benchmarks.data import data_file
from engram.retraining.recipes import Adam

Arrays = tuple[np.ndarray, np.ndarray]
NUM_DATA, NUM_LARGE = 1000, 2000
# One value for every setting. It replaced values by setting (2, 2, 1, 0.5, 0.5) after the estimates
# on digits with 2 had been seen; that setting is kept below as "digits-weak". Loss on a held-out
# quarter for 0.3, 1, 3, 10: digits 0.106 0.109 0.137 0.238, USPS 0.142 0.122 0.111 0.110, breast
# cancer 0.206 0.160 0.136 0.108, TREC 0.875 0.729 0.680 0.918; Fashion-MNIST was not tried, and
# neither were the larger nets.
PRIOR_PRECISION = 3.0


@dataclass(frozen=True)
class Setting:
    """One data set with one net.

    Args:
        title: for the tables.
        load: inputs and targets; SystemExit where a file is missing.
        build: the untrained net.
        early: the training that stops long before convergence.
        prior_precision: of the regulariser.
    """

    title: str
    load: Callable[[], Arrays]
    build: Callable[[], nn.Sequential]
    early: Adam
    prior_precision: float = PRIOR_PRECISION

    def data(self) -> tuple[Tensor, Tensor]:
        """As engram takes them."""
        inputs, targets = self.load()
        return torch.tensor(inputs, dtype=torch.float64), torch.tensor(targets, dtype=torch.int64)

    def net(self, seed: int) -> nn.Sequential:
        """The untrained net; the random state is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build().double()


def _digits() -> Arrays:
    images, labels = load_digits(return_X_y=True)
    return images[:NUM_DATA] / 16, labels[:NUM_DATA]


def _fashion() -> Arrays:
    with np.load(data_file("fmnist.npz")) as arrays:
        images, labels = arrays["x_train"][:NUM_DATA] / 255, arrays["y_train"][:NUM_DATA]
    pooled = images.reshape(-1, 14, 2, 14, 2).mean((2, 4))
    return pooled.reshape(len(pooled), -1), labels


def _mnist_large() -> Arrays:
    with np.load(data_file("mnist.npz")) as arrays:
        images, labels = arrays["x_train"][:NUM_DATA], arrays["y_train"][:NUM_DATA]
    return images.reshape(len(images), -1) / 255, labels


def _usps_large() -> Arrays:
    with np.load(data_file("usps.npz")) as arrays:
        images, labels = arrays["x_train"][:NUM_LARGE], arrays["y_train"][:NUM_LARGE]
    return images.reshape(-1, 1, 16, 16) / 255, labels


def _usps() -> Arrays:
    with np.load(data_file("usps.npz")) as arrays:
        images, labels = arrays["x_train"], arrays["y_train"]
    chosen = np.flatnonzero((labels == 3) | (labels == 5))[:NUM_DATA]
    return images[chosen].reshape(len(chosen), -1) / 255, labels[chosen] == 5


def _cancer() -> Arrays:
    measurements, labels = load_breast_cancer(return_X_y=True)
    return StandardScaler().fit_transform(measurements), labels


def _questions(count: int = NUM_DATA, vocabulary: int = 400) -> Arrays:
    lines = data_file("text/trec_train_5500.label").read_text(encoding="latin-1").splitlines()
    pairs = [line.split(" ", 1) for line in lines[:count]]
    kinds = [label.split(":")[0] for label, _ in pairs]
    words = TfidfVectorizer(max_features=vocabulary, token_pattern=r"(?u)\b\w+\b")
    features = words.fit_transform([question for _, question in pairs]).toarray()
    return features, np.unique(kinds, return_inverse=True)[1]


def _perceptron(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for wide, narrow in pairwise(widths):
        layers += [nn.Linear(wide, narrow), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def _convolutional() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(256, 24),
        nn.Tanh(),
        nn.Linear(24, 10),
    )


SETTINGS: dict[str, Setting] = {
    "digits": Setting(
        "Digits, MLP 64-24-16-10",
        _digits,
        lambda: _perceptron(64, 24, 16, 10),
        Adam(learning_rate=1e-2, epochs=8, batch_size=50),
    ),
    "digits-weak": Setting(
        "Digits (weaker regulariser), MLP 64-24-16-10",
        _digits,
        lambda: _perceptron(64, 24, 16, 10),
        Adam(learning_rate=1e-2, epochs=8, batch_size=50),
        prior_precision=2.0,
    ),
    "usps": Setting(
        "USPS 3 against 5, MLP 256-16-2",
        _usps,
        lambda: _perceptron(256, 16, 2),
        Adam(learning_rate=1e-2, epochs=5, batch_size=50),
    ),
    "cancer": Setting(
        "Breast cancer, MLP 30-24-16-2",
        _cancer,
        lambda: _perceptron(30, 24, 16, 2),
        Adam(learning_rate=5e-3, epochs=5, batch_size=50),
    ),
    "questions": Setting(
        "TREC questions, TF-IDF, MLP 400-10-6",
        _questions,
        lambda: _perceptron(400, 10, 6),
        Adam(learning_rate=1e-2, epochs=8, batch_size=50),
    ),
    "fashion": Setting(
        "Fashion-MNIST, 14 x 14, MLP 196-16-10",
        _fashion,
        lambda: _perceptron(196, 16, 10),
        Adam(learning_rate=1e-2, epochs=8, batch_size=50),
    ),
    "mnist-large": Setting(
        "MNIST, 28 x 28, MLP 784-16-10",
        _mnist_large,
        lambda: _perceptron(784, 16, 10),
        Adam(learning_rate=3e-3, epochs=8, batch_size=50),
    ),
    "usps-large": Setting(
        "USPS, ten digits, convolutions 8-16, dense 24-10",
        _usps_large,
        _convolutional,
        Adam(learning_rate=3e-3, epochs=5, batch_size=50),
    ),
    "questions-large": Setting(
        "TREC questions, 1500 words, MLP 1500-10-6",
        lambda: _questions(NUM_LARGE, 1500),
        lambda: _perceptron(1500, 10, 6),
        Adam(learning_rate=1e-2, epochs=5, batch_size=50),
    ),
}
