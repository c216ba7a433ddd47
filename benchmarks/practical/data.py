"""Small parts of public data sets, some of their labels made wrong on purpose."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.data import data_file

WRONG_SHARE = 0.1  # of the labels
NUM_TEST = 2000
# the class of CIFAR-10 that each is taken for: plane, car, bird, cat, deer, dog, frog, horse, ship,
# truck
TAKEN_FOR = torch.tensor([8, 9, 0, 5, 7, 3, 2, 4, 0, 1])
WORDS = 24  # of a question, at most; nearly all are shorter
RARE = 2  # a word that comes less often has no entry of its own
PADDING, UNKNOWN = 0, 1
Mislabel = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True, eq=False)
class Split:
    """Training examples with the labels that a net is given, and a test set.

    Args:
        inputs: [N, ...].
        given: labels that a net is trained with, [N].
        right: the labels of the data set, [N].
        test_inputs: [T, ...].
        test_right: their labels, [T].
        test_given: the same with as many wrong ones as ``given`` has, [T].
    """

    inputs: Tensor
    given: Tensor
    right: Tensor
    test_inputs: Tensor
    test_right: Tensor
    test_given: Tensor

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        """What a net is trained on."""
        return self.inputs, self.given

    @property
    def test(self) -> tuple[Tensor, Tensor]:
        """What it is tested on, with the labels of the data set."""
        return self.test_inputs, self.test_right

    @property
    def wrong(self) -> Tensor:
        """Whether a label is not that of the data set, [N]."""
        return self.given != self.right


def uniform(labels: Tensor, generator: torch.Generator) -> Tensor:
    """Another class, all others alike."""
    classes = int(labels.max()) + 1
    return (labels + torch.randint(1, classes, labels.shape, generator=generator)) % classes


def class_dependent(labels: Tensor, generator: torch.Generator) -> Tensor:
    """The class of CIFAR-10 that it is easily taken for."""
    return TAKEN_FOR[labels]


def fashion(count: int, mislabel: Mislabel | None) -> Split:
    """Some images of Fashion-MNIST."""
    with np.load(data_file("fmnist.npz")) as arrays:
        parts = [torch.from_numpy(arrays[f"x_{part}"])[:, None] for part in ("train", "test")]
        labels = [torch.from_numpy(arrays[f"y_{part}"]).long() for part in ("train", "test")]
    return _split([part.float() / 255 for part in parts], labels, count, mislabel)


def cifar(count: int, mislabel: Mislabel | None) -> Split:
    """Some images of CIFAR-10, each colour with mean 0 and deviation 1."""
    with np.load(data_file("cifar10_10k.npz")) as arrays:
        parts = [torch.from_numpy(arrays[f"x_{part}"]) for part in ("train", "test")]
        labels = [
            torch.from_numpy(arrays[f"y_{part}"]).long().flatten() for part in ("train", "test")
        ]
    train, test = (part.permute(0, 3, 1, 2).float() / 255 for part in parts)
    mean, deviation = (
        fold(train.transpose(0, 1).flatten(1), dim=1)[:, None, None]
        for fold in (torch.mean, torch.std)
    )
    images = [((part - mean) / deviation).contiguous() for part in (train, test)]
    return _split(images, labels, count, mislabel)


def affairs(count: int) -> Split:
    """Who had an extramarital affair, from eight answers of a survey (statsmodels' ``fair``)."""
    from statsmodels.datasets import fair

    frame = fair.load_pandas().data
    answers = torch.tensor(frame.drop(columns="affairs").to_numpy(), dtype=torch.float32)
    answers = (answers - answers.mean(0)) / answers.std(0)
    labels = torch.tensor((frame["affairs"] > 0).to_numpy()).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:count], order[count:]
    return _split([answers[train], answers[test]], [labels[train], labels[test]], count, None)


def questions(count: int, mislabel: Mislabel | None) -> Split:
    """Questions of TREC as word numbers [N, WORDS], 0 after the end; six kinds of answers."""
    texts, labels = zip(
        *(_questions(f"text/trec_{part}.label") for part in ("train_5500", "TREC_10")), strict=True
    )
    numbers = _word_numbers(texts[0])
    kinds = {kind: place for place, kind in enumerate(sorted(set(labels[0])))}
    inputs = [_padded([[numbers.get(w, UNKNOWN) for w in text] for text in part]) for part in texts]
    targets = [torch.tensor([kinds[kind] for kind in part]) for part in labels]
    return _split(inputs, targets, count, mislabel)


def vocabulary() -> int:
    """Numbers that words of TREC have, padding and unknown words included."""
    return UNKNOWN + 1 + len(_word_numbers(_questions("text/trec_train_5500.label")[0]))


def _word_numbers(texts: list[list[str]]) -> dict[str, int]:
    times = Counter(word for text in texts for word in text)
    known = sorted(word for word, count in times.items() if count >= RARE)
    return {word: place for place, word in enumerate(known, start=UNKNOWN + 1)}


def _questions(name: str) -> tuple[list[list[str]], list[str]]:
    """Words and coarse labels."""
    lines = data_file(name).read_text(encoding="latin-1").splitlines()
    pairs = [line.partition(" ") for line in lines if line.strip()]
    texts = [re.findall(r"[a-z]+|\d+|[^\sa-z\d]", text.lower()) for _, _, text in pairs]
    return texts, [label.partition(":")[0] for label, _, _ in pairs]


def _padded(rows: list[list[int]]) -> Tensor:
    padded = torch.full((len(rows), WORDS), PADDING)
    for place, row in enumerate(rows):
        padded[place, : len(row[:WORDS])] = torch.tensor(row[:WORDS])
    return padded


def _split(
    inputs: list[Tensor], labels: list[Tensor], count: int, mislabel: Mislabel | None
) -> Split:
    """The first part's random examples to train on, the second's to test."""
    generator = torch.Generator().manual_seed(0)
    train = torch.randperm(len(labels[0]), generator=generator)[:count]
    test = torch.randperm(len(labels[1]), generator=generator)[:NUM_TEST]
    right, test_right = labels[0][train], labels[1][test]
    given, test_given = (_mislabelled(part, mislabel, generator) for part in (right, test_right))
    return Split(inputs[0][train], given, right, inputs[1][test], test_right, test_given)


def _mislabelled(right: Tensor, mislabel: Mislabel | None, generator: torch.Generator) -> Tensor:
    if mislabel is None:
        return right.clone()
    chosen = torch.randperm(len(right), generator=generator)[: round(WRONG_SHARE * len(right))]
    given = right.clone()
    given[chosen] = mislabel(right[chosen], generator)
    return given
