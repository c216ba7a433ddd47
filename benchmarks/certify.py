"""Do the intervals of ``engram.certify`` hold the truth, and how narrow are they?

``python -m benchmarks.certify``: every example of some models is left out once, at a minimum or by
walking the recorded training again; then the draws of ``certify`` are repeated from these truths.
They are kept in ``build/certify`` and not computed again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

import engram
from benchmarks.records import RESULTS, conditions, table, write
from benchmarks.timing import environment
from engram.evidence.certify import certified, drawn_from
from engram.evidence.correlation import rank_correlation
from engram.evidence.difference import corrected_mean, drawn
from engram.evidence.ways import MINIMUM, REPLAY
from engram.retraining.result import Retraining

REPETITIONS, REFITS, SEED = 200, (8, 16, 32, 64), 0
WRONG = 0.05  # share of labels that are drawn anew
PARTLY = 16  # examples with the highest losses, and as many again among the others
STUDENT = {8: 2.365, 16: 2.131, 32: 2.040, 64: 1.998}  # quantiles at 0.975, m - 1 degrees
Data = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Problem:
    """A model with its estimate, and the truth about all of its examples."""

    result: engram.Result
    truth: Retraining
    way: str


def digits(number: int, seed: int, images: bool, dtype: torch.dtype) -> Data:
    generator = torch.Generator().manual_seed(seed)
    pixels, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(pixels), generator=generator)[:number]
    x, y = (pixels[order] / 16).to(dtype), labels[order].clone()
    wrong = torch.rand(number, generator=generator) < WRONG
    y[wrong] = (y[wrong] + torch.randint(1, 10, (int(wrong.sum()),), generator=generator)) % 10
    return x.view(-1, 1, 8, 8) if images else x, y


def at_minimum(make: Callable[[], nn.Module], structure: str, delta: float = 1.0) -> Problem:
    """L-BFGS on all data, and Newton's refits from there."""
    torch.manual_seed(SEED)
    data, model = digits(300, 1, False, torch.float64), make().double()
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=800, tolerance_grad=1e-7, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        squares = sum((p**2).sum() for p in model.parameters())
        value = functional.cross_entropy(model(data[0]), data[1], reduction="sum")
        value = value + 0.5 * delta * squares
        value.backward()
        return value

    optimizer.step(closure)
    posterior = engram.laplace(
        model, data, structure=structure, curvature="ggn", prior_precision=delta
    )
    result = engram.sensitivities(model, data, posterior)
    return Problem(result, engram.retrain(model, data, prior_precision=delta), MINIMUM)


def stopped(
    make: Callable[[], nn.Module], optimizer: Callable[[Any], Any], epochs: int, images: bool
) -> Problem:
    """Every example left out of the record of a training."""
    model, data, training, result = estimated(make, optimizer, epochs, images)
    return Problem(result, engram.retrain(model, data, train=training), REPLAY)


def estimated(
    make: Callable[[], nn.Module], optimizer: Callable[[Any], Any], epochs: int, images: bool
) -> tuple[nn.Module, Data, engram.Training, engram.Result]:
    """Mini-batches for some epochs, recorded, and the estimate along the record."""
    torch.manual_seed(SEED)
    data, model = digits(400, 2, images, torch.float32), make()
    steps = optimizer(model.parameters())
    training = engram.record(steps, model, replay=True)
    for _ in range(epochs):
        for rows in torch.randperm(400).split(32):
            training.note(rows)
            outputs = model(data[0][rows])
            training.visit(rows, outputs, data[1][rows])
            steps.zero_grad()
            functional.cross_entropy(outputs, data[1][rows]).backward()
            steps.step()
    training.stop()
    model.eval()
    posterior = engram.laplace(model, data, training=training, structure="kronecker")
    return model, data, training, engram.sensitivities(model, data, posterior)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(),
        nn.Dropout(0.3), nn.Linear(256, 10),
    )  # fmt: skip


def mlp(hidden: int, activation: type[nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(64, hidden), activation(), nn.Linear(hidden, 10))


STOPPED: dict[str, tuple[Any, Any, int, bool]] = {
    "MLP, SGD with momentum, 12 epochs": (
        lambda: mlp(32, nn.ReLU),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-4),
        12,
        False,
    ),
    "CNN with BatchNorm and dropout, AdamW, 8 epochs": (
        cnn,
        lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=1e-2),
        8,
        True,
    ),
}
PROBLEMS: dict[str, Callable[[], Problem]] = {
    "softmax regression, at a minimum": lambda: at_minimum(lambda: nn.Linear(64, 10), "full"),
    "MLP, at a minimum, Kronecker": lambda: at_minimum(lambda: mlp(6, nn.Tanh), "kronecker"),
    **{name: partial(stopped, *settings) for name, settings in STOPPED.items()},
}


def problem(name: str, folder: Path) -> Problem:
    """Computed, or read where it was."""
    place = folder / name.replace(" ", "-").replace(",", "")
    way = MINIMUM if "minimum" in name else REPLAY
    if not (place / "truth" / "retraining.json").is_file():
        made = PROBLEMS[name]()
        made.result.save(place / "result")
        made.truth.save(place / "truth")
    return Problem(engram.load(place / "result"), engram.load(place / "truth"), way)


def some_of(truth: Retraining, rows: Tensor) -> Retraining:
    """The truth of some examples only."""
    columns = ("indices", "targets", "outputs", "deviation", "prediction_deviation", "score")
    columns += ("loss", "loo_loss", "noise", "gradient_norm", "wanted_norm", "evaluations")
    columns += ("seconds",)
    picked = {name: getattr(truth, name)[rows] for name in columns}
    labels = tuple(truth.labels[int(row)] for row in rows)
    return replace(truth, **picked, labels=labels, owners=torch.arange(len(rows)))


def alone(losses: Tensor, refits: int, seed: int) -> tuple[float, float]:
    """The t interval of so many refits drawn at random, with nothing estimated."""
    generator = torch.Generator().manual_seed(seed)
    drawn = losses[torch.randperm(len(losses), generator=generator)[:refits]]
    half = STUDENT[refits] * float(drawn.std()) / refits**0.5
    return float(drawn.mean()) - half, float(drawn.mean()) + half


def repeated(found: Problem, refits: int) -> dict[str, float]:
    """Coverage and width over repetitions."""
    losses = found.truth.loo_loss.double()
    likelihood = found.result.basis.known_likelihood
    outputs = found.truth.outputs + found.truth.deviation
    hits = (likelihood.mean(outputs).argmax(1) == found.truth.targets).double()
    true, accuracy = float(losses.mean()), float(hits.mean())
    rows = []
    for seed in range(REPETITIONS):
        chosen, draws = drawn_from(found.result, refits, 4 if refits > 8 else 2, seed)
        made = certified(found.result, some_of(found.truth, chosen), chosen, draws, found.way)
        (low, high), right = made.interval, made.accuracy
        assert right is not None
        plain = alone(losses, refits, seed)
        rows.append(
            [
                low <= true <= high,
                high - low,
                right.low <= accuracy <= right.high,
                right.high - right.low,
                plain[0] <= true <= plain[1],
                plain[1] - plain[0],
                made.trainings,
            ]
        )
    names = ("covered", "width", "accuracy_covered", "accuracy_width")
    names += ("alone_covered", "alone_width", "trainings")
    means = torch.tensor(rows, dtype=torch.float64).mean(0).tolist()
    return dict(zip(names, means, strict=True)) | {"true": true, "accuracy": accuracy}


def parts(name: str, found: Problem) -> list[dict[str, float]]:
    """Replays that begin later, for some examples: ranks and size against replays of all."""
    model, data, training, _ = estimated(*STOPPED[name])
    order = found.result.loo_loss.argsort(descending=True)
    chosen = torch.cat([order[:PARTLY], order[PARTLY:][:: len(order) // PARTLY]])
    true = found.truth.increase[chosen].double()
    guess = (found.result.loo_loss - found.result.loss)[chosen]
    rows = [{"start": 1.0} | _beside(guess, true)]
    for start in (0.75, 0.5, 0.25):
        replay = engram.recipes.Replay(training, start=start)
        walked = engram.retrain(model, data, chosen, train=replay, progress=False)
        rows.append({"start": start} | _beside(walked.increase, true))
    return rows


def _beside(found: Tensor, true: Tensor) -> dict[str, float]:
    return {
        "spearman": rank_correlation(found, true),
        "size": float(found.double().sum() / true.sum()),
    }


def by_increase(found: Problem) -> dict[str, float]:
    """The same estimator, drawn in proportion to the estimated increase of the loss."""
    result, losses = found.result, found.truth.loo_loss.double()
    sizes = (result.loo_loss - result.loss).double().clamp(min=0)
    errors, true, rows = losses - result.loo_loss.double(), float(losses.mean()), []
    for seed in range(REPETITIONS):
        draws = drawn(sizes, result.counts, 32, 4, seed)
        made = corrected_mean(result.loo_nll, errors[draws.positions], draws).interval()
        rows.append([made.low <= true <= made.high, made.high - made.low])
    covered, width = torch.tensor(rows, dtype=torch.float64).mean(0).tolist()
    return {"covered": covered, "width": width}


def shuffled(found: Problem) -> Problem:
    """The same with an estimate that says nothing about its example."""
    generator = torch.Generator().manual_seed(SEED)
    order = torch.randperm(found.result.num_data, generator=generator)
    return replace(found, result=replace(found.result, loo_loss=found.result.loo_loss[order]))


def page(record: dict[str, Any]) -> str:
    header = ["model", "refits", "covered", "width", "over alone", "alone covered"]
    header += ["accuracy covered", "its width"]
    rows = [
        [
            name,
            f"{refits}",
            f"{row['covered']:.1%}",
            f"{row['width']:.3f}",
            f"{row['width'] / row['alone_width']:.2f}",
            f"{row['alone_covered']:.1%}",
            f"{row['accuracy_covered']:.1%}",
            f"{row['accuracy_width']:.3f}",
        ]
        for name, found in record["problems"].items()
        for refits, row in found["refits"].items()
    ]
    facts = [
        [
            name,
            f"{found['examples']}",
            f"{found['train_loss']:.3f}",
            f"{found['estimated']:.3f}",
            f"{found['refits']['32']['true']:.3f}",
            f"{found['verdict']}",
        ]
        for name, found in record["problems"].items()
    ]
    shuffled = ", ".join(f"{f['shuffled']['covered']:.1%}" for f in record["problems"].values())
    shuffled += " were covered"
    found_by = [f["by_increase"] for f in record["problems"].values()]
    increases = ", ".join(f"{f['covered']:.1%} (width {f['width']:.3f})" for f in found_by)
    plain = ", ".join(f"{f['shuffled']['alone_covered']:.1%}" for f in record["problems"].values())
    later = [
        [
            name,
            "all: estimate" if row["start"] == 1 else f"{row['start']:.0%}",
            f"{row['spearman']:.2f}",
            f"{row['size']:.2f}",
        ]
        for name, found in record["problems"].items()
        for row in found.get("parts", [])
    ]
    about = ["model", "examples", "training loss", "estimated LOO", "true LOO", "verdict"]
    return f"""# The leave-one-out loss with an interval: does it hold the truth?

`python -m benchmarks.certify`. Every example of four models on scikit-learn's digits, one label in
twenty wrong, was left out once: of two models at a minimum by refits, of two that were stopped
after some epochs by walking the recorded training again without it. From these truths the draws of
`engram.certify` were repeated {REPETITIONS} times each.

{table(about, facts)}

*Covered*: how often the 95 % interval held the mean of all true leave-one-out losses. *Alone*: the
t interval of as many refits drawn at random, with nothing estimated.

{table(header, rows)}

- Bars, with 32 refits: covered at least 90 % of the time, and at most a third as wide as alone.
- With 8 refits there are two strata, else four.
- The interval is for the mean over *these* examples, of *this* training: what another draw of the
  data or another seed would change is not in it.
- Drawn in proportion to the estimated *increase* in place of the loss, 32 refits: {increases}.
- Estimates that say nothing: with the estimated losses shuffled among the examples, and 32 refits,
  {shuffled} (refits alone {plain}).
  Large losses are rarely drawn then; `certify` says so in a note, from the ranks of the draws.

## Replays of a part

A replay of the recorded training that begins later is cheaper, and leaves in the weights what the
example has done before. On {2 * PARTLY} or so examples of each net, the {PARTLY} with the highest
estimated losses among them, against replays of all steps:

{table(["model", "begun after", "Spearman of increases", "sum of increases over true"], later)}

{conditions(record["environment"])}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("build/certify"))
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    record: dict[str, Any] = {"environment": environment(SEED), "problems": {}}
    for name in PROBLEMS:
        found = problem(name, arguments.folder)
        record["problems"][name] = {
            "examples": found.result.num_data,
            "train_loss": found.result.train_nll,
            "estimated": found.result.loo_nll,
            "verdict": found.result.verdict.level,
            "by_increase": by_increase(found),
            "shuffled": repeated(shuffled(found), 32),
            "refits": {str(m): repeated(found, m) for m in REFITS},
        }
        if name in STOPPED:
            record["problems"][name]["parts"] = parts(name, found)
        print(name, record["problems"][name]["refits"]["32"], flush=True)
    write(arguments.output, "certify", record, page(record))


if __name__ == "__main__":
    main()
