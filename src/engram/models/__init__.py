"""Models for which leaving out is exact, or one Newton step from it."""

from engram.models.from_estimator import from_estimator, read
from engram.models.glm.fit import Fit
from engram.models.glm.fitting import fit_glm, fit_linear, fit_multinomial
from engram.models.influence.measures import (
    GlmMeasures,
    LinearMeasures,
    glm_measures,
    linear_measures,
)
from engram.models.influence.removal import remove_group
from engram.models.influence.sensitivities import sensitivities_of

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
