"""Matrices and solvers that know no model: blocks of a precision, Krylov methods, Gram matrices."""
