"""kronfluence: EK-FAC for linear layers and convolutions."""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import FactorArguments, ScoreArguments
from kronfluence.task import Task
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.libraries.case import Case, Way, summed_loss


class Summed(Task):
    """Cross entropy; labels are sampled from the net's predictions for the Fisher matrix."""

    def compute_train_loss(
        self, batch: list[Tensor], model: nn.Module, sample: bool = False
    ) -> Tensor:
        inputs, targets = batch
        outputs = model(inputs)
        if sample:
            probabilities = outputs.detach().flatten(0, -2).softmax(1)
            targets = torch.multinomial(probabilities, 1).reshape(targets.shape)
        return summed_loss(outputs, targets)

    def compute_measurement(self, batch: list[Tensor], model: nn.Module) -> Tensor:
        return self.compute_train_loss(batch, model)


@contextmanager
def analyzed(case: Case) -> Iterator[tuple[Analyzer, TensorDataset, ScoreArguments]]:
    """With the factors fitted."""
    torch.manual_seed(0)
    task, data = Summed(), TensorDataset(*case.train)
    model = prepare_model(copy.deepcopy(case.model), task)
    with tempfile.TemporaryDirectory() as folder:
        analyzer = Analyzer(
            "libraries",
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
            per_device_batch_size=case.batch_size,
            factor_args=FactorArguments(strategy="ekfac"),
        )
        yield analyzer, data, ScoreArguments(damping_factor=case.damping)


def own(case: Case) -> Tensor:
    """g' (F / N + delta / N)^-1 g of every example."""
    with analyzed(case) as (analyzer, data, score_args):
        analyzer.compute_self_scores(
            "own",
            "ekfac",
            data,
            per_device_train_batch_size=case.batch_size,
            score_args=score_args,
        )
        return analyzer.load_self_scores("own")["all_modules"]


def pairs(case: Case) -> Tensor:
    """The same between training and test examples."""
    with analyzed(case) as (analyzer, data, score_args):
        analyzer.compute_pairwise_scores(
            "pairs",
            "ekfac",
            query_dataset=TensorDataset(*case.test),
            train_dataset=data,
            per_device_query_batch_size=case.batch_size,
            per_device_train_batch_size=case.batch_size,
            score_args=score_args,
        )
        return analyzer.load_pairwise_scores("pairs")["all_modules"].mT


OWN: dict[str, Way] = {"kronfluence, EK-FAC": own}
PAIRS: dict[str, Way] = {"kronfluence, EK-FAC": pairs}
