"""From the parts of a run to its result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engram.core.data.batches import Batches, Data
from engram.likelihoods import Likelihood
from engram.retraining.run_folder import Part, RunFolder
from engram.retraining.task import Task
from engram.retraining.truth import NoiseFloor, Retraining, reached
from engram.sensitivity.provenance import provenance


def assemble(
    model: nn.Module,
    data: Data,
    task: Task,
    run: RunFolder,
    given: Tensor,
    settings: dict[str, Any],
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
    targets = torch.cat([batch.targets.cpu() for batch in Batches(data, 1024)])[indices]
    likelihood = task.likelihood
    repeated = refits["refit_outputs"][:, indices]
    outputs, without = repeated[0], copies["outputs_without"]
    prepared = likelihood.prepare(outputs, targets)
    change = likelihood.mean(without) - likelihood.mean(outputs)
    noise = torch.stack([_scores(likelihood, outputs, other) for other in repeated[1:]])
    floor = NoiseFloor(
        repeated=float(noise[0].double().mean()),
        reseeded=float(noise[1:].double().mean()) if len(noise) > 1 else 0.0,
        drift=float(_scores(likelihood, given[indices], outputs).double().mean()),
        refits=task.refits,
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
        provenance=provenance(model, settings),
        baseline_converged=bool(reached(refits["gradient_norm"], refits["wanted_norm"])[0]),
        evaluation_loss=copies.get("evaluation"),
        evaluation_loss_with=refits.get("refit_evaluation", [None])[0],
        parameters={n.removeprefix("parameter "): t for n, t in copies.items() if " " in n},
        **{name: copies[name] for name in ("gradient_norm", "wanted_norm")},
        **{name: copies[name] for name in ("evaluations", "seconds")},
    )


def _scores(likelihood: Likelihood, outputs: Tensor, others: Tensor) -> Tensor:
    return (likelihood.mean(others) - likelihood.mean(outputs)).abs().sum(1)


def _in_order(task: Task, parts: list[Part]) -> Part:
    """Tensors of all copies, sorted by the copy's number; a copy that came twice counts once."""
    rows: dict[int, Part] = {}
    for part in parts:
        numbers = part["number"].tolist()
        sizes = [len(task.selection.members[number]) for number in numbers]
        outputs = part["outputs_without"].split(sizes)
        for position, number in enumerate(numbers):
            own = {k: v[position : position + 1] for k, v in part.items() if k != "number"}
            rows[number] = own | {"outputs_without": outputs[position]}
    ordered = [rows[number] for number in range(len(task.selection))]
    return {name: torch.cat([row[name] for row in ordered]) for name in ordered[0]}
