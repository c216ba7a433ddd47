"""Trained nets and the truth about leaving examples out, kept in a folder between runs."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.nn import functional

import engram
from benchmarks.faithfulness.settings import Setting
from benchmarks.left_out import HARD_SHARE, spread_over, stop_early
from engram.likelihoods import resolve
from engram.retraining.recipes import Newton

REGIMES = ("converged", "early-stopped")
NUM_LEFT_OUT = 80
CACHE = Path(__file__).resolve().parent.parent.parent / "build" / "faithfulness"


@dataclass(frozen=True, eq=False)
class Problem:
    """A trained net, its data, and what really happens without each of some examples.

    Args:
        folder: where net and truth are kept, and whatever else depends on nothing but them.
    """

    title: str
    regime: str
    prior_precision: float
    model: nn.Sequential
    inputs: Tensor
    targets: Tensor
    truth: engram.Retraining
    folder: Path

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        """All examples."""
        return self.inputs, self.targets

    @property
    def left_out(self) -> Tensor:
        """The examples whose truth is known, [n]."""
        return self.truth.indices

    @property
    def decay(self) -> float:
        """The regulariser's weight beside the mean loss, delta / N: what peers call damping."""
        return self.prior_precision / len(self.inputs)

    def outputs(self) -> Tensor:
        """Logits of the left-out examples."""
        with torch.no_grad():
            logits: Tensor = self.model(self.inputs[self.left_out])
        return logits


def problem(setting: Setting, regime: str, seed: int, cache: Path = CACHE) -> Problem:
    """Train and refit, or read what an earlier run has left."""
    inputs, targets = setting.data()
    model, initial = setting.net(seed), setting.net(seed)
    key = _key(setting, regime, seed, inputs, targets)
    folder = cache / key
    if (folder / "retraining.json").is_file():
        load_model(model, folder / "model.safetensors")
        truth = engram.load(folder)
    else:
        if regime == "converged":
            _converge(model, (inputs, targets), setting)
        else:
            likelihood, delta = resolve("categorical"), setting.prior_precision
            stop_early(model, (inputs, targets), likelihood, delta, setting.early, seed)
        truth = _truth(model, initial, (inputs, targets), setting, regime, seed)
        folder.mkdir(parents=True, exist_ok=True)
        save_model(model, folder / "model.safetensors")
        truth.save(folder)
    precision = setting.prior_precision
    return Problem(setting.title, regime, precision, model.eval(), inputs, targets, truth, folder)


def _key(setting: Setting, regime: str, seed: int, inputs: Tensor, targets: Tensor) -> str:
    described = [setting.title, setting.prior_precision, regime, seed, NUM_LEFT_OUT, HARD_SHARE]
    digest = hashlib.sha256(json.dumps([*described, repr(setting.early)]).encode())
    digest.update(inputs.numpy().tobytes() + targets.numpy().tobytes())
    return f"{setting.title.split(',')[0].split()[0].lower()}-{regime}-{digest.hexdigest()[:12]}"


def _converge(model: nn.Module, data: tuple[Tensor, Tensor], setting: Setting) -> None:
    """Full-batch L-BFGS on the sum of the losses plus the regulariser."""
    inputs, targets = data
    optimizer = torch.optim.LBFGS(
        model.parameters(),
        max_iter=4000,
        history_size=50,
        tolerance_grad=1e-7,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        squares = sum((p**2).sum() for p in model.parameters())
        loss = functional.cross_entropy(model(inputs), targets, reduction="sum")
        value: Tensor = loss + 0.5 * setting.prior_precision * squares
        value.backward()
        return value

    optimizer.step(closure)
    optimizer.zero_grad()


def _truth(
    model: nn.Module,
    initial: nn.Module,
    data: tuple[Tensor, Tensor],
    setting: Setting,
    regime: str,
    seed: int,
) -> engram.Retraining:
    """Converged nets are trained on from where they are, the others from their first weights."""
    converged = regime == "converged"
    truth = engram.retrain(
        model if converged else initial,
        data,
        sample(model, data),
        train=Newton() if converged else setting.early,
        prior_precision=setting.prior_precision,
        seed=seed,
        progress=False,
    )
    with torch.no_grad():
        given = model(data[0][truth.indices])
    drift = float((given.softmax(1) - truth.outputs.softmax(1)).abs().sum(1).mean())
    if drift > 0.01 * float(truth.score.mean()):
        raise SystemExit(f"expected the refit with everything to be the net, got drift {drift:.2g}")
    return truth


def sample(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    """The examples that are really left out."""
    with torch.no_grad():
        losses = functional.cross_entropy(model(data[0]), data[1], reduction="none")
    return spread_over(losses, NUM_LEFT_OUT)
