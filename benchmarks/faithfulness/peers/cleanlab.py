"""cleanlab: the label-quality score, from the trained net's own predictions."""

from __future__ import annotations

import torch
from cleanlab.rank import get_label_quality_scores

from benchmarks.faithfulness.estimates import Estimate, Method
from benchmarks.faithfulness.truths import Problem


def label_quality(problem: Problem) -> Estimate:
    """One minus the quality, so that more is worse."""
    quality = get_label_quality_scores(
        problem.targets[problem.left_out].numpy(), problem.outputs().softmax(1).numpy()
    )
    return Estimate(1 - torch.as_tensor(quality))


METHODS: dict[str, Method] = {"cleanlab, label quality": label_quality}
