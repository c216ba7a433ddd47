"""Whether a machine can hold an experiment, before it begins."""

from __future__ import annotations

import psutil

from experiments.models import SIZES
from experiments.panel import Panel, Scale

ALL = 60_000  # images where a scale takes all of them
PIXELS = {"cifar10": 3 * 32 * 32, "usps_3v5": 256}
GRAY = 28 * 28
BYTES = 4
COPIES_OF_WEIGHTS = 40  # factors, eigenvectors, optimizer state, a few copies trained together
GIGABYTE = 2**30


def bytes_needed(panel: Panel, scale: Scale) -> int:
    """A rough guess: the images, the factors of the largest net, and the results."""
    settings = panel.settings
    nets = getattr(settings, "nets", None) or [getattr(settings, "net", settings)]
    data = getattr(nets[0], "data", "mnist")
    count = scale.num_train or ALL
    images = 2 * count * PIXELS.get(data, GRAY) * BYTES
    weights = max(SIZES.get(getattr(net, "model", "logistic"), SIZES["mlp_32_16"]) for net in nets)
    kept = count * 10 * BYTES * 12
    return images + COPIES_OF_WEIGHTS * weights * BYTES + kept


def check_affordable(panel: Panel, scale: Scale) -> None:
    """SystemExit where the free memory will not do."""
    needed, free = bytes_needed(panel, scale), psutil.virtual_memory().available
    if needed > free:
        raise SystemExit(
            f"expected {needed / GIGABYTE:.1f} GB of free memory for {panel.name}; got "
            f"{free / GIGABYTE:.1f} GB. What to do: take a smaller --scale, or --force"
        )
