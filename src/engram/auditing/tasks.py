"""What is to be predicted: a class, several labels at once, or a number.

A task knows the loss it is trained with, the likelihood that this loss is, and how a target is
told to people.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from engram.core.storage.values import variants
from engram.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood

SAYS_YES = 0.5  # probability from which a label of several is predicted


class Task(ABC):
    """Abstract: what the targets mean."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What people call it."""

    @property
    @abstractmethod
    def num_outputs(self) -> int:
        """K, the outputs of a model."""

    @property
    @abstractmethod
    def likelihood(self) -> Likelihood:
        """That the training loss is."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a batch."""

    @property
    def unit(self) -> float:
        """Of the model's outputs, in that of the data."""
        return 1.0

    @abstractmethod
    def told(self, targets: Tensor) -> list[Any]:
        """Targets as people know them: words, or numbers in their own unit."""

    @abstractmethod
    def predicted(self, means: Tensor) -> list[Any]:
        """What predictions [N, K] say, likewise."""


@dataclass(frozen=True)
class Classes(Task):
    """One class each of two or more.

    Args:
        classes: their names, by class number.

    Example:
        >>> Classes(("cat", "dog")).told(torch.tensor([1, 0]))
        ['dog', 'cat']
    """

    classes: tuple[str, ...]

    @property
    def name(self) -> str:
        return "binary" if len(self.classes) == 2 else "classes"

    @property
    def num_outputs(self) -> int:
        return len(self.classes)

    @property
    def likelihood(self) -> Likelihood:
        return Categorical()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets)

    def told(self, targets: Tensor) -> list[str]:
        return [self.classes[number] for number in targets.tolist()]

    def predicted(self, means: Tensor) -> list[str]:
        return self.told(means.argmax(1))


@dataclass(frozen=True)
class MultiLabel(Task):
    """Any number of labels at once, each there or not.

    Args:
        classes: names of the labels.

    Example:
        >>> MultiLabel(("sun", "sea")).told(torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
        ['sun, sea', 'none']
    """

    classes: tuple[str, ...]

    @property
    def name(self) -> str:
        return "multi-label"

    @property
    def num_outputs(self) -> int:
        return len(self.classes)

    @property
    def likelihood(self) -> Likelihood:
        return Bernoulli()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        each = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
        return each.sum(1).mean()

    def told(self, targets: Tensor) -> list[str]:
        found = [
            ", ".join(name for name, there in zip(self.classes, row, strict=True) if there)
            for row in (targets > SAYS_YES).tolist()
        ]
        return [names or "none" for names in found]

    def predicted(self, means: Tensor) -> list[str]:
        return self.told(means)


@dataclass(frozen=True)
class Regression(Task):
    """A number, standardised for the model.

    Args:
        mean, scale: of the numbers as they were given.

    Example:
        >>> Regression(10.0, 2.0).told(torch.tensor([[0.0], [1.5]]))
        [10.0, 13.0]
    """

    mean: float
    scale: float

    @property
    def name(self) -> str:
        return "regression"

    @classmethod
    def of(cls, numbers: np.ndarray) -> tuple[Regression, Tensor]:
        """The task, and its standardised targets [N, 1]."""
        mean, scale = float(numbers.mean()), float(numbers.std()) or 1.0
        targets = torch.as_tensor((numbers - mean) / scale, dtype=torch.float32)
        return cls(mean, scale), targets[:, None]

    @property
    def num_outputs(self) -> int:
        return 1

    @property
    def likelihood(self) -> Likelihood:
        return Gaussian()  # of unit variance: the loss that was trained with, half a square

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * F.mse_loss(outputs, targets)

    @property
    def unit(self) -> float:
        return self.scale

    def told(self, targets: Tensor) -> list[float]:
        """As they were given, to the six digits that single precision keeps."""
        numbers = targets.double()[:, 0] * self.scale + self.mean
        return [float(f"{number:.6g}") for number in numbers.tolist()]

    def predicted(self, means: Tensor) -> list[float]:
        return self.told(means)


variants(Task, {"classes": Classes, "multi_label": MultiLabel, "regression": Regression})
