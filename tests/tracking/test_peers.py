"""Two real processes that train one net with DDP, over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import engram
from engram.errors import ArgumentError, ModelMismatchError
from streamed import build, data

RANKS, BATCH, EPOCHS, NUM_DATA = 2, 4, 2, 23  # one example short: the sampler repeats one


def examples() -> tuple[Tensor, Tensor]:
    x, y = data()
    return x[:NUM_DATA], y[:NUM_DATA]


def shares(rank: int, epoch: int) -> list[Tensor]:
    """The batches of one rank."""
    dataset = TensorDataset(torch.arange(NUM_DATA))
    sampler: Any = DistributedSampler(dataset, RANKS, rank, seed=5)
    sampler.set_epoch(epoch)
    return [batch for (batch,) in DataLoader(dataset, BATCH, sampler=sampler)]


def columns(tracker: engram.Tracker) -> dict[str, Tensor]:
    assert tracker.last_epoch is not None
    estimates = [record.estimate for record in tracker.history]
    counts = [[record.examples, record.ranks] for record in tracker.history]
    kept = {"estimates": torch.tensor(estimates).double(), "counts": torch.tensor(counts)}
    return kept | tracker.last_epoch.state()


def streamed(rank: int, folder: Path) -> None:
    """What every process does; the model comes wrapped or as it is."""
    for wrapped in (True, False):
        model, optimizer = build()
        parallel = DistributedDataParallel(model)
        given: dict[str, Any] = {"folder": folder / f"scores {wrapped}"}
        tracker = engram.Tracker(parallel if wrapped else model, optimizer, examples(), **given)
        x, y = examples()
        for epoch in range(EPOCHS):
            for batch in shares(rank, epoch):
                optimizer.zero_grad()
                with tracker.step(batch):
                    functional.cross_entropy(parallel(x[batch]), y[batch]).backward()
                optimizer.step()
            tracker.finish_epoch(step=epoch)
        tracker.save(folder / f"saved {wrapped}")
        save_file(columns(tracker), folder / f"{wrapped} {rank}.safetensors")
    divided(rank, folder)
    refused(rank)


def divided(rank: int, folder: Path) -> None:
    """One call of all processes, each with half of the examples."""
    model, _ = build()
    model.float()
    x, y = examples()
    given = {"structure": "kronecker", "prior_precision": 1.0, "progress": False}
    posterior = engram.laplace(model, (x.float(), y), **given)
    result = engram.sensitivities(
        model, (x.float(), y), posterior, across_ranks=True, progress=False
    )
    alone = engram.sensitivities(model, (x.float(), y), posterior, progress=False)
    for name in ("loss", "loo_loss", "deviation", "score", "outputs", "leverage"):
        one, other = getattr(result, name), getattr(alone, name)
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)
    for name in ("indices", "targets", "flagged"):
        assert getattr(result, name).equal(getattr(alone, name))
    one, other = result.diagnostics.relative_gradient, alone.diagnostics.relative_gradient
    assert one == pytest.approx(other, rel=1e-4)
    assert result.provenance["settings"]["ranks"] == RANKS
    save_file({"loo_loss": result.loo_loss}, folder / f"divided {rank}.safetensors")
    model.register_buffer("statistics", torch.full((2,), float(rank)))
    with pytest.raises(ModelMismatchError, match="broadcast buffers"):
        engram.sensitivities(model, (x.float(), y), posterior, across_ranks=True)


def refused(rank: int) -> None:
    model, optimizer = build()
    with pytest.raises(ArgumentError, match="2 processes that train together"):
        engram.Tracker(model, optimizer, examples(), held_out=3)
    with torch.no_grad():
        model[0].weight *= 1 + rank  # another model on the other rank
    tracker = engram.Tracker(model, optimizer, examples())
    with pytest.raises(ModelMismatchError, match="across_ranks=False"):
        tracker.finish_epoch()
    alone = engram.Tracker(model, optimizer, examples(), across_ranks=False)
    x, y = examples()
    with alone.step(torch.arange(NUM_DATA)):
        functional.cross_entropy(model(x), y).backward()
    assert alone.last_epoch is not None


def process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    place = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=RANKS)
    try:
        streamed(rank, Path(folder))
        dist.barrier()  # none leaves while another still needs it
    finally:
        dist.destroy_process_group()


def test_every_rank_has_the_one_estimate_of_all(tmp_path: Path) -> None:
    """The same as one process that goes through both shares before each step."""
    torch.multiprocessing.spawn(process, (str(tmp_path),), nprocs=RANKS)
    model, optimizer = build()
    tracker, (x, y) = engram.Tracker(model, optimizer, examples()), examples()
    for epoch in range(EPOCHS):
        for batches in zip(shares(0, epoch), shares(1, epoch), strict=True):
            optimizer.zero_grad()
            for batch in batches:
                if not tracker.stream.epoch.all_seen:
                    with tracker.step(batch, scale=1 / RANKS):
                        loss = functional.cross_entropy(model(x[batch]), y[batch])
                        (loss / RANKS).backward()
            optimizer.step()
    expected = columns(tracker)
    parts = [load_file(tmp_path / f"divided {rank}.safetensors") for rank in range(RANKS)]
    assert parts[0]["loo_loss"].equal(parts[1]["loo_loss"])
    for wrapped in (True, False):
        found = [load_file(tmp_path / f"{wrapped} {rank}.safetensors") for rank in range(RANKS)]
        for name, value in found[0].items():
            torch.testing.assert_close(value, found[1][name], rtol=0, atol=0, equal_nan=True)
        for name in ("loss", "loo_loss", "score"):
            torch.testing.assert_close(found[0][name], expected[name], equal_nan=True)
        torch.testing.assert_close(found[0]["estimates"], expected["estimates"])
        assert found[0]["counts"].tolist()[1] == [NUM_DATA, RANKS]
        assert int(found[0]["visits"].sum()) == NUM_DATA + 1
        again = engram.Tracker(model, optimizer, examples())
        again.resume(tmp_path / f"saved {wrapped}")
        assert len(again.history) == EPOCHS


def test_a_wrapped_model_is_the_model_inside() -> None:
    """DDP needs a group of processes, if only of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(4, 3).double()
        wrapped = DistributedDataParallel(model)
        posterior = engram.laplace(wrapped, examples(), structure="diagonal", prior_precision=1.0)
        assert posterior.names == ("weight", "bias")
        result = engram.sensitivities(model, examples(), posterior, progress=False)
        again = engram.sensitivities(wrapped, examples(), posterior, progress=False)
        assert result.loo_loss.equal(again.loo_loss)
    finally:
        dist.destroy_process_group()
