"""Where no training was recorded: nets at a minimum, nets that were stopped, and closed models."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

import engram
from benchmarks.glm_exact import Problem, problems
from benchmarks.minimum_groups import RULES, groups, trained, true_increases
from benchmarks.removal_verdicts.rows import Row, own
from engram import models
from engram.errors import EngramError

NUMBER, BATCH, SEED = 400, 32, 0
PRIORS = (1.0, 0.1)
STOPPED = [(kind, n, d) for kind in ("adam", "sgd") for n in (4, 15, 80) for d in (0.0, 3e-3)]
SMALL = 5  # examples of the smallest groups of a table


def at_minimum() -> Iterator[Row]:
    """Single examples, tens, hundreds and classes, by every posterior and rule."""
    for prior in PRIORS:
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
                    for number, true in enumerate(truth[size].tolist()):
                        found = engram.remove(
                            model, data, posterior, some[number], estimator=rule, progress=False
                        )
                        about = (f"prior {prior:g}", f"{name} {rule}", f"{size}, {number}")
                        yield own(("at a minimum", *about), found, true)


def digits() -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Digits, five in a hundred with a random label, and which those are."""
    generator = torch.Generator().manual_seed(SEED)
    images, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(images), generator=generator)[:NUMBER]
    inputs, targets = (images[order] / 16).float(), labels[order].clone()
    wrong = torch.rand(NUMBER, generator=generator) < 0.05
    targets[wrong] = torch.randint(10, (int(wrong.sum()),), generator=generator)
    return (inputs, targets), (targets != labels[order]).nonzero()[:, 0]


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


def stopped() -> Iterator[Row]:
    """Tens, sixties, classes and wrong labels of nets of whose training nothing is said."""
    (data, wrong), generator = digits(), torch.Generator().manual_seed(1)
    chosen = {
        f"{size}, {number}": torch.randperm(NUMBER, generator=generator)[:size]
        for number, size in enumerate((10, 10, 10, 60, 60))
    }
    chosen |= {f"class {c}": (data[1] == c).nonzero()[:, 0] for c in (0, 3, 8)}
    chosen["wrong labels"] = wrong
    everything = torch.ones(NUMBER, dtype=torch.bool)
    for kind, epochs, decay in STOPPED:
        model = fitted(data, everything, kind, epochs, decay)
        net = f"{kind}, {epochs} epochs, decay {decay:g}"
        for name, group in chosen.items():
            without = fitted(data, everything.index_fill(0, group, False), kind, epochs, decay)
            part = data[0][group], data[1][group]
            with torch.no_grad():
                after, before = (
                    float(functional.cross_entropy(m(part[0]), part[1])) for m in (without, model)
                )
            for structure in ("full", "kronecker"):
                prior = {"prior_precision": NUMBER * decay} if decay else {}
                posterior = engram.laplace(
                    model, data, structure=structure, progress=False, **prior
                )
                for rule in ("auto", "linear"):
                    found = engram.remove(
                        model, data, posterior, group, estimator=rule, progress=False
                    )
                    about = ("stopped, no record", net, f"{structure} {rule}", name)
                    yield own(about, found, after - before)


def closed() -> Iterator[Row]:
    """One Newton step of generalised linear models, beside fitting again."""
    for problem in problems():
        yield from _of_problem(problem)


def _of_problem(problem: Problem) -> Iterator[Row]:
    fit, generator = problem.fit(), torch.Generator().manual_seed(SEED)
    number, targets = len(fit.targets), fit.targets[:, 0]
    score = models.sensitivities_of(fit, estimator="corrected", progress=False).score
    order = score.nan_to_num(0.0).argsort(descending=True)
    sizes = {"few": SMALL, "a twentieth": max(SMALL, number // 20), "a quarter": number // 4}
    chosen = {
        f"{name}, random": torch.randperm(number, generator=generator)[:size]
        for name, size in sizes.items()
    }
    chosen |= {f"{name}, the most sensitive": order[: sizes[name]] for name in list(sizes)[:2]}
    chosen["half of the upper half"] = (targets > targets.median()).nonzero()[:, 0][::2]
    for name, group in chosen.items():
        try:
            true = models.remove_group(fit, group).group.change
            found = models.remove_group(fit, group, estimator="corrected")
        except EngramError:  # the rest is separated, or does not determine the coefficients
            continue
        yield own(("generalised linear", problem.name, "one step", name), found, true)
