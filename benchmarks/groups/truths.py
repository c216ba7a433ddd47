"""What leaving a group out does in truth: trainings with and without it, over seeds.

What is found is kept: ``NAME.safetensors`` has the mean loss of every group, of the examples that
remain and of the test set, with and without the group [seeds].
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.groups.settings import CASES, Case
from benchmarks.practical.truths import evaluated

FOLDER = Path(__file__).resolve().parent.parent.parent / "build" / "groups"
SEEDS = 4


def losses(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    """Of every example in eval mode, [N]."""
    return functional.cross_entropy(evaluated(model, data[0]), data[1], reduction="none")


def truth(name: str, folder: Path = FOLDER) -> dict[str, Tensor]:
    """Losses by ``group/own``, ``group/rest`` and ``group/test``, [seeds, 2]: with and without."""
    file = folder / f"{name}.safetensors"
    if file.is_file():
        return load_file(file)
    case, rows, seconds = CASES[name], list[dict[str, Tensor]](), list[float]()
    for seed in range(SEEDS):
        began = time.perf_counter()
        model = case.setting.train(seed)
        seconds.append(time.perf_counter() - began)
        rows.append(_changes(case, seed, model))
        print(f"{name}: seed {seed} of {SEEDS}", flush=True)
    found = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(found | {"seconds": torch.tensor(seconds)}, file)
    return load_file(file)


def _changes(case: Case, seed: int, model: nn.Module) -> dict[str, Tensor]:
    split = case.setting.split()
    inputs, given = split.data
    whole, tested = losses(model, split.data), losses(model, split.test).mean()
    found = {}
    for name, group in case.source.groups().items():
        kept = torch.ones(len(given), dtype=torch.bool)
        kept[group] = False
        torch.manual_seed(seed)
        other = case.setting.fit(case.setting.net(), (inputs[kept], given[kept]))
        without = losses(other, split.data)
        found[f"{name}/own"] = torch.stack([whole[group].mean(), without[group].mean()])
        found[f"{name}/rest"] = torch.stack([whole[kept].mean(), without[kept].mean()])
        found[f"{name}/test"] = torch.stack([tested, losses(other, split.test).mean()])
    return found
