"""Models for which leaving out is exact, or one Newton step from it."""

from engram.models import responses
from engram.models.fit import Fit
from engram.models.glm import fit_glm, fit_multinomial
from engram.models.glm_measures import GlmMeasures, glm_measures
from engram.models.linear import fit_linear
from engram.models.linear_measures import LinearMeasures, linear_measures
from engram.models.of import of, read
from engram.models.removal import remove_group
from engram.models.sensitivities import sensitivities_of

__all__ = [
    "Fit",
    "GlmMeasures",
    "LinearMeasures",
    "fit_glm",
    "fit_linear",
    "fit_multinomial",
    "glm_measures",
    "linear_measures",
    "of",
    "read",
    "remove_group",
    "responses",
    "sensitivities_of",
]
