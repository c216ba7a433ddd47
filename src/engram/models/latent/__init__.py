"""Outputs that are linear in a Gaussian vector, and what is left of them without an example."""
