"""The result of retraining, and how it is put together from the parts of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engram.core.arguments import whole
from engram.core.data.batches import Batches, Data
from engram.core.parameters import Named, check_module, uncompiled
from engram.core.printable import printable
from engram.core.storage.kinds import (
    Kind,
    anything,
    check_that,
    checked,
    numbers,
    positions,
    stored,
)
from engram.core.storage.values import ADDED_LATER
from engram.errors import ArgumentError
from engram.likelihoods import Likelihood
from engram.retraining.identity import Identity
from engram.retraining.run_folder import Part, RunFolder
from engram.retraining.selection import EXAMPLES_AT_ONCE, Task
from engram.retraining.user_function import with_state
from engram.sensitivity.provenance import provenance

if TYPE_CHECKING:
    import pandas as pd

KINDS = ("examples", "groups", "classes")


@dataclass(frozen=True)
class NoiseFloor:
    """How far predictions move although nothing is left out: mean scores over the examples.

    Args:
        repeated: the same training again (recipes that converge start a little elsewhere).
        reseeded: trainings with other seeds.
        drift: from the given model to the refit with everything; large where the model had not
            converged. It is not part of any deviation: the refit is what they are measured from.
        refits: trainings with nothing left out.
    """

    repeated: float
    reseeded: float
    drift: float
    refits: int

    @property
    def level(self) -> float:
        """The larger of the two measures of noise."""
        return max(self.repeated, self.reseeded)

    def __str__(self) -> str:
        return (
            f"{self.repeated:.2g} trained again, {self.reseeded:.2g} with other seeds"
            f" ({self.refits} refits with nothing left out)"
        )


def reached(gradient_norm: Tensor, wanted_norm: Tensor) -> Tensor:
    """Which norms are small enough; trainings for a fixed time ask for none."""
    return (gradient_norm <= wanted_norm) | torch.isinf(wanted_norm)


@dataclass(frozen=True, eq=False)
class Retraining:
    """The true change without each example, group or class; R rows, C copies, K outputs.

    Names, signs and units are those of :class:`engram.Result`: a deviation is *without the example
    minus with it*, where "with it" is the refit with everything.

    Attributes:
        kind: ``examples``, ``groups`` or ``classes``.
        labels: name of each copy.
        indices: position of each left-out example in the data, [R].
        owners: the copy that leaves it out, [R].
        targets: as in a result.
        outputs: of the trained model, as in a result.
        deviation: of the outputs, as in a result.
        prediction_deviation: as in a result.
        score: as in a result.
        loss: of the trained model, as in a result.
        loo_loss: of the copy without the example, as in a result.
        noise: score of each example between refits with nothing left out, [R].
        gradient_norm: that each copy reached, NaN for a training function, [C].
        wanted_norm: that was asked for, likewise, [C].
        evaluations: gradients over the data that each copy took, [C].
        seconds: that each copy took, [C].
        evaluation_loss: losses of every copy on ``evaluate_on``, [C, T].
        evaluation_loss_with: those of the model trained on everything, [T].
        parameters: of every copy by name, [C, *shape], where they were kept.
        noise_floor: over all rows.
        baseline_converged: whether the refit with everything reached its gradient norm; otherwise
            no deviation can be told from its further training.
        provenance: versions, settings and seed, for the record; nothing is decided by it.
        trained_by: the recipe or function that trained every copy, in words.
        in_eval_mode: kinds of layers that were in eval mode while training again.
        refit_loss: of every example of the data under the refit with everything, [N]; None in files
            of earlier versions.
    """

    kind: str
    labels: tuple[str, ...]
    indices: Tensor
    owners: Tensor
    targets: Tensor
    outputs: Tensor
    deviation: Tensor
    prediction_deviation: Tensor
    score: Tensor
    loss: Tensor
    loo_loss: Tensor
    noise: Tensor
    gradient_norm: Tensor
    wanted_norm: Tensor
    evaluations: Tensor
    seconds: Tensor
    noise_floor: NoiseFloor
    provenance: Mapping[str, Any] = field(repr=False)
    evaluation_loss: Tensor | None = None
    evaluation_loss_with: Tensor | None = None
    parameters: Named = field(default_factory=dict, repr=False)
    baseline_converged: bool = True
    trained_by: str = ""
    in_eval_mode: tuple[str, ...] = ()
    refit_loss: Tensor | None = field(default=None, repr=False, metadata=ADDED_LATER)

    @property
    def num_copies(self) -> int:
        """C."""
        return len(self.labels)

    @property
    def increase(self) -> Tensor:
        """loo_loss - loss, the true increase, nats per example, [R]."""
        return self.loo_loss - self.loss

    @property
    def converged(self) -> Tensor:
        """Which copies reached the gradient norm that was asked for, as the baseline did, [C]."""
        return reached(self.gradient_norm, self.wanted_norm) & self.baseline_converged

    @property
    def evaluation_change(self) -> Tensor:
        """Mean loss on ``evaluate_on`` without minus with, [C]."""
        if self.evaluation_loss is None or self.evaluation_loss_with is None:
            raise ArgumentError("a run with evaluate_on=", "one without", "pass a data set")
        return (self.evaluation_loss - self.evaluation_loss_with).double().mean(1)

    def model(self, copy_number: int, template: nn.Module) -> nn.Module:
        """A copy of the template with the weights, and the buffers, of a left-out copy."""
        if not self.parameters:
            raise ArgumentError("kept parameters", "none", "retrain with keep_models=True")
        check_module(template)
        number = whole("number of a copy", copy_number, 0, self.num_copies - 1)
        state = {name: values[number] for name, values in self.parameters.items()}
        return with_state(uncompiled(template), state)

    def to_frame(self) -> pd.DataFrame:
        """One row per left-out example, indexed by its position in the data."""
        import pandas as pd

        columns: dict[str, Any] = {}
        if self.kind != "examples":
            columns["left_out_with"] = [self.labels[int(owner)] for owner in self.owners]
        if self.targets.dim() == 1:
            columns["target"] = self.targets.numpy()
        columns |= {
            "score": self.score.numpy(),
            "loss": self.loss.numpy(),
            "loo_loss": self.loo_loss.numpy(),
            "increase": self.increase.numpy(),
            "noise": self.noise.numpy(),
            "converged": self.converged[self.owners].numpy(),
        }
        return pd.DataFrame(columns, index=pd.Index(self.indices.numpy(), name="example"))

    def save(self, folder: str | Path) -> Path:
        """Write ``retraining.json`` and its tensors into a folder, whole; no pickle."""
        return KIND.write(self, folder)

    def __repr__(self) -> str:
        noun = {"examples": "example", "groups": "group", "classes": "class"}[self.kind]
        lines = [
            f"Retrained {self.num_copies:,} times without one {noun}"
            f" ({printable(self.trained_by)})",
            f"their loss            {float(self.loss.double().mean()):.4f} with them,"
            f" {float(self.loo_loss.double().mean()):.4f} without, nats per example",
            f"score                 median {float(self.score.median()):.3g},"
            f" largest {float(self.score.max()):.3g}"
            f" (example {int(self.indices[self.score.argmax()])})",
            f"noise floor           {self.noise_floor}",
            f"drift                 {self.noise_floor.drift:.2g} from the given model to the"
            " refit with everything",
            f"time                  {float(self.seconds.sum()):.3g} s,"
            f" {float(self.seconds.mean()):.2g} s a copy",
            "sign                  without the example minus with it, both retrained",
        ]
        short = int((~self.converged).sum())
        if short:
            worst = float((self.gradient_norm / self.wanted_norm).max())
            if not self.baseline_converged:
                lines.insert(
                    5, "not converged         the refit with everything, so no copy counts"
                )
            else:
                lines.insert(
                    5, f"not converged         {short} copies, norms up to {worst:.2g} times"
                )
        if self.in_eval_mode:
            layers = printable(", ".join(self.in_eval_mode))
            lines.append(f"note                  {layers} in eval mode while training again")
        return "\n".join(lines)


COLUMNS = {
    "labels": anything("C"),
    "indices": positions("R"),
    "owners": positions("R", below="C"),
    "targets": anything("R ..."),
    "outputs": numbers("R K"),
    "deviation": numbers("R K"),
    "prediction_deviation": numbers("R K"),
    "score": numbers("R"),
    "loss": numbers("R"),
    "loo_loss": numbers("R"),
    "noise": numbers("R"),
    "gradient_norm": numbers("C", finite=False),  # a training function has none
    "wanted_norm": numbers("C", finite=False),
    "evaluations": anything("C"),
    "seconds": numbers("C"),
    "evaluation_loss_with": numbers("T"),
    "evaluation_loss": numbers("C T"),
    "parameters": numbers("C ..."),
    "refit_loss": numbers("N"),
}


def _check(found: Retraining) -> None:
    check_that(found.kind in KINDS, f"one of {', '.join(KINDS)}", repr(found.kind)[:80])
    given = [loss is not None for loss in (found.evaluation_loss, found.evaluation_loss_with)]
    check_that(given[0] == given[1], "both or none of the evaluation losses", "one")
    floor = found.noise_floor
    sizes = (floor.repeated, floor.reseeded, floor.drift, floor.refits)
    check_that(all(0 <= size < math.inf for size in sizes), "a noise floor", str(sizes))


KIND = stored(Kind("retraining", 4, checked(Retraining, COLUMNS, _check)))


def assemble(
    model: nn.Module,
    data: Data,
    task: Task,
    run: RunFolder,
    given: Tensor,
    identity: Identity,
) -> Retraining:
    """Put the copies in the order they were asked for and measure them from the baseline.

    Args:
        given: outputs of the model as it was passed, [N, K].
    """
    refits, copies = run.of_kind("refits")[0], _in_order(task, run.of_kind("copies"))
    members = task.selection.members
    indices = torch.cat(members)
    sizes = torch.tensor([len(chosen) for chosen in members])
    owners = torch.arange(len(members)).repeat_interleave(sizes)
    everything = torch.cat([batch.targets.cpu() for batch in Batches(data, EXAMPLES_AT_ONCE)])
    targets, likelihood = everything[indices], task.likelihood
    repeated = refits["refit_outputs"][:, indices]
    outputs, without = repeated[0], copies["outputs_without"]
    prepared = likelihood.prepare(outputs, targets)
    change = likelihood.mean(without) - likelihood.mean(outputs)
    noise = torch.stack([_scores(likelihood, outputs, other) for other in repeated[1:]])
    floor = NoiseFloor(
        repeated=float(noise[0].double().mean()),
        reseeded=float(noise[1:].double().mean()) if len(noise) > 1 else 0.0,
        drift=float(_scores(likelihood, given[indices], outputs).double().mean()),
        refits=len(refits["refit_outputs"]),
    )
    return Retraining(
        kind=task.selection.kind,
        labels=task.selection.labels,
        indices=indices,
        owners=owners,
        targets=targets,
        outputs=outputs,
        deviation=without - outputs,
        prediction_deviation=change,
        score=change.abs().sum(1),
        loss=likelihood.loss(outputs, prepared),
        loo_loss=likelihood.loss(without, prepared),
        noise=noise.mean(0),
        noise_floor=floor,
        refit_loss=_losses(likelihood, refits["refit_outputs"][0], everything),
        provenance=provenance(model, identity.settings),
        trained_by=identity.trained_by,
        in_eval_mode=identity.in_eval_mode,
        baseline_converged=bool(reached(refits["gradient_norm"], refits["wanted_norm"])[0]),
        evaluation_loss=copies.get("evaluation"),
        evaluation_loss_with=refits.get("refit_evaluation", [None])[0],
        parameters={n.removeprefix("parameter "): t for n, t in copies.items() if " " in n},
        **{name: copies[name] for name in ("gradient_norm", "wanted_norm")},
        **{name: copies[name] for name in ("evaluations", "seconds")},
    )


def _losses(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    return likelihood.loss(outputs, likelihood.prepare(outputs, targets))


def _scores(likelihood: Likelihood, outputs: Tensor, others: Tensor) -> Tensor:
    return (likelihood.mean(others) - likelihood.mean(outputs)).abs().sum(1)


def _in_order(task: Task, parts: list[Part]) -> Part:
    """Tensors of all copies, sorted by the copy's number; a copy that came twice counts once."""
    rows: dict[int, Part] = {}
    for part in parts:
        copies = part["number"].tolist()
        sizes = [len(task.selection.members[number]) for number in copies]
        outputs = part["outputs_without"].split(sizes)
        for position, number in enumerate(copies):
            own = {k: v[position : position + 1] for k, v in part.items() if k != "number"}
            rows[number] = own | {"outputs_without": outputs[position]}
    ordered = [rows[number] for number in range(len(task.selection))]
    return {name: torch.cat([row[name] for row in ordered]) for name in ordered[0]}
