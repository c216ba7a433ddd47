"""Linear datamodeling scores: do influences, added up, rank trainings on random halves of the data?

A net is trained on many random halves. For every test example the sum of its influences over a half
is compared, by Spearman's correlation over the halves, with the loss it really has there; the score
is the mean over test examples. The halves' trainings differ in their seed too, as anyone's do.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import rankdata
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import engram
from benchmarks.lds_page import draw, page
from benchmarks.libraries import MODULES
from benchmarks.libraries.case import Case, installed, ways
from benchmarks.practical.nets import block
from benchmarks.records import RESULTS, write
from benchmarks.timing import environment

Data = tuple[Tensor, Tensor]
RESAMPLES = 200  # of the halves, for the interval


@dataclass(frozen=True)
class Setting:
    """A net, how it is trained, and its data.

    Args:
        data: training and test examples.
        net: a fresh one.
        optimizer: with its weight decay.
        epochs, batch_size: with a cosine schedule.
    """

    title: str
    data: Callable[[], tuple[Data, Data]]
    net: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    epochs: int
    batch_size: int = 50


def digits() -> tuple[Data, Data]:
    """1,000 and 200 of scikit-learn's digits."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))[:1200]
    x, y = torch.tensor(pixels[order] / 16).float(), torch.tensor(labels[order]).long()
    return (x[:1000], y[:1000]), (x[1000:], y[1000:])


def images() -> tuple[Data, Data]:
    """The same as images of 8 x 8."""
    return tuple((x.reshape(-1, 1, 8, 8), y) for x, y in digits())


def small_cnn() -> nn.Module:
    """Two convolutions with BatchNorm, a hidden layer with dropout."""
    return nn.Sequential(
        *block(1, 8), *block(8, 16), nn.Flatten(),
        nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10),
    )  # fmt: skip


SETTINGS = {
    "digits": Setting(
        "Digits, MLP 64-32-16-10, SGD with momentum, 20 epochs",
        digits,
        lambda: nn.Sequential(
            nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10)
        ),
        lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3),
        20,
    ),
    "digits-cnn": Setting(
        "Digits, CNN with BatchNorm and dropout, AdamW, 12 epochs",
        images,
        small_cnn,
        lambda net: torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=1e-2),
        12,
    ),
}


def trained(
    setting: Setting, data: Data, seed: int, recorded: bool = False
) -> tuple[nn.Module, engram.Training | None]:
    """From first weights and in an order of this seed."""
    torch.manual_seed(seed)
    model = setting.net()
    optimizer = setting.optimizer(model)
    loader = DataLoader(TensorDataset(*data), batch_size=setting.batch_size, shuffle=True)
    record = engram.record(optimizer, model, loader=loader) if recorded else None
    steps = setting.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(setting.epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            schedule.step()
    return model.eval(), record


def halves(setting: Setting, train: Data, test: Data, count: int) -> tuple[Tensor, Tensor]:
    """Which examples each half has, [S, N], and the losses of the test examples there, [S, M]."""
    generator = torch.Generator().manual_seed(1)
    members = torch.zeros(count, len(train[1]), dtype=torch.bool)
    losses = torch.zeros(count, len(test[1]))
    for number in range(count):
        chosen = torch.randperm(len(train[1]), generator=generator)[: len(train[1]) // 2]
        members[number, chosen] = True
        model, _ = trained(setting, (train[0][chosen], train[1][chosen]), 1000 + number)
        with torch.no_grad():
            losses[number] = functional.cross_entropy(model(test[0]), test[1], reduction="none")
        if number % 10 == 9:
            print(f"  {number + 1} of {count} halves", file=sys.stderr, flush=True)
    return members, losses


def correlations(scores: Tensor, members: Tensor, losses: Tensor) -> np.ndarray[Any, Any]:
    """Spearman over the halves for every test example, [M]; more support, less loss."""
    predicted = members.double() @ scores.double().cpu()
    a = rankdata(predicted.numpy(), axis=0)
    b = rankdata(-losses.numpy(), axis=0)
    a, b = a - a.mean(0), b - b.mean(0)
    norms = np.sqrt((a**2).sum(0) * (b**2).sum(0))
    return np.where(norms > 0, (a * b).sum(0) / np.where(norms > 0, norms, 1), 0.0)


def scored(scores: Tensor, members: Tensor, losses: Tensor) -> dict[str, Any]:
    """The mean over test examples, and a standard error by drawing halves anew."""
    if not torch.isfinite(scores).all():
        raise ValueError(f"{int((~torch.isfinite(scores)).sum())} scores are not finite")
    generator = torch.Generator().manual_seed(2)
    count = len(members)
    again = []
    for _ in range(RESAMPLES):
        rows = torch.randint(count, (count,), generator=generator)
        again.append(correlations(scores, members[rows], losses[rows]).mean())
    found = correlations(scores, members, losses)
    return {"lds": float(found.mean()), "error": float(np.std(again))}


def measured(name: str, count: int, seeds: int) -> dict[str, Any]:
    """Every method on one setting; with several seeds, influences are averaged over trainings."""
    setting = SETTINGS[name]
    train, test = setting.data()
    members, losses = halves(setting, train, test, count)
    cases = []
    for seed in range(seeds):
        model, record = trained(setting, train, seed, recorded=True)
        cases.append(Case(model, train, test, None, record))
    rows = {}
    for module in MODULES:
        for title, way in ways(module, "PAIRS").items():
            began = time.process_time()
            try:
                each = [way(case) for case in cases]
                found = scored(each[0], members, losses)
                found["together"] = scored(torch.stack(each).mean(0), members, losses)["lds"]
            except Exception as error:  # whatever a library raises is its row in the table
                first = (str(error).strip() or "no message").splitlines()[0]
                found = {"failed": f"{type(error).__name__}: {first}"}
            found["seconds"] = (time.process_time() - began) / seeds
            rows[title] = found
            print(f"  {title}: {found}", file=sys.stderr, flush=True)
    return {
        "title": setting.title,
        "halves": count,
        "seeds": seeds,
        "parameters": sum(p.numel() for p in cases[0].model.parameters()),
        "num_train": len(train[1]),
        "num_test": len(test[1]),
        "methods": rows,
    }


def kept(folder: Path) -> dict[str, Any]:
    """Settings that an earlier run has left: a run of some of them keeps the others."""
    path = folder / "lds.json"
    found: dict[str, Any] = json.loads(path.read_text())["settings"] if path.is_file() else {}
    return found


def main() -> None:
    """Measure setting by setting; the files are written after each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lds", description=__doc__)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--halves", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=2, help="trainings that are averaged over")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the three files")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    record: dict[str, Any] = {
        "environment": environment(0),
        "versions": installed(),
        "settings": kept(chosen.output),
    }
    for name in chosen.settings:
        print(name, file=sys.stderr, flush=True)
        record["settings"][name] = measured(name, chosen.halves, chosen.seeds)
        write(chosen.output, "lds", record, page(record))
        draw(record, chosen.output / "lds.png")


if __name__ == "__main__":
    main()
