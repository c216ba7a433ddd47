"""Generalised linear models: the design matrix, Newton's method, and the fit with its precision."""
