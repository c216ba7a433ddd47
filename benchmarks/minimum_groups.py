"""Leaving out one, ten or a hundred examples and whole classes, beside training again without.

``python -m benchmarks.minimum_groups`` prints, for every posterior, rule and place of evaluation,
the mean estimated increase of the group's own loss over the true one, and the correlation of the
two. The nets are at a minimum; ``benchmarks.groups`` has those that people train.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import engram

SEED = 0
SIZES = {1: 20, 10: 8, 100: 3}
RULES = {
    "full hessian": ("newton", "corrected", "linear"),
    "full ggn": ("corrected", "linear"),
    "kronecker ggn": ("downdated", "linear"),
}
Data = tuple[Tensor, Tensor]


def trained(count: int, hidden: int, prior: float) -> tuple[nn.Module, Data]:
    """A net on digits, five in a hundred with a random label, at a minimum."""
    generator = torch.Generator().manual_seed(SEED)
    images, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(images), generator=generator)[:count]
    inputs, targets = images[order] / 16, labels[order].clone()
    wrong = torch.rand(count, generator=generator) < 0.05
    targets[wrong] = torch.randint(10, (int(wrong.sum()),), generator=generator)
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(64, hidden), nn.Tanh(), nn.Linear(hidden, 10)).double()
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=3000, tolerance_grad=1e-9, line_search_fn="strong_wolfe"
    )

    def objective() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets, reduction="sum")
        loss = loss + prior / 2 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        return loss

    optimizer.step(objective)
    return model, (inputs, targets)


def groups(targets: Tensor) -> dict[str, list[list[int]]]:
    """Groups of each size, by name; the last are the classes."""
    generator = torch.Generator().manual_seed(SEED)
    found = {
        str(size): [
            torch.randperm(len(targets), generator=generator)[:size].tolist() for _ in range(count)
        ]
        for size, count in SIZES.items()
    }
    found["class"] = [(targets == label).nonzero()[:, 0].tolist() for label in range(10)]
    return found


def true_increases(model: nn.Module, data: Data, chosen: list[list[int]], prior: float) -> Tensor:
    """Of the mean loss of each group, by training again without it."""
    truth = engram.retrain(
        model, data, groups=chosen, prior_precision=prior, refits=2, progress=False
    )
    sums = torch.zeros(len(chosen)).double().index_add_(0, truth.owners, truth.increase.double())
    return sums / truth.owners.bincount(minlength=len(chosen))


def rows(model: nn.Module, data: Data, prior: float) -> Iterator[tuple[str, ...]]:
    """Posterior, rule, place, size, estimated over true, correlation, and the matrices."""
    chosen = groups(data[1])
    truth = {size: true_increases(model, data, some, prior) for size, some in chosen.items()}
    for name, rules in RULES.items():
        structure, curvature = name.split()
        posterior = engram.laplace(
            model,
            data,
            structure=structure,
            curvature=curvature,
            prior_precision=prior,
            progress=False,
        )
        for rule in rules:
            for place in ("linearised", "displaced"):
                for size, some in chosen.items():
                    found = [
                        engram.remove(
                            model, data, posterior, g, estimator=rule, at=place, progress=False
                        )
                        for g in some
                    ]
                    change = torch.tensor([removal.group.change for removal in found]).double()
                    ratio = float(change.mean() / truth[size].mean())
                    error = float((change - truth[size]).abs().mean() / truth[size].mean())
                    other = sum(bool(removal.why) for removal in found)
                    flagged = sum(removal.flagged for removal in found)
                    yield (
                        *(name, rule, place, size, f"{ratio:.2f}", f"{error:.2f}"),
                        f"{other}/{flagged}",
                    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=300)
    parser.add_argument("--hidden", type=int, default=6)
    parser.add_argument("--prior", type=float, default=1.0)
    chosen = parser.parse_args()
    model, data = trained(chosen.examples, chosen.hidden, chosen.prior)
    print("posterior, rule, at, group: estimated over true, mean error over true, other matrix")
    for row in rows(model, data, chosen.prior):
        print("  ".join(row), flush=True)


if __name__ == "__main__":
    main()
