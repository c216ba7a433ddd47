"""Models for which leaving out is exact, or one Newton step from it."""

from engram.models.from_estimator import from_estimator, read
from engram.models.glm import fit_glm, fit_multinomial
from engram.models.influence.glm_measures import GlmMeasures, glm_measures
from engram.models.influence.linear_measures import LinearMeasures, linear_measures
from engram.models.influence.removal import remove_group
from engram.models.influence.sensitivities import sensitivities_of
from engram.models.linear import fit_linear
from engram.models.predictor.fit import Fit

__all__ = [
    "Fit",
    "GlmMeasures",
    "LinearMeasures",
    "fit_glm",
    "fit_linear",
    "fit_multinomial",
    "from_estimator",
    "glm_measures",
    "linear_measures",
    "read",
    "remove_group",
    "sensitivities_of",
]
