"""Everything that can be saved: how it is made, and the numbers that are read back from it.

``python -m tests.saved_things NAME`` saves all of it into ``fixtures/saved/NAME``, once: what a
version has written does not change after it. ``0.1`` is from before all was saved by one writer,
``0.1-one-writer`` from before kinds were declared beside their classes.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # as pytest finds the tables of problems

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import engram
from engram.tracking.history import History
from golden.problems import PROBLEMS

FOLDER = Path(__file__).parent / "fixtures" / "saved"
CONVERGED = PROBLEMS["mlp_at_minimum"]
DELTA = CONVERGED.prior_precision
CHOSEN = [0, 3]
Numbers = dict[str, Tensor]


def rounded(values: Tensor) -> Tensor:
    """Short binary fractions are the same bits on every machine, and so are their fingerprints."""
    return (values * 4096).round() / 4096 if values.is_floating_point() else values


def _model() -> nn.Module:
    model = copy.deepcopy(CONVERGED.model)
    for parameter in model.parameters():
        parameter.data = rounded(parameter.data)
    return model


MODEL = _model()
DATA = (rounded(CONVERGED.data[0]), CONVERGED.data[1])


@dataclass(frozen=True)
class Saved:
    """Save something into a folder; read it from there."""

    save: Callable[[Path], object]
    read: Callable[[Path], Numbers]


def posterior(structure: str, curvature: str = "ggn") -> engram.Posterior:
    return engram.laplace(
        MODEL,
        DATA,
        structure=structure,
        curvature=curvature,
        prior_precision=DELTA,
        progress=False,
    )


def result(structure: str = "full") -> engram.Result:
    return engram.sensitivities(MODEL, DATA, posterior(structure), progress=False)


def refined() -> engram.Result:
    full = posterior("full")
    return engram.refine(MODEL, DATA, result(), full, indices=CHOSEN, progress=False)


def retrained(folder: Path | None = None) -> engram.Retraining:
    return engram.retrain(MODEL, DATA, CHOSEN, prior_precision=DELTA, folder=folder, progress=False)


def subset_truth() -> engram.SubsetTruth:
    """Weights that are given, not trained."""

    def shift(model: nn.Module, data: tuple[Tensor, Tensor]) -> None:
        for parameter in model.parameters():
            parameter.data += len(data[0]) / 4096

    return engram.retrain(
        lambda: MODEL, DATA, train=shift, subsets=5, keep=0.5, evaluate_on=DATA, progress=False
    )


def verified() -> engram.Verification:
    found = result()
    return engram.verify(MODEL, DATA, found, sample=5, progress=False)


def certified() -> engram.Certificate:
    return engram.certify(MODEL, DATA, result(), refits=8, progress=False)


def assessed() -> engram.Assessment:
    full = posterior("full")
    return engram.assess(MODEL, DATA, result(), full, progress=False)


def tracker() -> engram.Tracker:
    """A tracker that has seen nothing yet, of an optimizer after two steps."""
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-9, weight_decay=0.5)
    inputs, targets = DATA
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    optimizer.zero_grad()
    return engram.Tracker(model, optimizer, DATA)


def followed() -> engram.Tracker:
    """One with two updates and half an epoch of steps."""
    made = tracker()
    for step in range(2):
        made.update(step=step)
    batch = torch.arange(3)
    with made.step(batch):
        inputs, targets = DATA
        nn.functional.cross_entropy(made.model(inputs[batch]), targets[batch]).backward()
    return made


def recorded() -> engram.Training:
    """Steps with gradients that are given: the same on every machine."""
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    training = engram.record(optimizer, model, num_steps=4, checkpoints=1)
    for _ in range(4):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1 / 4096)
        optimizer.step()
    return training


def tuned() -> engram.Tuning:
    """Weights that are given, not trained: the same on every machine."""

    def shrink(model: nn.Module, prior_precision: float) -> None:
        for parameter in model.parameters():
            parameter.data.mul_(1 - prior_precision / 4)

    return engram.tune(MODEL, DATA, shrink, [0.5, 1.0], progress=False)


def of_training(found: engram.Training) -> Numbers:
    named = found.of(MODEL)
    middle = named.segments(1)[0].middle.weights
    return {f"time {name}": value for name, value in named.time.items()} | middle


def of_tuning(found: engram.Tuning) -> Numbers:
    rows = [[t.prior_precision, t.train, t.estimate] for t in found.trials]
    return {"trials": torch.tensor(rows).double()} | dict(found.state)


def of_result(found: engram.Result) -> Numbers:
    names = ("deviation", "score", "loss", "loo_loss", "leverage", "obtained", "targets")
    return {name: getattr(found, name) for name in names} | {"levels": found.verdict.levels}


def of_posterior(found: engram.Posterior) -> Numbers:
    ones = {name: torch.ones_like(value)[None] for name, value in found.mean.items()}
    covered = {name: value for name, value in ones.items() if name in found.names}
    return {
        **{f"mean {name}": value for name, value in found.mean.items()},
        **{f"solved {name}": value for name, value in found.solve(covered).items()},
        "numbers": torch.tensor([found.prior_precision, found.num_data]).double(),
    }


def of_retraining(found: engram.Retraining) -> Numbers:
    names = ("indices", "deviation", "loss", "loo_loss", "noise")
    return {name: getattr(found, name) for name in names}


def of_history(found: History) -> Numbers:
    rows = [[row.step, row.train, row.estimate, *row.leverage] for row in found]
    return {"rows": torch.tensor(rows).double(), "scores": found.score_matrix()}


def resumed(folder: Path) -> Numbers:
    again = tracker()
    again.resume(folder)
    return of_history(again.history)


STRUCTURES = ("isotropic", "diagonal", "kronecker", "ekfac", "low_rank", "full", "last_layer")
SAVED: dict[str, Saved] = {
    "result": Saved(lambda f: result().save(f), lambda f: of_result(engram.load(f))),
    "result refined": Saved(lambda f: refined().save(f), lambda f: of_result(engram.load(f))),
    **{
        f"posterior {name}": Saved(
            lambda f, name=name: posterior(name).save(f),
            lambda f: of_posterior(engram.load(f)),
        )
        for name in STRUCTURES
    },
    "posterior hessian": Saved(
        lambda f: posterior("full", "hessian").save(f),
        lambda f: of_posterior(engram.load(f)),
    ),
    "tracker": Saved(lambda f: followed().save(f), resumed),
    "history": Saved(lambda f: followed().history.save(f), lambda f: of_history(engram.load(f))),
    "retraining": Saved(lambda f: retrained().save(f), lambda f: of_retraining(engram.load(f))),
    "verification": Saved(
        lambda f: verified().save(f),
        lambda f: of_retraining(engram.load(f / "verification.json").truth),
    ),
    "assessment": Saved(
        lambda f: assessed().save(f),
        lambda f: {"levels": engram.load(f).verdict.levels},
    ),
    "training": Saved(lambda f: recorded().save(f), lambda f: of_training(engram.load(f))),
    "tuning": Saved(lambda f: tuned().save(f), lambda f: of_tuning(engram.load(f))),
    "run folder": Saved(retrained, lambda f: of_retraining(retrained(f))),
}


def main(version: str) -> None:
    folder = FOLDER / version
    if folder.exists():
        raise SystemExit(f"{folder} is there already; what a version has written stays")
    for name, saved in SAVED.items():
        place = folder / name.replace(" ", "_")
        place.mkdir(parents=True)
        saved.save(place)
        numbers = {key: value.contiguous() for key, value in saved.read(place).items()}
        save_file(numbers, folder / f"{place.name}.expected.safetensors")


if __name__ == "__main__":
    main(*sys.argv[1:])
