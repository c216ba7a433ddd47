"""What is interrupted: each call with what must hold after it, whenever it was stopped."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import engram
from benchmarks.reliability.net import build, examples
from engram.errors import EngramError

WHOLE, NOTHING = "whole", "nothing there"
LEFT_OUT, REFITS = 6, 2
LOG = Path("trained.log")  # lines of the training function; the process runs in a folder of its own


def digest(values: Any) -> str:
    """One word for nested plain values and tensors, bit by bit."""
    found = sha256()

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            found.update(f"{value.dtype}{tuple(value.shape)}".encode())
            found.update(value.detach().cpu().contiguous().numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                found.update(f"key {key}".encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            found.update(f"list {len(value)}".encode())
            for inner in value:
                add(inner)
        else:
            found.update(repr(value).encode())

    add(values)
    return found.hexdigest()


class Work(ABC):
    """A call on a model, and what is checked after it was stopped."""

    name: str
    model: nn.Module

    def start(self, folder: Path) -> None:
        """An empty folder, or one with what an earlier call left."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()

    @abstractmethod
    def run(self, folder: Path) -> object:
        """The call."""

    @abstractmethod
    def found(self, folder: Path) -> str:
        """``whole``, ``nothing there``, or what is wrong with what the call left behind."""


class Pass(Work):
    """A call that writes nothing, and gives the same numbers afterwards."""

    def __init__(self, name: str, model: nn.Module, call: Callable[[], Any]) -> None:
        self.name, self.model, self.call = name, model, call
        self.expected = digest(call())

    def run(self, folder: Path) -> object:
        """The call."""
        return self.call()

    def found(self, folder: Path) -> str:
        """The same numbers, and an empty folder."""
        if any(folder.iterdir()):
            return "files left behind"
        return WHOLE if digest(self.call()) == self.expected else "other numbers"


class Saving(Work):
    """Two versions written into one folder in turns; one of them must be read, and all of it."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        versions: Sequence[Any],
        read: Callable[[Path], Any],
        scratch: Path,
    ) -> None:
        self.name, self.model, self.versions, self.read = name, model, versions, read
        self.expected = []
        for version in versions:
            self.start(scratch)
            version.save(scratch)
            self.expected.append(digest(read(scratch)))
        assert len(set(self.expected)) == len(versions)

    def start(self, folder: Path) -> None:
        """The folder holds the first version."""
        super().start(folder)
        self.versions[0].save(folder)

    def run(self, folder: Path) -> object:
        """Save some times."""
        for number in range(1, 9):
            self.versions[number % len(self.versions)].save(folder)
        return None

    def found(self, folder: Path) -> str:
        """Whole, mixed, refused by type, or an error of another kind."""
        try:
            values = digest(self.read(folder))
        except EngramError as error:
            return f"refused: {type(error).__name__}"
        except Exception as error:
            return f"raw {type(error).__name__}"
        return WHOLE if values in self.expected else "mixed"


class Retraining(Work):
    """A run with a folder, which the same call must bring to the same end."""

    def __init__(self, name: str, model: nn.Module, data: Any, train: Any, scratch: Path) -> None:
        self.name, self.model, self.data, self.train = name, model, data, train
        self.start(scratch)
        self.expected = self._digest(self.run(scratch))

    def start(self, folder: Path) -> None:
        """An empty folder, and no line in the log."""
        super().start(folder)
        LOG.unlink(missing_ok=True)

    def run(self, folder: Path) -> engram.Retraining:
        """Retrain, or go on."""
        indices = list(range(LEFT_OUT))
        return engram.retrain(
            self.model,
            self.data,
            indices,
            train=self.train,
            refits=REFITS,
            folder=folder,
            progress=False,
        )

    def found(self, folder: Path) -> str:
        """The same end, with at most the copies under way trained again."""
        trained = logged()
        parts = {kind: len(list(folder.glob(f"{kind}-*"))) for kind in ("refits", "copies")}
        kept = REFITS * parts["refits"] + parts["copies"]
        under_way = 1 if parts["refits"] else REFITS
        if callable(self.train) and trained - kept > under_way:
            return f"{trained - kept} trainings lost"
        try:
            ended = self._digest(self.run(folder))
        except Exception as error:
            return f"not resumed: {type(error).__name__}"
        if callable(self.train) and logged() - trained != REFITS + LEFT_OUT - kept:
            return f"{logged() - trained} trained again, {kept} were there"
        return WHOLE if ended == self.expected else "other numbers"

    def _digest(self, truth: engram.Retraining) -> str:
        return digest([truth.outputs, truth.deviation, truth.loss, truth.loo_loss, truth.indices])


def logged() -> int:
    """Trainings that were finished."""
    return len(LOG.read_text().splitlines()) if LOG.exists() else 0


def fit(model: nn.Module, data: tuple[Tensor, Tensor]) -> None:
    """A user's training function: some steps of gradient descent, and a line in the log."""
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(8):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data[0]), data[1]).backward()
        optimizer.step()
    with Path("trained.log").open("a") as file:
        file.write("trained\n")


def works(scratch: Path, seed: int) -> list[Work]:
    """Everything that is interrupted; ``scratch`` is a folder to make the expected answers in."""
    model, data = build(seed), examples(seed)
    test = examples(seed + 1, 24)
    posteriors = [
        engram.laplace(
            model, data, structure="kronecker", prior_precision=delta, tolerance=0, progress=False
        )
        for delta in (4.0, 5.0)
    ]

    def sensitivities(posterior: engram.Posterior = posteriors[0]) -> engram.Result:
        return engram.sensitivities(model, data, posterior, batch_size=8, progress=False)

    def columns() -> list[Tensor]:
        result = sensitivities()
        return [result.deviation, result.loo_loss, result.leverage]

    def influence() -> Tensor:
        return engram.influence(model, data, test, posteriors[0], batch_size=8, progress=False)

    results = [sensitivities(posterior) for posterior in posteriors]
    trackers = [_tracker(model, data, updates) for updates in (1, 2)]
    brief = engram.recipes.Adam(epochs=2)
    return [
        Pass("sensitivities", model, columns),
        Pass("influence", model, influence),
        Retraining("retrain, a recipe", model, data, brief, scratch),
        Retraining("retrain, a function", model, data, fit, scratch),
        Saving("Tracker.save", model, trackers, lambda f: _resumed(model, data, f), scratch),
        Saving("Result.save", model, results, _result, scratch),
        Saving("Posterior.save", model, posteriors, _posterior, scratch),
    ]


def _tracker(model: nn.Module, data: tuple[Tensor, Tensor], updates: int) -> engram.Tracker:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.0, weight_decay=0.01)
    optimizer.step()
    tracker = engram.Tracker(model, optimizer, data)
    for step in range(updates):
        tracker.update(step=step)
    return tracker


def _resumed(model: nn.Module, data: tuple[Tensor, Tensor], folder: Path) -> Any:
    tracker = _tracker(model, data, 0)
    tracker.resume(folder)
    return tracker.state_dict()


def _result(folder: Path) -> Any:
    result = engram.load(folder)
    tensors = [result.deviation, result.loo_loss, result.leverage, result.outputs, result.targets]
    return [tensors, result.diagnostics.to_dict(), dict(result.provenance), dict(result.coverage)]


def _posterior(folder: Path) -> Any:
    posterior = engram.load(folder)
    ones = {name: torch.ones_like(value)[None] for name, value in posterior.mean.items()}
    solved = posterior.solve({name: ones[name] for name in posterior.names})
    return [dict(posterior.mean), solved, posterior.prior_precision, dict(posterior.settings)]
