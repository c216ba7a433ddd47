"""TRAK (traker): the score of an example on itself, at the trained net."""

from __future__ import annotations

import copy
import logging
import tempfile

import torch
from trak import TRAKer
from trak.projectors import BasicProjector, NoOpProjector

from benchmarks.faithfulness.estimates import Estimate, Method
from benchmarks.faithfulness.truths import Problem

BATCH_SIZE = 100
LARGEST_PLAIN = 6000  # gradient entries that are taken as they are
DIMENSIONS = 2048  # onto which longer gradients are projected, traker's own default


def own_score(problem: Problem) -> Estimate:
    """Gradients as they are in small nets: projecting them only adds noise."""
    model = copy.deepcopy(problem.model).float()
    count = sum(p.numel() for p in model.parameters())
    if count <= LARGEST_PLAIN:
        projector = NoOpProjector(count, count, 0, "rademacher", "cpu")
    else:
        projector = BasicProjector(count, DIMENSIONS, 0, "rademacher", "cpu")
    inputs, targets = problem.inputs.float(), problem.targets
    with tempfile.TemporaryDirectory() as folder:
        traker = TRAKer(
            model=model,
            task="image_classification",
            train_set_size=len(inputs),
            save_dir=folder,
            device="cpu",
            projector=projector,
            proj_dim=None,
            use_half_precision=False,
            logging_level=logging.ERROR,
            lambda_reg=problem.prior_precision,
        )
        traker.load_checkpoint(model.state_dict(), model_id=0)
        for chosen in torch.arange(len(inputs)).split(BATCH_SIZE):
            traker.featurize((inputs[chosen], targets[chosen]), num_samples=len(chosen))
        traker.finalize_features()
        traker.start_scoring_checkpoint("self", model.state_dict(), 0, len(problem.left_out))
        for chosen in problem.left_out.split(BATCH_SIZE):
            traker.score((inputs[chosen], targets[chosen]), num_samples=len(chosen))
        scores = torch.tensor(traker.finalize_scores("self"))
    return Estimate(scores[problem.left_out, torch.arange(len(problem.left_out))])


METHODS: dict[str, Method] = {"TRAK": own_score}
