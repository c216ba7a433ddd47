"""Train many times on random subsets of the data, with the user's own loop.

Every training is one file of the run folder, so that a run goes on after a kill, and a run with
more subsets goes on from one with fewer.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engram.core.arguments import AUTO, shown, whole
from engram.core.data.batches import Batches, Data
from engram.core.identity.description import Description
from engram.core.parameters import check_module, uncompiled
from engram.core.progress import Bar
from engram.core.state.copies import private_copy
from engram.core.state.model import device_of, locked
from engram.core.state.process import kept_surroundings
from engram.errors import ArgumentError, TrainingError
from engram.likelihoods import Likelihood
from engram.retraining.identity import Identity, identify, is_steady
from engram.retraining.one_by_one import FunctionWorker, outputs_of, seeded
from engram.retraining.processes import check_processes, in_processes
from engram.retraining.recipes import NAMED, Recipe
from engram.retraining.run_folder import Part, Ranks, RunFolder, wait_until_done
from engram.retraining.selection import EXAMPLES_AT_ONCE, Selection, Task
from engram.retraining.subset_design import Design, designed
from engram.retraining.subset_truth import SubsetTruth, mean_over
from engram.retraining.user_function import (
    check_arguments,
    kept_state,
    training_copies,
)
from engram.sensitivity.provenance import provenance

Make = Callable[[], nn.Module]
KNOWS_ITS_DATA = 0.8  # loss over that with shuffled targets; below it a model has been trained
SHUFFLES = 4  # of the targets, which that loss is averaged over
MOST_WORKERS = 256  # more than any machine has cores for: a mistake
BAR = "{l_bar}{bar}| {n:.0f}/{total:.0f} trainings [{elapsed}<{remaining}]"


@dataclass(frozen=True, eq=False)
class SubsetRequest:
    """What is trained on which subsets, by how many processes; see :func:`engram.retrain`."""

    train: Any
    subsets: int | Tensor
    keep: float
    likelihood: Likelihood
    evaluate_on: Data | None
    keep_models: bool
    seed: int
    workers: int
    share: tuple[int, int] | str = AUTO


def retrain_on_subsets(
    model: nn.Module | Make,
    data: Data,
    request: SubsetRequest,
    folder: str | Path | None,
    trust_folder: bool,
    progress: bool,
) -> SubsetTruth:
    """The truth by trainings on subsets, whatever of it the folder does not hold yet."""
    check_loop(request.train)
    ranks = Ranks.of(request.share)
    ranks.check_folder(folder)
    workers = whole("number of workers", request.workers, 1, MOST_WORKERS, "use workers=1")
    template = made_model(model, request.seed)
    check_processes(workers, device_of(template))
    with locked(template), kept_surroundings(), torch.inference_mode(False):
        num_data = Batches(data, EXAMPLES_AT_ONCE).num_data
        design = designed(request.subsets, request.keep, num_data, request.seed)
        task = _task(design, request)
        identity = _identity(model, template, data, task, request.train, design)
        identity.check_seen(folder, trust_folder, ranks.world_size)
        worker = subset_worker(model, template, data, task, request.train, design)
        with _folder_for(workers, folder) as place:
            run = RunFolder(place, identity.fingerprint, identity.settings)
            with ranks.taking_part(run):
                _train_missing(worker, run, ranks, workers, progress)
        return _assembled(worker, run, identity)


@contextmanager
def _folder_for(workers: int, folder: str | Path | None) -> Iterator[str | Path | None]:
    """The caller's folder; processes that have none to share get one for the time being."""
    if workers == 1 or folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="engram-subsets-") as made:
        yield made


@dataclass(frozen=True, eq=False)
class SubsetWorker:
    """Trainings on the subsets of a design, one at a time.

    Args:
        trainer: of the user's function.
        design: the subsets and seeds.
        make: a fresh model for every training; without it all start from the trainer's.
        trained_before: whether that one already knows the data, in words; empty where it does not.
    """

    trainer: FunctionWorker
    design: Design
    make: Make | None
    trained_before: str

    def part(self, number: int) -> Part:
        """One training: outputs of all examples, and of those that it is evaluated on."""
        began = time.perf_counter()
        trainer, seed = self.trainer, self.design.seeds[number]
        start = trainer.model if self.make is None else made_model(self.make, seed)
        made = trainer.train(start, self.design.left_out(number), seed + 1)
        if made.in_place and self.trained_before:
            raise ArgumentError(
                "a model that has not been trained yet, so that nets which never saw an example "
                "can be told from those that did",
                self.trained_before,
                "pass a function that makes a new one, as in retrain(lambda: Net(), data, ...)",
            )
        if not made.moved:
            raise TrainingError(
                "a training function that trains the model in place or returns the trained one",
                "nothing, with all weights as before",
                "return the trained model",
            )
        part = {
            "number": torch.tensor([number]),
            "outputs": outputs_of(made.model, trainer.data, None)[None],
            "seconds": torch.tensor([time.perf_counter() - began], dtype=torch.float64),
        }
        if trainer.task.evaluate_on is not None:
            part["evaluation"] = outputs_of(made.model, trainer.task.evaluate_on, None)[None]
        if trainer.task.keep_models:
            state = kept_state(made.model, trainer.model)
            part |= {f"parameter {name}": value[None].clone() for name, value in state.items()}
        return part


def _train_missing(
    worker: SubsetWorker, run: RunFolder, ranks: Ranks, workers: int, progress: bool
) -> None:
    """This process's trainings that the folder does not hold, then those of other ranks."""

    def missing() -> list[int]:
        done = {int(n) for part in run.of_kind("subsets") for n in part["number"]}
        return [number for number in range(len(worker.design)) if number not in done]

    def train(number: int) -> None:
        run.write("subsets", worker.part(number))

    own = ranks.share(missing())
    with Bar(len(own), "training on subsets", progress, BAR) as bar:
        if workers > 1:
            in_processes(own, train, workers, bar.update)
            run.refresh()
        else:
            for number in own:
                train(number)
                bar.update()
    wait_until_done(missing, run, ranks, progress)


def subset_worker(
    model: nn.Module | Make, template: nn.Module, data: Data, task: Task, train: Any, design: Design
) -> SubsetWorker:
    private = private_copy(template)
    watched = training_copies(train, template, private)
    trainer = FunctionWorker(task, watched, private, data, is_steady(data))
    if isinstance(model, nn.Module):
        return SubsetWorker(trainer, design, None, _knowledge(trainer))
    return SubsetWorker(trainer, design, model, "")


def _knowledge(trainer: FunctionWorker) -> str:
    """What the given model knows about its targets, in words, where it clearly knows something."""
    outputs, targets = outputs_of(trainer.model, trainer.data, None), targets_of(trainer.data)
    likelihood = trainer.task.likelihood
    prepared = likelihood.prepare(outputs, targets)
    generator = torch.Generator().manual_seed(0)
    own = float(likelihood.loss(outputs, prepared).double().mean())
    orders = [torch.randperm(len(outputs), generator=generator) for _ in range(SHUFFLES)]
    others = [float(likelihood.loss(outputs, prepared[o]).double().mean()) for o in orders]
    shuffled = sum(others) / SHUFFLES
    if own >= shuffled - (1 - KNOWS_ITS_DATA) * abs(shuffled):
        return ""
    return f"one with loss {own:.3g} on its data, and {shuffled:.3g} where targets are shuffled"


def _assembled(worker: SubsetWorker, run: RunFolder, identity: Identity) -> SubsetTruth:
    trainer, design = worker.trainer, worker.design
    task, likelihood = trainer.task, trainer.task.likelihood
    found = {int(part["number"]): part for part in run.of_kind("subsets")}
    parts = [found[number] for number in range(len(design))]
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    targets = targets_of(trainer.data)
    losses, probabilities = losses_of(likelihood, joined["outputs"], targets)
    predictions = torch.stack([likelihood.mean(outputs) for outputs in joined["outputs"]])
    evaluated: dict[str, Tensor | None] = {}
    if task.evaluate_on is not None:
        measured = losses_of(likelihood, joined["evaluation"], targets_of(task.evaluate_on))
        evaluated = {
            "evaluation_outputs": joined["evaluation"],
            "evaluation_losses": measured[0],
            "evaluation_probabilities": measured[1],
        }
    kept = design.kept
    return SubsetTruth(
        kept=kept,
        targets=targets,
        outputs=joined["outputs"],
        losses=losses,
        probabilities=probabilities,
        prediction_in=mean_over(kept[:, :, None], predictions),
        prediction_out=mean_over(~kept[:, :, None], predictions),
        seeds=design.seeds,
        seconds=joined["seconds"],
        parameters={n.removeprefix("parameter "): t for n, t in joined.items() if " " in n},
        trained_by=identity.trained_by,
        provenance=provenance(trainer.model, identity.settings),
        **evaluated,
    )


def losses_of(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Losses [S, N] of outputs [S, N, K], and probabilities of the own labels."""
    prepared = likelihood.prepare(outputs[0], targets)
    losses = torch.stack([likelihood.loss(own, prepared) for own in outputs])
    found = [likelihood.target_probability(own, prepared) for own in outputs]
    known = [probability for probability in found if probability is not None]
    return losses, torch.stack(known) if known else None


def targets_of(data: Data) -> Tensor:
    return torch.cat([batch.targets.cpu() for batch in Batches(data, EXAMPLES_AT_ONCE)])


def _task(design: Design, request: SubsetRequest) -> Task:
    members = tuple(design.left_out(number) for number in range(len(design)))
    labels = tuple(map(str, range(len(design))))
    selection = Selection("subsets", labels, members)
    return Task(
        selection, request.likelihood, request.evaluate_on, 0, request.keep_models, request.seed
    )


def _identity(
    model: nn.Module | Make,
    template: nn.Module,
    data: Data,
    task: Task,
    train: Any,
    design: Design,
) -> Identity:
    """As of any run, but for the number of subsets: a run with more goes on from one with fewer."""
    found, described = identify(template, data, train, task, 1.0), Description()
    made_by = None if isinstance(model, nn.Module) else described.of(model, "model")
    settings = found.settings | {"left_out": design.identity, "made_by": made_by}
    return replace(found, settings=settings, unseen=(*found.unseen, *described.unseen))


def made_model(model: nn.Module | Make, seed: int) -> nn.Module:
    """The model that was passed, or a copy of what its maker gives from this seed."""
    if isinstance(model, nn.Module) or not callable(model):
        check_module(model)
        return uncompiled(model)
    with kept_surroundings(), seeded(seed):
        made = model()
    if not isinstance(made, nn.Module):
        raise ArgumentError(
            "a model, or a function that makes one", f"one that makes {shown(made)}", "return it"
        )
    return private_copy(uncompiled(made))


def check_loop(train: Any) -> None:
    if isinstance(train, Recipe | type) or not callable(train):
        named = train if isinstance(train, str) and train in NAMED else shown(train)
        raise ArgumentError(
            "a training function fit(model, data) for subsets, since recipes go on from a trained "
            "model",
            f"train={named}",
            "pass the loop that trains the model from the start",
        )
    check_arguments(train, "fit(model, data)")
