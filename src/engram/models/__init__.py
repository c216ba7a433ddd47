"""Linear and generalised linear models: leave-one-out in closed form, or by a few Newton steps.

``engram.from_estimator`` takes fitted scikit-learn and statsmodels models; :func:`fit_linear`,
:func:`fit_glm` and :func:`fit_multinomial` fit their own. From a :class:`Fit` come the result that
neural nets give (:func:`sensitivities_of`), the effect of a group (:func:`remove_group`) and the
measures of influence that textbooks name (:func:`linear_measures`, :func:`glm_measures`).
"""

from engram.models.from_estimator import from_estimator, read
from engram.models.glm.fit import Fit
from engram.models.glm.fitting import fit_glm, fit_linear, fit_multinomial
from engram.models.influence.leave_one_out import sensitivities_of
from engram.models.influence.measures import (
    GlmMeasures,
    LinearMeasures,
    glm_measures,
    linear_measures,
)
from engram.models.influence.removal import remove_group

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
