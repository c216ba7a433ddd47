"""Conjugate exponential families, in which the memory-perturbation equation is exact.

``exponential`` has the families of posteriors, and ``learning_rule`` the Bayesian learning rule for
any of them and any losses.
"""

from engram.families import exponential
from engram.families.base import Family, FamilyPosterior
from engram.families.beta_bernoulli import BetaBernoulli
from engram.families.dirichlet_categorical import DirichletCategorical
from engram.families.gamma import GammaExponential, GammaPoisson
from engram.families.gaussian_mixture import GaussianMixture
from engram.families.learning_rule import ExactLosses, LearningRule, MeanLosses, SampledLosses
from engram.families.linear_regression import LinearRegression
from engram.families.linear_state_space import LinearStateSpace
from engram.families.normal_inverse_gamma import NormalInverseGamma
from engram.families.normal_inverse_wishart import NormalInverseWishart
from engram.families.normal_known_variance import NormalKnownVariance
from engram.families.probabilistic_pca import ProbabilisticPCA
from engram.families.variational_mixture import VariationalGaussianMixture

__all__ = [
    "BetaBernoulli",
    "DirichletCategorical",
    "ExactLosses",
    "Family",
    "FamilyPosterior",
    "GammaExponential",
    "GammaPoisson",
    "GaussianMixture",
    "LearningRule",
    "LinearRegression",
    "LinearStateSpace",
    "MeanLosses",
    "NormalInverseGamma",
    "NormalInverseWishart",
    "NormalKnownVariance",
    "ProbabilisticPCA",
    "SampledLosses",
    "VariationalGaussianMixture",
    "exponential",
]
