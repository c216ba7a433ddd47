"""Optimizers that no library has, after the paper's equations; each holds its posterior.

All take the same step (:mod:`engram.optimizers.base`) and differ in three choices: the structure of
the precision (``structures``), where its curvature comes from (``curvatures``), and whether the
expectation is at the mean (``newton``) or over samples (``von``). To add one, declare a class with
its ``structure`` and default curvature in ``newton`` or ``von``, its equation as docstring, and
name it here. ``ivon`` guards the one that another package has.
"""

from engram.optimizers.curvatures import (
    GaussNewton,
    Hessian,
    Hutchinson,
    Reparameterised,
    ScoreFunction,
)
from engram.optimizers.newton import DiagonalOnlineNewton, Newton, OnlineNewton
from engram.optimizers.von import VON, DiagonalVON

__all__ = [
    "VON",
    "DiagonalOnlineNewton",
    "DiagonalVON",
    "GaussNewton",
    "Hessian",
    "Hutchinson",
    "Newton",
    "OnlineNewton",
    "Reparameterised",
    "ScoreFunction",
]
