"""The demonstration: a net on scikit-learn's digits, some labels wrong, and what engram finds."""

from __future__ import annotations

import torch
from torch import Tensor, nn

Examples = tuple[Tensor, Tensor]


def noisy_digits(seed: int = 0) -> tuple[Examples, Examples, Tensor]:
    """1,000 training and 797 test images [N, 8, 8] of scikit-learn's digits, with their labels.

    One label in twenty is wrong, in both, so that their losses can be compared; which of the
    training labels are comes third, [N].

    Args:
        seed: of the split and the wrong labels.
    """
    from engram.demo.digits import Settings, digits, flipped  # scikit-learn's data, when asked for

    settings = Settings(seed=seed)
    data, generator = digits(settings), torch.Generator().manual_seed(seed)
    labels = flipped(data.test_labels, settings.flipped_share, generator)
    return data.train, (data.test_inputs, labels), data.flipped


def trained_digits(seed: int = 0) -> tuple[nn.Module, Examples, Examples]:
    """The net of the demonstration, trained, with the examples of :func:`noisy_digits`.

    It takes about a second.

    Args:
        seed: of the split, the wrong labels and the first weights.
    """
    from engram.demo.digits import Settings, network, train

    settings = Settings(seed=seed)
    (known, test, _), model = noisy_digits(seed), network(settings)
    for _ in train(model, *known, settings, settings.epochs):
        pass
    return model, known, test
