"""Train again without each of some examples, groups or classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn

from engram.core.arguments import AUTO, MANY, seed_number, whole
from engram.core.data.batches import Batch, Batches, Data
from engram.core.parameters import check_module, trainable, uncompiled
from engram.core.progress import Bar
from engram.core.state.copies import private_copy
from engram.core.state.model import device_of, locked, state_preserved
from engram.core.state.process import kept_surroundings
from engram.engine.refusals import named_failures
from engram.errors import ArgumentError, NonFiniteError
from engram.likelihoods import Likelihood, resolve
from engram.problem import Opener
from engram.retraining.identity import Identity, identify, is_steady
from engram.retraining.one_by_one import FunctionWorker, outputs_of
from engram.retraining.own_trainings import Replay
from engram.retraining.prior import Prior, check_prior, check_regularised
from engram.retraining.recipes import NAMED, Recipe
from engram.retraining.replaying import ReplayWorker
from engram.retraining.result import Retraining, assemble
from engram.retraining.run_folder import Ranks, RunFolder, check_folder, wait_until_done
from engram.retraining.selection import (
    EXAMPLES_AT_ONCE,
    Indices,
    Selection,
    Task,
    check_no_workers,
    select,
    select_nothing_else,
)
from engram.retraining.stack import Stack, open_stack
from engram.retraining.subset_truth import SubsetTruth
from engram.retraining.subsets import Make, SubsetRequest, retrain_on_subsets
from engram.retraining.user_function import check_arguments, training_copies
from engram.retraining.workers import RecipeWorker
from engram.training.training import Training

Function = Callable[[nn.Module, Any], nn.Module | None]
Train = str | Recipe | Replay | Training | Function
FEWEST_REFITS = 2  # with nothing left out: a baseline, and one to compare it with
BAR = "{l_bar}{bar}| {n:.1f}/{total:.0f} trainings [{elapsed}<{remaining}{postfix}]"
Worker = RecipeWorker | FunctionWorker | ReplayWorker


@overload
def retrain(
    model: nn.Module,
    data: Data,
    indices: Indices | None = None,
    *,
    groups: Mapping[str, Indices] | Sequence[Indices] | None = None,
    classes: bool | Sequence[int] | None = None,
    subsets: None = None,
    train: Train = "newton",
    likelihood: str | Likelihood = "categorical",
    prior_precision: Prior = 1.0,
    evaluate_on: Data | None = None,
    keep_models: bool = False,
    refits: int = 3,
    folder: str | Path | None = None,
    trust_folder: bool = False,
    seed: int = 0,
    progress: bool = True,
    share: tuple[int, int] | str = AUTO,
) -> Retraining: ...


@overload
def retrain(
    model: nn.Module | Make,
    data: Data,
    *,
    subsets: int | Tensor,
    keep: float = 0.85,
    train: Function,
    likelihood: str | Likelihood = "categorical",
    evaluate_on: Data | None = None,
    keep_models: bool = False,
    folder: str | Path | None = None,
    trust_folder: bool = False,
    workers: int = 1,
    seed: int = 0,
    progress: bool = True,
    share: tuple[int, int] | str = AUTO,
) -> SubsetTruth: ...


def retrain(
    model: nn.Module | Make,
    data: Data,
    indices: Indices | None = None,
    *,
    groups: Mapping[str, Indices] | Sequence[Indices] | None = None,
    classes: bool | Sequence[int] | None = None,
    subsets: int | Tensor | None = None,
    keep: float = 0.85,
    train: Train = "newton",
    likelihood: str | Likelihood = "categorical",
    prior_precision: Prior = 1.0,
    evaluate_on: Data | None = None,
    keep_models: bool = False,
    refits: int = 3,
    folder: str | Path | None = None,
    trust_folder: bool = False,
    workers: int = 1,
    seed: int = 0,
    progress: bool = True,
    share: tuple[int, int] | str = AUTO,
) -> Retraining | SubsetTruth:
    r"""True leave-out effects: train again without the examples, from the trained model.

    .. math:: \theta^{\setminus M} = \arg\min_\theta
        \sum_{i \notin M} \ell_i(\theta) + \frac{\delta}{2} |\theta|^2

    Every deviation is measured from a refit with *everything*, so that further training is not
    mistaken for sensitivity where the given model had not converged.

    With ``subsets=`` it answers for nets as people train them, to no minimum: the training function
    trains many nets from the start, each on a random part of the data and with another seed, and
    every example is compared between the nets that saw it and those that did not. That is the
    truth about all N examples, for some 50 to 200 trainings.

    Args:
        model: trained; it is not changed. With ``subsets``, a function that makes a new model for
            every training, as in ``lambda: Net()``; or a model that is not trained yet, from which
            all of them start.
        data: the training data.
        indices: examples, each left out by itself; all of them if nothing is chosen.
        groups: lists of examples, each list left out together; a dict names them.
        classes: True for each class in turn, or a list of class numbers.
        subsets: how many trainings on random subsets, such that every example is left out equally
            often; or which examples each of them keeps, bool [S, N]. A run with more subsets goes
            on in the folder of one with fewer.
        keep: share of the examples that each of them sees.
        train: a recipe by name (``newton``, ``lbfgs``, ``adam``, ``sgd``) or from
            ``engram.recipes``, which train many copies at once; or a function
            ``fit(model, data)`` that gets a copy of the model and the data without the left-out
            examples, in the form that ``data`` has, and trains the copy in place or returns a
            trained one. It should minimise the same objective as the first training did.
        likelihood: a name or an object; the loss of the recipes and of the result.
        prior_precision: delta of the recipes' regulariser, one number or one for each trainable
            parameter by name; a function has its own.
        evaluate_on: other data, for instance a test set, whose losses are wanted for every copy.
        keep_models: keep the parameters of every copy in the result.
        refits: trainings with nothing left out, for baseline and noise floor; at least 2.
        folder: where finished copies are written at once. The same call goes on with it after a
            kill; processes started by ``torchrun`` share the work through it. A folder of another
            model, training function, likelihood, data or settings is refused.
        trust_folder: your word that what cannot be compared with the run in the folder (the error
            names it) is the same.
        workers: processes that share the trainings on subsets, each on one thread of a CPU.
        seed: of all random numbers; every copy gets the same, every subset another.
        progress: show a bar with the time left when it takes longer than a few seconds.
        share: which of the copies are this process's, ``(number, of how many)``, for processes that
            have nothing but the folder in common and may run at any time: where copies of others
            are missing at the end, a RunFolderError says so. ``"auto"`` is the rank of ``torchrun``
            or ``srun``, whose processes wait for each other.

    Returns:
        Outputs, deviations and losses of the left-out examples, and the noise floor; with
        ``subsets``, an :class:`engram.SubsetTruth`.

    Example:
        >>> from engram.likelihoods import Gaussian
        >>> x = torch.tensor([[1.0], [1.0], [1.0]], dtype=torch.float64)
        >>> y = torch.tensor([[0.0], [0.0], [4.0]], dtype=torch.float64)
        >>> mean = nn.Linear(1, 1, bias=False).double()
        >>> _ = nn.init.constant_(mean.weight, 1.0)  # 4 / (3 + prior_precision)
        >>> truth = retrain(mean, (x, y), likelihood=Gaussian(), prior_precision=1.0)
        >>> truth.outputs + truth.deviation
        tensor([[1.3333],
                [1.3333],
                [0.0000]], dtype=torch.float64)
    """
    chosen, seed = resolve(likelihood), seed_number(seed)
    check_folder(folder)
    if subsets is not None:
        select_nothing_else(indices, groups, classes)
        request = SubsetRequest(
            train, subsets, keep, chosen, evaluate_on, keep_models, seed, workers, share
        )
        return retrain_on_subsets(model, data, request, folder, trust_folder, progress)
    check_no_workers(workers)
    model = _module(model)
    delta, ways = _checked(prior_precision, train, model)
    refits = whole("number of refits", refits, FEWEST_REFITS, MANY, "use refits=3")
    ranks = Ranks.of(share)
    ranks.check_folder(folder)
    with locked(model), kept_surroundings(), torch.inference_mode(False):
        selection = select(Batches(data, EXAMPLES_AT_ONCE), indices, groups, classes)
        task = Task(selection, chosen, evaluate_on, refits, keep_models, seed)
        identity = identify(model, data, ways, task, delta)
        identity.check_seen(folder, trust_folder, ranks.world_size)
        run = RunFolder(folder, identity.fingerprint, identity.settings)
        opener = Opener(data, chosen)
        return _retrained(model, opener, Way(ways, task, delta, identity), run, ranks, progress)


def _checked(
    prior: Prior, train: Train, model: nn.Module
) -> tuple[Prior, Recipe | Replay | Function]:
    """The prior, and the way to train, which asks for a positive one if it is a recipe."""
    delta, ways = check_prior(prior, list(trainable(model))), resolved(train)
    if isinstance(ways, Recipe):
        check_regularised(delta)
    return delta, ways


def _module(model: Any) -> nn.Module:
    check_module(model)
    return uncompiled(model)


def retrain_examples(
    model: nn.Module,
    opener: Opener,
    indices: Indices,
    train: Train,
    prior_precision: Prior,
    progress: bool = True,
) -> Retraining:
    """True leave-one-out effects of some examples, for a model that is open already.

    Args:
        model: trained; it is not changed.
        opener: of the model on its data.
        indices: the examples.
        train, prior_precision, progress: as for :func:`retrain`.
    """
    (delta, ways), ranks = _checked(prior_precision, train, model), Ranks.of()
    ranks.check_folder(None)
    with locked(model), kept_surroundings(), torch.inference_mode(False):
        selection = select(Batches(opener.data, EXAMPLES_AT_ONCE), indices, None, None)
        task = Task(selection, opener.likelihood, None, FEWEST_REFITS, False, 0)
        identity = identify(model, opener.data, ways, task, delta)
        run = RunFolder(None, identity.fingerprint, identity.settings)
        return _retrained(model, opener, Way(ways, task, delta, identity), run, ranks, progress)


@dataclass(frozen=True)
class Way:
    """How and what is trained, with which prior, and the run's fingerprint."""

    train: Recipe | Replay | Function
    task: Task
    prior: Prior
    identity: Identity


def _retrained(
    model: nn.Module, opener: Opener, way: Way, run: RunFolder, ranks: Ranks, progress: bool
) -> Retraining:
    """Train whatever the folder does not hold, and put everything together."""
    private = private_copy(model)  # Ctrl-C while its weights are exchanged finds the copy only
    if not isinstance(way.train, Recipe | Replay):
        way = replace(way, train=training_copies(way.train, model, private))
    opened = _worker(private, opener, way, progress)
    with opened as (worker, given), ranks.taking_part(run):
        _train_missing(worker, run, way.task.selection, ranks, progress)
    return assemble(model, opener.data, way.task, run, given, way.identity)


def _train_missing(
    worker: Worker, run: RunFolder, selection: Selection, ranks: Ranks, progress: bool
) -> None:
    """Whatever the folder does not hold yet: the refits first, then this process's copies."""

    def missing() -> list[int]:
        done = {int(n) for part in run.of_kind("copies") for n in part["number"]}
        return [number for number in range(len(selection)) if number not in done]

    own, refits = ranks.share(missing()), 0
    if not run.of_kind("refits") and (ranks.rank == 0 or not ranks.at_once):
        refits = worker.num_refits
    if own or refits:
        worker.say_cost(refits + len(own), progress)
    with Bar(refits + len(own), "retraining", progress, BAR) as bar:
        if refits:
            run.write("refits", worker.refit(bar))
        wait_until_done(lambda: [] if run.of_kind("refits") else [0], run, ranks, progress)
        baseline = run.of_kind("refits")[0]["baseline"]
        for part in worker.copies(own, baseline, bar) if own else ():
            run.write("copies", part)
    wait_until_done(missing, run, ranks, progress)


@contextmanager
def _worker(
    model: nn.Module, opener: Opener, way: Way, progress: bool
) -> Iterator[tuple[Worker, Tensor]]:
    """The worker on a private model, and that model's outputs on all data."""
    task, data = way.task, opener.data
    if isinstance(way.train, Recipe):
        with state_preserved(model):
            stack = open_stack(model, data, task.likelihood, way.prior)
            bound = way.train.bind(model, opener, stack.mean_prior, progress)
            given = stack.predict(stack.start[None])[0].detach().cpu()
            yield RecipeWorker(task, stack, opener, bound, _evaluation(stack, task)), given
    elif isinstance(way.train, Replay):
        yield ReplayWorker.of(task, way.train, model, data), outputs_of(model, data, None)
    else:
        worker = FunctionWorker(task, way.train, model, data, is_steady(data))
        yield worker, outputs_of(model, data, None)


def _evaluation(stack: Stack, task: Task) -> tuple[Batch, Tensor] | None:
    if task.evaluate_on is None:
        return None
    batches = Batches(task.evaluate_on, 1)
    batch = batches.take(torch.arange(batches.num_data)).to(device_of(stack.model))
    with torch.no_grad(), named_failures("on evaluate_on"):
        rows = [stack.outputs(stack.start[None], part)[0] for part in stack.parts(batch, 1)]
    outputs = torch.cat(rows)
    if not torch.isfinite(outputs).all():
        raise NonFiniteError(
            "finite outputs",
            "NaN or infinity on evaluate_on",
            "look for NaN or infinity in its inputs, and remove those examples",
        )
    return batch, task.likelihood.prepare(outputs, batch.targets)


def resolved(train: Train) -> Recipe | Replay | Function:
    """A way to train again, from its name, a record or a function."""
    if isinstance(train, str) and train in NAMED:
        return NAMED[train]()
    if isinstance(train, Training):
        return Replay(train)
    if isinstance(train, Recipe | Replay):
        return train
    if callable(train) and not isinstance(train, type):
        check_arguments(train, "fit(model, data)")
        return train
    raise ArgumentError(
        f"train to be one of {', '.join(NAMED)}, a recipe, a recorded training, or a function "
        "fit(model, data)",
        repr(train),
        'use train="newton", or pass the function that trained the model',
    )
