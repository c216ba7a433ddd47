"""Data sets of the paper's experiments, by name: found where they are, or fetched and checked."""

from engram.data.arrays import Arrays, Images
from engram.data.catalogue import CATALOGUE
from engram.data.loading import Place, load, locate

__all__ = ["Arrays", "Images", "Place", "load", "locate", "names"]


def names() -> list[str]:
    """The data sets that there are.

    Example:
        >>> names()
        ['mnist', 'fmnist', 'cifar10', 'cifar10_10k', 'usps', 'usps_3v5']
    """
    return list(CATALOGUE)
