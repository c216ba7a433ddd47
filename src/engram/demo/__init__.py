"""The demonstration: a net on scikit-learn's digits, some labels wrong, and what engram finds."""

from __future__ import annotations

import torch
from torch import Tensor, nn

Examples = tuple[Tensor, Tensor]


def trained_digits(seed: int = 0) -> tuple[nn.Module, Examples, Examples]:
    """The net of the demonstration, trained, with its 1,000 training and 797 test examples.

    One label in twenty is wrong, in both, so that their losses can be compared. It takes about a
    second.

    Args:
        seed: of the split, the wrong labels and the first weights.
    """
    # scikit-learn's data, loaded when they are asked for
    from engram.demo.digits import Settings, digits, flipped, network, train

    settings = Settings(seed=seed)
    data, model = digits(settings), network(settings)
    for _ in train(model, *data.train, settings, settings.epochs):
        pass
    generator = torch.Generator().manual_seed(seed)
    labels = flipped(data.test_labels, settings.flipped_share, generator)
    return model, data.train, (data.test_inputs, labels)
