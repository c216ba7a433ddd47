"""TRAK (traker): projected gradients of the margin and their Gram matrix, at the trained net."""

from __future__ import annotations

import copy
import logging
import tempfile

import torch
from torch import Tensor
from trak import TRAKer
from trak.projectors import BasicProjector

from benchmarks.libraries.case import Case, Way

DIMENSIONS = 512


def pairs(case: Case) -> Tensor:
    """Scores of every training example for every test example."""
    model = copy.deepcopy(case.model)
    count, num_train = sum(p.numel() for p in model.parameters()), len(case.train[1])
    with tempfile.TemporaryDirectory() as folder:
        traker = TRAKer(
            model=model,
            task="image_classification",
            train_set_size=num_train,
            save_dir=folder,
            device="cpu",
            projector=BasicProjector(count, DIMENSIONS, 0, "rademacher", "cpu"),
            proj_dim=DIMENSIONS,
            use_half_precision=False,
            logging_level=logging.ERROR,
            lambda_reg=case.damping * num_train,
        )
        traker.load_checkpoint(model.state_dict(), model_id=0)
        for batch in zip(*(t.split(case.batch_size) for t in case.train), strict=True):
            traker.featurize(batch, num_samples=len(batch[0]))
        traker.finalize_features()
        traker.start_scoring_checkpoint("pairs", model.state_dict(), 0, len(case.test[1]))
        for batch in zip(*(t.split(case.batch_size) for t in case.test), strict=True):
            traker.score(batch, num_samples=len(batch[0]))
        return torch.tensor(traker.finalize_scores("pairs"))


PAIRS: dict[str, Way] = {"TRAK": pairs}
