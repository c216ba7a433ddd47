"""What the demonstration is made with, in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Data, net and training of the demonstration.

    Args:
        seed: of the split, the wrong labels and the first weights.
        num_train: images to train on; the others of the 1797 are test images.
        flipped_share: share of the training labels that is replaced by a wrong one.
        hidden: units of the hidden layer.
        prior_precision: delta of the regulariser delta/2 |theta|^2 on the sum of the losses.
        epochs: of training; the whole training set is one batch.
        learning_rate: Adam's at the start; it falls to zero along a cosine.
        refit_epochs: of training again without a class, from the trained weights.
    """

    seed: int = 0
    num_train: int = 1000
    flipped_share: float = 0.05
    hidden: int = 32
    prior_precision: float = 1.0
    epochs: int = 1000
    learning_rate: float = 0.03
    refit_epochs: int = 500
