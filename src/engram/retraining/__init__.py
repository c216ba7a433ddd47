"""Retraining without some examples: the truth that estimates are compared with."""
