"""Real processes of torch.distributed over gloo, and models and data for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

NUM_DATA = 23  # odd: the shares differ
Examples = tuple[Tensor, Tensor]


def examples(count: int = NUM_DATA) -> Examples:
    """Small images in three classes, in double precision."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 1, 4, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (count,), generator=generator)


def convolutional() -> nn.Module:
    """With running statistics, and a layer wide enough for a sketch of its gradient."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(48, 5),
        nn.Tanh(),
        nn.Linear(5, 3),
    ).double()


def perceptron() -> nn.Module:
    """Parts of which fully_shard makes groups of their own."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU())
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), inner, nn.Linear(8, 3)).double()


def run_on_ranks(work: Callable[..., None], folder: str, count: int, *given: Any) -> None:
    """Call ``work(rank, folder, *given)`` in so many processes of one group."""
    torch.multiprocessing.spawn(_process, (work, folder, count, *given), nprocs=count)


def _process(rank: int, work: Callable[..., None], folder: str, count: int, *given: Any) -> None:
    torch.set_num_threads(1)
    place = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=count)
    try:
        work(rank, folder, *given)
        dist.barrier()  # none leaves while another still needs it
    finally:
        dist.destroy_process_group()
