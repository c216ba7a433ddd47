"""The accuracies that the paper states, and whether a net has come near enough to be judged by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MARGIN = 15.0  # per cent below the paper's at which a net is another one than the paper's
UNTRAINED = "not judged"
# test accuracies that the paper states, by panel, in per cent; by net where it has two
ACCURACIES: dict[str, tuple[float, ...]] = {
    "fig2a": (98.4,),
    "fig2b": (91.2,),
    "fig2c": (76.7,),
    "fig6a": (94.8,),
    "fig6b": (98.4,),
    "fig3a": (86.2, 91.2),
    "fig11d": (98.4, 99.1),
    "fig1b": (83.4,),
    "fig5a": (90.7,),
    "fig5b": (91.0,),
    "fig5c": (91.0,),
    "fig8-mnist-mlp-a": (95.6,),
    "fig8-mnist-mlp-b": (95.8,),
    "fig8-mnist-mlp-c": (95.8,),
    "fig8-mnist-lenet5-a": (97.5,),
    "fig8-mnist-lenet5-b": (97.4,),
    "fig8-mnist-lenet5-c": (97.4,),
    "fig8-cifar-cnn-a": (81.0,),
    "fig8-cifar-cnn-b": (75.4,),
    "fig8-cifar-cnn-c": (73.6,),
    "fig9a": (88.1,),
    "fig9b": (87.6,),
    "fig10-mnist-mlp-8": (97.3,),
    "fig10-mnist-mlp-32": (97.4,),
    "fig10-mnist-lenet5-8": (99.2,),
    "fig10-mnist-lenet5-32": (99.2,),
    "fig10-fmnist-lenet5-8": (91.4,),
    "fig10-fmnist-lenet5-32": (91.2,),
    "fig10-cifar-cnn-8": (75.2,),
    "fig10-cifar-cnn-32": (78.4,),
    "fig3b": (91.3,),
    "fig11a": (91.0,),
    "fig11b": (98.5,),
    "fig11c": (80.9,),
}


def accuracies(results: Mapping[str, Any]) -> tuple[float, ...]:
    """In per cent: the net's, or those of a panel's nets."""
    if "test accuracy" in results:
        return (100 * results["test accuracy"],)
    nets = [row for row in results.values() if isinstance(row, dict)]
    return tuple(100 * row["test accuracy"] for row in nets if "test accuracy" in row)


def judged(name: str, results: Mapping[str, Any], level: str, reason: str) -> tuple[str, str]:
    """A verdict, or none where a net is far from the paper's accuracy."""
    for stated, here in zip(ACCURACIES.get(name, ()), accuracies(results), strict=False):
        if here < stated - MARGIN:
            far = f"the net has an accuracy of {here:.0f} %, the paper's {stated:.0f} %"
            return UNTRAINED, f"{far}, and what it finds is not of such a net: {reason}"
    return level, reason
