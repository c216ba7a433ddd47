"""Forty rows of three columns, with responses of several kinds drawn on them."""

import numpy as np

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(40, 3))
Y = X.sum(1) + RANDOM.normal(size=40)
BINARY = (RANDOM.uniform(size=40) < 1 / (1 + np.exp(-Y))).astype(float)
COUNTS = RANDOM.poisson(2.0, 40).astype(float)
