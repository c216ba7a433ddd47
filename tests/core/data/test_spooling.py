"""Streams written down once: the same examples, numbers and names for every call."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import engram
from engram.errors import DataError, StorageError

N = 23


class Stream(IterableDataset[Any]):
    """Examples that can only be read from the beginning; counts how often."""

    def __init__(self, kind: torch.dtype = torch.float64) -> None:
        torch.manual_seed(0)
        self.x, self.y, self.readings = torch.randn(N, 4).to(kind), torch.arange(N) % 3, 0

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        self.readings += 1
        for x, y in zip(self.x, self.y, strict=True):
            yield x, int(y)


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16, torch.bool])
def test_what_is_read_is_what_was_given(kind: torch.dtype, tmp_path: Path) -> None:
    stream = Stream(kind)
    numbers = iter(f"no {n}" for n in range(N))
    spooled = engram.spool(stream, tmp_path, name=lambda example: next(numbers))
    assert torch.equal(spooled.data[0], stream.x)
    assert torch.equal(spooled.data[1], stream.y)
    assert len(spooled) == len(spooled.names) == N
    again = engram.spool(stream, tmp_path)
    assert stream.readings == 1  # what is there is opened
    assert torch.equal(again.data[0], stream.x)
    assert again.names == spooled.names


def test_a_fit_a_pass_and_a_folder_of_scores_are_those_of_the_tensors(tmp_path: Path) -> None:
    stream, model = Stream(), nn.Linear(4, 3).double()
    spooled = engram.spool(lambda: iter(stream), tmp_path / "data", progress=False)
    found = []
    for data in (spooled.data, (stream.x, stream.y)):
        posterior = engram.laplace(model, data, structure="full", prior_precision=1.0)
        found.append(engram.sensitivities(model, data, posterior).loo_loss)
    torch.testing.assert_close(*found, rtol=0, atol=0)
    scores = engram.score(model, spooled.data, posterior, tmp_path / "scores", part=7)
    assert abs(scores.loo_nll - float(found[0].mean())) < 1e-12


def test_dicts_with_masks_and_labels(tmp_path: Path) -> None:
    rows = [
        {"inputs": {"ids": torch.arange(5) + n, "mask": torch.ones(5)}, "labels": n % 2}
        for n in range(6)
    ]
    data = engram.spool(iter(rows), tmp_path).data
    assert data["inputs"]["ids"].shape == (6, 5)
    assert torch.equal(data["inputs"]["ids"][3], torch.arange(5) + 3)
    assert data["labels"].tolist() == [0, 1, 0, 1, 0, 1]


def test_a_reading_that_was_interrupted_is_begun_anew(tmp_path: Path) -> None:
    def breaks() -> Iterator[Any]:
        yield torch.zeros(3), 0
        raise ConnectionError("the network is gone")

    with pytest.raises(ConnectionError):
        engram.spool(breaks, tmp_path)
    whole = [(torch.full((3,), float(n)), n) for n in range(4)]
    assert engram.spool(iter(whole), tmp_path).data[1].tolist() == [0, 1, 2, 3]


def test_a_damaged_file_is_told(tmp_path: Path) -> None:
    engram.spool(Stream(), tmp_path)
    file = tmp_path / "0.bin"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(StorageError, match=r"0\.bin has .* bytes.*spool again"):
        engram.spool(Stream(), tmp_path)


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([], "at least one example.*an empty stream"),
        ([(torch.zeros(3), 0), (torch.zeros(4), 0)], r"one form.*\[4\].*example 1.*pad sequences"),
        ([(torch.zeros(3), 0), (torch.zeros(3), 0.5)], "one form.*float.* in example 1"),
        ([torch.zeros(3)], r"examples \(x, y\), or dicts with labels"),
        ([(torch.zeros(3, dtype=torch.complex64), 0)], "real numbers"),
    ],
)
def test_streams_that_are_none(examples: list[Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"(?s){message}"):
        engram.spool(iter(examples), tmp_path)


def test_names_must_tell_examples_apart(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'same' once more, for example 1"):
        engram.spool(Stream(), tmp_path, name=lambda example: "same")


def test_what_cannot_be_read_twice_is_sent_here() -> None:
    loader = DataLoader(Stream(), batch_size=4)
    with pytest.raises(DataError, match=r"no index.*engram\.spool"):
        engram.laplace(nn.Linear(4, 3).double(), loader)


def test_a_stream_itself_is_sent_to_spool() -> None:
    model = torch.nn.Linear(3, 2)
    for source in (Stream(), iter(Stream())):
        with pytest.raises(DataError, match=r"engram\.spool"):
            engram.laplace(model, source, prior_precision=1.0)
