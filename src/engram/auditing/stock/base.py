"""What a stock model is: a net, its inputs as tensors, and how it is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor, nn

from engram.auditing.examples import Inputs
from engram.core.arguments import AUTO

Encode = Callable[[Inputs], Tensor]
Augment = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Estimate:
    """How examples are left out of a trained model.

    Args:
        structure: of the posterior.
        estimator: the rule; ``"auto"`` goes along the recorded training.
        most_outputs: of all examples together, up to which the curvature is exact; of more, a
            sampled label each. None where it is exact however many.
    """

    structure: str = "kronecker"
    estimator: str = AUTO
    most_outputs: int | None = 50_000


@dataclass(frozen=True, eq=False)
class Recipe:
    """How a stock model is trained.

    Args:
        epochs: most of them.
        batch_size: of a step.
        learning_rate: at the start.
        weight_decay: of AdamW.
        anneals: whether the learning rate falls to 0 along a cosine.
        stops_early: whether our own estimate decides when it has been trained enough.
        augment: random views of a batch; None trains on the examples as they are.
        estimate: how examples are left out afterwards.
    """

    epochs: int
    batch_size: int
    learning_rate: float
    weight_decay: float
    anneals: bool = True
    stops_early: bool = False
    augment: Augment | None = None
    estimate: Estimate = Estimate()


@dataclass(frozen=True, eq=False)
class Stock:
    """A model before its training.

    Args:
        model: untrained.
        encode: inputs of the same kind as tensors, as the model takes them.
        inputs: the training data's, encoded.
        recipe: of the training.
        name: what people call it.
        notes: what was done to the inputs, for people to read.
    """

    model: nn.Module
    encode: Encode
    inputs: Tensor = field(repr=False)
    recipe: Recipe
    name: str
    notes: tuple[str, ...] = ()
