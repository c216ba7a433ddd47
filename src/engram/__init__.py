"""engram: which training examples a model depends on, and how it will do on unseen data.

From the training data alone, with the memory-perturbation equation: the change of a model when
examples are left out is estimated by adding up their natural gradients.

What a net does not need is loaded when it is first used: ``data``, ``families``, ``models``
(with SciPy), ``optimizers``; and pandas and matplotlib with the tables and pages that want them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from engram import errors, likelihoods
from engram._version import __version__
from engram.auditing.outcome import Audit
from engram.auditing.run_folder import KIND as _RUN  # noqa: F401 (which load reads)
from engram.core.data.spooling import Spooled, spool
from engram.core.storage.kinds import load
from engram.errors import EngramError
from engram.evidence.assess import assess
from engram.evidence.assessment import Assessment
from engram.evidence.certificate import Certificate
from engram.evidence.certify import certify
from engram.evidence.check_training import TrainingCheck, check_training
from engram.evidence.refine import refine
from engram.evidence.replayed_level import ReplayedLevel, replayed_level
from engram.evidence.verification import Verification
from engram.evidence.verify import verify
from engram.planning.plan import Plan, plan
from engram.posteriors.calibration import calibrate
from engram.posteriors.gaussian import Posterior
from engram.posteriors.laplace import laplace
from engram.posteriors.posterior_of import posterior_of
from engram.retraining import recipes
from engram.retraining.result import Retraining
from engram.retraining.retrain import retrain
from engram.retraining.subset_truth import SubsetTruth
from engram.sensitivity.class_removals import ClassRemovals
from engram.sensitivity.comparison import Comparison, compare
from engram.sensitivity.generalisation import (
    MarginalLikelihood,
    Sharpness,
    marginal_likelihood,
    sharpness,
)
from engram.sensitivity.groups import Removal, remove, remove_classes
from engram.sensitivity.influence import influence
from engram.sensitivity.label_issues import label_issues
from engram.sensitivity.leave_one_out import sensitivities
from engram.sensitivity.likelihood_factors import LikelihoodFactors, likelihood_factors
from engram.sensitivity.loss_covariances import LossCovariances, loss_covariances
from engram.sensitivity.perturbation import Perturbation, perturb
from engram.sensitivity.posterior_without import Information, information, posterior_without
from engram.sensitivity.result import Result
from engram.sensitivity.scored import score
from engram.sensitivity.scores import Scores
from engram.sensitivity.variance import prediction_variance
from engram.tracking.tracker import Tracker
from engram.tracking.tune import Tuning, tune
from engram.training.record import record
from engram.training.replay import replay
from engram.training.training import Training
from engram.trust.verdict import Verdict

if TYPE_CHECKING:
    from engram import data, exports, families, models, optimizers
    from engram.models.from_estimator import from_estimator

_LOADED_WHEN_USED = {
    "audit": "engram.auditing.audit",
    "data": "engram.data",
    "exports": "engram.exports",
    "families": "engram.families",
    "from_estimator": "engram.models.from_estimator",
    "models": "engram.models",
    "optimizers": "engram.optimizers",
}

__all__ = [
    "Assessment",
    "Audit",
    "Certificate",
    "ClassRemovals",
    "Comparison",
    "EngramError",
    "Information",
    "LikelihoodFactors",
    "LossCovariances",
    "MarginalLikelihood",
    "Perturbation",
    "Plan",
    "Posterior",
    "Removal",
    "ReplayedLevel",
    "Result",
    "Retraining",
    "Scores",
    "Sharpness",
    "Spooled",
    "SubsetTruth",
    "Tracker",
    "Training",
    "TrainingCheck",
    "Tuning",
    "Verdict",
    "Verification",
    "__version__",
    "assess",
    "audit",
    "calibrate",
    "certify",
    "check_training",
    "compare",
    "data",
    "errors",
    "exports",
    "families",
    "from_estimator",
    "influence",
    "information",
    "label_issues",
    "laplace",
    "likelihood_factors",
    "likelihoods",
    "load",
    "loss_covariances",
    "marginal_likelihood",
    "models",
    "optimizers",
    "perturb",
    "plan",
    "posterior_of",
    "posterior_without",
    "prediction_variance",
    "recipes",
    "record",
    "refine",
    "remove",
    "remove_classes",
    "replay",
    "replayed_level",
    "retrain",
    "score",
    "sensitivities",
    "sharpness",
    "spool",
    "tune",
    "verify",
]

if not TYPE_CHECKING:  # to a type checker these are plain imports, and a misspelt name is one

    def __getattr__(name: str) -> Any:
        """What is loaded when it is first used; it is an attribute like any other from then on."""
        if name not in _LOADED_WHEN_USED:
            raise AttributeError(f"module 'engram' has no attribute {name!r}")
        found = import_module(_LOADED_WHEN_USED[name])
        globals()[name] = found = getattr(found, name, found)
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
