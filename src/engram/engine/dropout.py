r"""Dropout as while training, for the curvature that training saw.

A layer after dropout with rate p has inputs a with moments :math:`a a' + \frac{p}{1-p}
\mathrm{diag}(a^2)` in expectation over the masks, and so a larger curvature than without. Sampled
masks give that for every net, whatever is between dropout and the outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from engram.core.state.process import random_states, restored


@contextmanager
def dropping(model: nn.Module, seed: int) -> Iterator[None]:
    """Dropout is on inside, with masks from a seed; the random state is as before afterwards."""
    layers = [m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
    off = [layer for layer in layers if not layer.training]
    if not off:
        yield
        return
    with restored(tuple(random_states())):
        torch.manual_seed(seed)
        for layer in off:
            layer.training = True
        try:
            yield
        finally:
            for layer in off:
                layer.training = False
