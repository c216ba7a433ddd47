"""Small tables of real data, and responses drawn on them, for models of other libraries."""

import numpy as np
import statsmodels.api as sm
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris

RANDOM = np.random.default_rng(0)


def scaled(loader, count):
    inputs, targets = loader(return_X_y=True)
    rows = RANDOM.permutation(len(targets))[:count]
    inputs = inputs[rows][:, :6]
    return (inputs - inputs.mean(0)) / inputs.std(0), targets[rows]


DIABETES = scaled(load_diabetes, 80)
CANCER = scaled(load_breast_cancer, 120)
IRIS = scaled(load_iris, 150)
WEIGHTS = RANDOM.uniform(0.5, 2.0, 150)

X = sm.add_constant(CANCER[0][:, :3])
COUNTS = RANDOM.poisson(np.exp(X @ [0.5, 0.2, -0.1, 0.3])).astype(float)
TRIALS = RANDOM.integers(1, 20, len(X))
HITS = RANDOM.binomial(TRIALS, 0.4)
