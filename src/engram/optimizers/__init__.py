"""Optimizers that no library has, after the paper's equations; each holds its posterior."""

from engram.optimizers.curvatures import GaussNewton, Hessian, Hutchinson, Reparameterised
from engram.optimizers.diagonal_online_newton import DiagonalOnlineNewton
from engram.optimizers.diagonal_von import DiagonalVON
from engram.optimizers.newton import Newton
from engram.optimizers.online_newton import OnlineNewton
from engram.optimizers.von import VON

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
]
