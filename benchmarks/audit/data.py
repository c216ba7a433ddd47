"""The data sets: five of the benchmark, and others that the cut-off was calibrated on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.data import data_file

Pair = tuple[Any, np.ndarray]  # inputs and classes
RATE = 0.1  # share of the labels that are made wrong
FASHION, CIFAR = 10_000, 5_000  # images


def digits() -> Pair:
    """scikit-learn's 1,797 digits."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return (found.images * 15).astype(np.uint8), found.target


def fashion() -> Pair:
    """The first images of Fashion-MNIST."""
    with np.load(data_file("fmnist.npz")) as arrays:
        return arrays["x_train"][:FASHION], arrays["y_train"][:FASHION].astype(np.int64)


def cifar() -> Pair:
    """The first images of a balanced part of CIFAR-10."""
    with np.load(data_file("cifar10_10k.npz")) as arrays:
        return arrays["x_train"][:CIFAR], arrays["y_train"][:CIFAR].astype(np.int64)


def trec() -> Pair:
    """5,452 questions and their coarse kind."""
    content = data_file("text/trec_train_5500.label").read_bytes().decode("latin-1")
    pairs = [line.split(" ", 1) for line in content.splitlines()]
    return _texts([text for _, text in pairs], [label.partition(":")[0] for label, _ in pairs])


def cancer() -> Pair:
    """scikit-learn's table of 569 tumours, benign or malignant."""
    from sklearn.datasets import load_breast_cancer

    return load_breast_cancer(return_X_y=True)


def usps() -> Pair:
    """The first 3,000 digits of USPS."""
    with np.load(data_file("usps.npz")) as arrays:
        return arrays["x_train"][:3000], arrays["y_train"][:3000].astype(np.int64)


def mnist() -> Pair:
    """The first 2,000 digits of MNIST."""
    with np.load(data_file("mnist.npz")) as arrays:
        return arrays["x_train"][:2000], arrays["y_train"][:2000].astype(np.int64)


def spam() -> Pair:
    """5,574 text messages, spam or not."""
    lines = data_file("text/SMSSpamCollection").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("\t", 1) for line in lines if "\t" in line]
    return _texts([text for _, text in pairs], [label for label, _ in pairs])


def fine_trec() -> Pair:
    """The questions of the three largest coarse kinds, and which of their common fine kinds."""
    content = data_file("text/trec_train_5500.label").read_bytes().decode("latin-1")
    pairs = [line.split(" ", 1) for line in content.splitlines()]
    counts: dict[str, int] = {}
    for label, _ in pairs:
        counts[label] = counts.get(label, 0) + 1
    common = [(label, text) for label, text in pairs if counts[label] >= 150]
    return _texts([text for _, text in common], [label for label, _ in common])


def wine() -> Pair:
    """scikit-learn's table of 178 wines of three growers."""
    from sklearn.datasets import load_wine

    return load_wine(return_X_y=True)


def affairs() -> Pair:
    """statsmodels' survey of 6,366 marriages: an affair or not, which no table tells well."""
    import statsmodels.api as sm

    frame = sm.datasets.fair.load_pandas().data
    return frame.drop(columns="affairs").to_numpy(), (frame["affairs"] > 0).to_numpy().astype(int)


def blobs() -> Pair:
    """Made: 4,000 points of four classes that overlap."""
    from sklearn.datasets import make_classification

    return make_classification(
        4000, 20, n_informative=8, n_classes=4, class_sep=1.0, flip_y=0.0, random_state=0
    )


def overlap() -> Pair:
    """Made: 8,000 points of four classes that overlap, some of their numbers missing."""
    from sklearn.datasets import make_classification

    points, labels = make_classification(
        8000, 20, n_informative=8, n_classes=4, class_sep=0.8, flip_y=0.0, random_state=1
    )
    points[np.random.default_rng(1).random(points.shape) < 0.03] = np.nan
    return points, labels


def gauss2() -> Pair:
    """Made: 4,000 points of two normal distributions, their means 2.1 deviations apart."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, 4000)
    means = 1.5 * np.eye(2, 6)
    return generator.normal(size=(4000, 6)) + means[labels], labels


BENCHMARK: dict[str, Callable[[], Pair]] = {
    "digits": digits,
    "tabular": cancer,
    "trec": trec,
    "cifar": cifar,
    "fashion": fashion,
}
CALIBRATION: dict[str, Callable[[], Pair]] = {
    "usps": usps,
    "mnist": mnist,
    "spam": spam,
    "fine-trec": fine_trec,
    "wine": wine,
    "affairs": affairs,
    "blobs": blobs,
    "overlap": overlap,
    "gauss2": gauss2,
}


def _texts(lines: list[str], labels: list[str]) -> Pair:
    names = sorted(set(labels))
    return np.array([line.strip() for line in lines]), np.array([names.index(v) for v in labels])


def with_wrong_labels(labels: np.ndarray, noise: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels of which a tenth is wrong, and which.

    Args:
        labels: right ones.
        noise: ``symmetric``, any other class; ``dependent``, the next class, and of two classes
            only labels of the second, twice as often; ``none``.
        seed: of the draw.
    """
    generator = np.random.default_rng(seed)
    classes, found = int(labels.max()) + 1, labels.copy()
    rates = np.full(len(labels), 0.0 if noise == "none" else RATE)
    if noise == "dependent" and classes == 2:
        rates = 2 * RATE * labels
    wrong = generator.random(len(labels)) < rates
    steps = generator.integers(1, classes, len(labels)) if noise == "symmetric" else 1
    found[wrong] = ((labels + steps) % classes)[wrong]
    return found, wrong
