"""Influence of examples on a linear or generalised linear fit: one by one, in groups, by name."""
