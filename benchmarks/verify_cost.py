"""Does ``engram.verify`` say beforehand what it will take, and is it true?

``python -m benchmarks.verify_cost``: an ordinary CNN on 10,000 images of Fashion-MNIST (BatchNorm,
AdamW, some epochs, recorded), 30 examples verified by walking the record again. Written down are
when the cost was said, what was said, and what it took.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import engram
from benchmarks.data import images
from benchmarks.records import RESULTS, conditions, write
from benchmarks.timing import environment
from engram.demo import trained_digits

IMAGES, BATCH, SEED = 10_000, 100, 0
UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}


class Listening(io.StringIO):
    """Standard error that remembers when it was told what trainings will take."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.said, self.after = time.perf_counter(), "", float("nan")

    def write(self, text: str) -> int:
        if not self.said and text.startswith("about "):
            self.said, self.after = text, time.perf_counter() - self.begun
        return sys.__stderr__.write(text) if sys.__stderr__ else 0

    @property
    def seconds(self) -> float:
        """What was said, in seconds."""
        found = re.match(r"about ([\d.]+) (s|min|h)", self.said)
        return float(found[1]) * UNITS[found[2]] if found else float("nan")


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, stride=2), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1, stride=2), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(16 * 49, 10),
    )  # fmt: skip


def trained(epochs: int) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], engram.Training]:
    data = images(IMAGES).first(IMAGES)
    torch.manual_seed(SEED)
    model = cnn()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    training = engram.record(optimizer, model, replay=True)
    for _ in range(epochs):
        for rows in torch.randperm(IMAGES).split(BATCH):
            training.note(rows)
            outputs = model(data[0][rows])
            training.visit(rows, outputs, data[1][rows])
            optimizer.zero_grad()
            functional.cross_entropy(outputs, data[1][rows]).backward()
            optimizer.step()
    training.stop()
    return model.eval(), data, training


def on_demo(sample: int) -> dict[str, Any]:
    """The demonstration's net, which is at a minimum: fitted again from where it is."""
    model, data, _ = trained_digits(SEED)
    posterior = engram.laplace(model, data)
    result = engram.sensitivities(model, data, posterior)
    began = time.perf_counter()
    check = engram.verify(model, data, result, sample=sample)
    seconds = time.perf_counter() - began
    return {"demo_seconds": seconds, "demo_way": check.way, "demo_sentence": check.sentence}


def measured(epochs: int, sample: int) -> dict[str, Any]:
    begun = time.perf_counter()
    model, data, training = trained(epochs)
    took = time.perf_counter() - begun
    posterior = engram.laplace(model, data, training=training, structure="kronecker")
    result = engram.sensitivities(model, data, posterior)
    heard = sys.stderr = Listening()  # type: ignore[assignment]
    try:
        check = engram.verify(model, data, result, train=training, sample=sample)
    finally:
        sys.stderr = sys.__stderr__
    total = time.perf_counter() - heard.begun
    return {
        "environment": environment(SEED),
        "training_seconds": took,
        "steps": training.num_steps,
        "said_after": heard.after,
        "said": heard.said.strip(),
        "seconds": total,
        "over_said": total / heard.seconds,
        "way": check.way,
        "score": str(check.score.spearman),
        "slope": str(check.increase.slope),
        "sentence": check.sentence,
        **on_demo(sample),
    }


def page(record: dict[str, Any]) -> str:
    return f"""# What `verify` says it will take, and what it takes

`python -m benchmarks.verify_cost`. A CNN with BatchNorm and dropout on 10,000 images of
Fashion-MNIST, AdamW, {record["steps"]} steps, recorded with `replay=True`; 30 examples verified by
walking the record again without each.

- said after {record["said_after"]:.1f} s: "{record["said"]}"
- it took {record["seconds"]:.0f} s, {record["over_said"]:.2f} of what was said
- found: {record["sentence"]}

30 examples of the demonstration's net (`engram.demo.trained_digits`; {record["demo_way"]}) took
{record["demo_seconds"]:.0f} s: {record["demo_sentence"]}

Bars: said within 10 s, over within 1.5 times what was said, and the demonstration's within 30 s.
The time of a step is that of the wall clock, on a machine as busy as it is in those two seconds.

{conditions(record["environment"])}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--sample", type=int, default=30)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    record = measured(arguments.epochs, arguments.sample)
    print(json.dumps(record, indent=1))
    write(arguments.output, "verify_cost", record, page(record))


if __name__ == "__main__":
    main()
