"""How many wrong removals are called good: at a minimum, and stopped without a record.

``python -m benchmarks.removal_verdicts`` prints, for both, how many removals are off by more than a
factor 3 in the group's own loss or wrong in sign, and what their verdicts say; stopped trainings
with a record are in docs/results/groups.json, which a test reads.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

import engram
from benchmarks.minimum_groups import RULES, groups, trained, true_increases

NUMBER, BATCH, SEED = 400, 32, 0
OFF = 3.0  # factor
Found = tuple[float, str]  # estimated over true, and the verdict


def at_minimum(prior: float) -> Iterator[Found]:
    """Single examples, tens, hundreds and classes, by every posterior and rule."""
    model, data = trained(300, 6, prior)
    chosen = groups(data[1])
    chosen["1"] = chosen["1"][:8]
    truth = {size: true_increases(model, data, some, prior) for size, some in chosen.items()}
    for name, rules in RULES.items():
        structure, curvature = name.split()
        posterior = engram.laplace(
            model, data, structure=structure, curvature=curvature, prior_precision=prior
        )
        for rule in rules:
            for size, some in chosen.items():
                for group, true in zip(some, truth[size].tolist(), strict=True):
                    found = engram.remove(
                        model, data, posterior, group, estimator=rule, progress=False
                    )
                    yield found.group.change / true, found.verdict.level


def digits() -> tuple[Tensor, Tensor]:
    """Digits, five in a hundred with a random label."""
    generator = torch.Generator().manual_seed(SEED)
    images, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(images), generator=generator)[:NUMBER]
    inputs, targets = (images[order] / 16).float(), labels[order].clone()
    wrong = torch.rand(NUMBER, generator=generator) < 0.05
    targets[wrong] = torch.randint(10, (int(wrong.sum()),), generator=generator)
    return inputs, targets


def fitted(
    data: tuple[Tensor, Tensor], kept: Tensor, kind: str, epochs: int, decay: float
) -> nn.Module:
    """A net after some epochs on the examples that are kept, the same batches every time."""
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    if kind == "adam":
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=decay)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=decay)
    for _ in range(epochs):
        for batch in torch.randperm(NUMBER).split(BATCH):
            rows = batch[kept[batch]]
            if len(rows):
                optimizer.zero_grad()
                functional.cross_entropy(model(data[0][rows]), data[1][rows]).backward()
                optimizer.step()
    return model.eval()


def stopped(kind: str, epochs: int, decay: float) -> Iterator[Found]:
    """Tens, sixties and classes of a net that was stopped; nothing is said of its training."""
    data, generator = digits(), torch.Generator().manual_seed(1)
    chosen = [torch.randperm(NUMBER, generator=generator)[:k] for k in (10, 10, 10, 60, 60)]
    chosen += [(data[1] == label).nonzero()[:, 0] for label in (0, 3, 8)]
    everything = torch.ones(NUMBER, dtype=torch.bool)
    model = fitted(data, everything, kind, epochs, decay)
    truths = []
    for group in chosen:
        without = fitted(data, everything.index_fill(0, group, False), kind, epochs, decay)
        own = data[0][group], data[1][group]
        with torch.no_grad():
            losses = [float(functional.cross_entropy(m(own[0]), own[1])) for m in (without, model)]
        truths.append(losses[0] - losses[1])
    for structure in ("full", "kronecker"):
        prior = {"prior_precision": NUMBER * decay} if decay else {}
        posterior = engram.laplace(model, data, structure=structure, progress=False, **prior)
        for rule in ("auto", "linear"):
            for group, true in zip(chosen, truths, strict=True):
                found = engram.remove(model, data, posterior, group, estimator=rule, progress=False)
                yield found.group.change / true, found.verdict.level


def summary(found: list[Found]) -> str:
    parts = []
    for off in (True, False):
        levels = [level for ratio, level in found if off is not (1 / OFF <= ratio <= OFF)]
        doubted = len(levels) - levels.count("good")
        words = "off" if off else "right"
        parts.append(
            f"{len(levels)} {words}: {doubted} not good, {levels.count('unreliable')} unreliable"
        )
    return "; ".join(parts)


def main() -> None:
    print("at a minimum:", summary([f for prior in (1.0, 0.1) for f in at_minimum(prior)]))
    settings = [(k, e, d) for k in ("adam", "sgd") for e in (4, 15, 80) for d in (0.0, 3e-3)]
    print("stopped, no record:", summary([f for setting in settings for f in stopped(*setting)]))


if __name__ == "__main__":
    main()
