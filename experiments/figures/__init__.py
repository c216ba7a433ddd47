"""Every panel by name, in the order of the paper."""

from __future__ import annotations

from experiments.figures import (
    beyond,
    classes,
    deviations,
    during_training,
    evolution,
    groups,
    logistic,
    regularisation,
)
from experiments.panel import Panel

PANELS: dict[str, Panel] = {
    panel.name: panel
    for module in (
        deviations,
        groups,
        classes,
        regularisation,
        during_training,
        evolution,
        logistic,
        beyond,
    )
    for panel in module.PANELS
}
