"""kronfluence: self-influence with EK-FAC."""

from __future__ import annotations

import copy
import logging
import tempfile

import torch
from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import FactorArguments, ScoreArguments
from kronfluence.task import Task
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from benchmarks.faithfulness.estimates import Estimate, Method
from benchmarks.faithfulness.truths import Problem

BATCH_SIZE = 100


class Classification(Task):
    """Cross-entropy; labels are sampled from the net's predictions for the Fisher matrix."""

    def compute_train_loss(
        self, batch: list[Tensor], model: nn.Module, sample: bool = False
    ) -> Tensor:
        inputs, targets = batch
        logits = model(inputs)
        if sample:
            targets = torch.multinomial(logits.detach().softmax(1), 1)[:, 0]
        return functional.cross_entropy(logits, targets, reduction="sum")

    def compute_measurement(self, batch: list[Tensor], model: nn.Module) -> Tensor:
        return self.compute_train_loss(batch, model)


def self_influence(problem: Problem) -> Estimate:
    """g' (F / N + delta / N)^-1 g / N."""
    torch.manual_seed(0)
    task, data = Classification(), TensorDataset(*problem.data)
    model = prepare_model(copy.deepcopy(problem.model), task)
    wide = torch.float64
    with tempfile.TemporaryDirectory() as folder:
        analyzer = Analyzer(
            "faithfulness",
            model,
            task,
            cpu=True,
            log_level=logging.ERROR,
            disable_tqdm=True,
            output_dir=folder,
        )
        analyzer.fit_all_factors(
            "ekfac",
            data,
            per_device_batch_size=BATCH_SIZE,
            factor_args=FactorArguments(
                strategy="ekfac",
                activation_covariance_dtype=wide,
                gradient_covariance_dtype=wide,
                per_sample_gradient_dtype=wide,
                lambda_dtype=wide,
            ),
        )
        analyzer.compute_self_scores(
            "self",
            "ekfac",
            data,
            per_device_train_batch_size=BATCH_SIZE,
            train_indices=problem.left_out.tolist(),
            score_args=ScoreArguments(
                damping_factor=problem.decay,
                per_sample_gradient_dtype=wide,
                precondition_dtype=wide,
                score_dtype=wide,
            ),
        )
        scores = analyzer.load_self_scores("self")
    return Estimate.of_influence(scores["all_modules"] / len(problem.inputs))


METHODS: dict[str, Method] = {"kronfluence, EK-FAC": self_influence}
