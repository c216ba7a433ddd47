"""One run: an audit, five folds of the same model, and what is kept of both, in a file."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from sklearn.model_selection import StratifiedKFold

from benchmarks.audit.data import Pair, with_wrong_labels
from engram.auditing.columns import Wanted
from engram.auditing.estimating import estimated
from engram.auditing.examples import Examples
from engram.auditing.fitting import Schedule, fit
from engram.auditing.readers import read_examples
from engram.auditing.second_training import second_opinion
from engram.auditing.stock import stock_of
from engram.training.memorisation import prequential

FOLDS = 5
FOLDED = "folds"  # folder of their arrays


@dataclass(frozen=True)
class Case:
    """A data set with wrong labels.

    Args:
        name: of the data set.
        noise: ``symmetric``, ``dependent`` or ``none``.
        seed: of the wrong labels and of the training.
    """

    name: str
    noise: str
    seed: int

    @property
    def file(self) -> str:
        """Where it is kept."""
        return f"{self.name}-{self.noise}-{self.seed}.npz"


def run(
    case: Case,
    read: Callable[[], Pair],
    folder: Path,
    folds: bool,
    smaller: tuple[int | None, int | None] = (None, None),
) -> Path:
    """The arrays of a case, computed unless they are there.

    Args:
        case: what.
        read: its data.
        folder: where arrays are kept; those of the folds, which know nothing of estimates, in a
            folder ``folds`` of their own.
        folds: whether five folds are trained too.
        smaller: so many of the images, and epochs, where there is little time.
    """
    path, of_folds = folder / case.file, folder / FOLDED / case.file
    if path.exists() and (of_folds.exists() or not folds):
        return path
    inputs, right = read()
    count, epochs = smaller
    if count is not None and inputs.ndim > 2:
        inputs, right = inputs[:count], right[:count]
    given, wrong = with_wrong_labels(right, case.noise, case.seed)
    examples = read_examples((inputs, given), Wanted())
    of_folds.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        found = _audit(examples, case.seed, epochs)
        np.savez(path, given=given, right=right, wrong=wrong, **found)
    if folds and not of_folds.exists():
        with np.load(path) as arrays:
            trained = int(arrays["epochs"])
        np.savez(of_folds, **_folds(examples, trained, case.seed))
    return path


def arrays_of(path: Path) -> dict[str, np.ndarray]:
    """What is kept of a case, with its folds where they were trained."""
    found: dict[str, np.ndarray] = {}
    for part in (path, path.parent / FOLDED / path.name):
        if part.exists():
            with np.load(part) as file:
                found |= {name: file[name] for name in file.files}
    return found


def _audit(examples: Examples, seed: int, epochs: int | None) -> dict[str, np.ndarray]:
    torch.manual_seed(seed)
    stock = stock_of(examples)
    begun = time.process_time()
    trained = fit(stock, examples.targets, examples.task, Schedule(epochs, seed=seed), False)
    middle = time.process_time()
    data = (stock.inputs, examples.targets)
    result, _ = estimated(
        trained.model, data, examples.task, trained.training, stock.recipe.estimate, False
    )
    end = time.process_time()
    opinion = second_opinion(
        stock, examples.targets, examples.task, Schedule(seed=seed), len(trained.curve), False
    )
    second = time.process_time() - end
    assert opinion is not None
    heard = prequential(trained.training, examples.targets)
    assert heard is not None
    assert trained.training.visits is not None
    visits, _ = trained.training.visits.mean_predictions(torch.arange(len(examples)))
    return {
        "loo_probabilities": result.loo_probabilities.numpy(),
        "loo_loss": result.loo_loss.numpy(),
        "loss": result.loss.numpy(),
        "heard": heard.numpy(),
        "second_seconds": np.array(second),
        "second_loss": np.array(opinion.loss),
        "second_positions": opinion.positions.numpy(),
        "second_probabilities": opinion.probabilities.numpy(),
        "visits": visits.numpy(),
        "epochs": np.array(len(trained.curve)),
        "train_seconds": np.array(middle - begun),
        "estimate_seconds": np.array(end - middle),
    }


def _folds(examples: Examples, epochs: int, seed: int) -> dict[str, np.ndarray]:
    """Out-of-sample probabilities of the same model, trained for as long; encoders fold by fold."""
    found = np.zeros((len(examples), examples.task.num_outputs), np.float32)
    labels = examples.targets.numpy()
    split = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
    seconds = 0.0
    for number, (inside, outside) in enumerate(split.split(np.zeros(len(labels)), labels)):
        stock = stock_of(examples.subset(inside))
        stock = replace(stock, recipe=replace(stock.recipe, stops_early=False, epochs=epochs))
        begun = time.process_time()
        schedule = Schedule(seed=FOLDS * seed + number + 1)
        trained = fit(stock, examples.targets[inside], examples.task, schedule, False)
        with torch.no_grad():
            encoded = stock.encode(examples.subset(outside).inputs)
            found[outside] = trained.model(encoded).softmax(1).numpy()
        seconds += time.process_time() - begun
    return {"folds": found, "fold_seconds": np.array(seconds)}
