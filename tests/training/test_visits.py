"""What the steps of a training say about their examples, against hand-written loops."""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import engram
from engram.errors import (
    ArgumentError,
    DataError,
    LikelihoodError,
    MemoryLimitError,
    ModelMismatchError,
    StorageError,
    TrainingError,
)
from engram.likelihoods import Categorical, Gaussian, from_loss
from engram.training import intervals
from engram.training.record import recorded
from engram.training.visits import Visits

NUM_DATA = 45
GENERATOR = torch.Generator().manual_seed(3)
INPUTS = torch.randn(NUM_DATA, 4, generator=GENERATOR)
LABELS = torch.randint(0, 3, (NUM_DATA,), generator=GENERATOR)


class WithIndex(Dataset[Any]):
    """Examples that tell the loop which they are, so that a hand-written loop can look."""

    def __len__(self) -> int:
        return NUM_DATA

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return INPUTS[index], LABELS[index], index


def net(outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, outputs))


class ByHand:
    """Sums over the visits, in the plainest way."""

    def __init__(self, num_data: int = NUM_DATA, outputs: int = 3) -> None:
        self.count = torch.zeros(num_data)
        self.predictions = torch.zeros(num_data, outputs)
        self.log_probabilities = torch.zeros(num_data, outputs)
        self.losses: list[list[float]] = [[] for _ in range(num_data)]

    def see(self, indices: Tensor, outputs: Tensor, labels: Tensor | None = None) -> None:
        outputs = outputs.detach()
        for row, index in enumerate(indices.tolist()):
            self.count[index] += 1
            self.predictions[index] += outputs.softmax(1)[row]
            self.log_probabilities[index] += outputs.log_softmax(1)[row]
            label = LABELS[index] if labels is None else labels[row]
            self.losses[index].append(float(functional.cross_entropy(outputs[row], label)))


def trained(
    model: nn.Module, loader: Any, by_hand: ByHand, epochs: int = 3, stop: int | None = None
) -> engram.Training:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = engram.record(optimizer, model, loader=loader, checkpoints=0)
    for _ in range(epochs):
        for number, (x, y, index) in enumerate(loader):
            if number == stop:
                break
            optimizer.zero_grad()
            outputs = model(x)
            by_hand.see(index, outputs)
            functional.cross_entropy(outputs, y).backward()
            optimizer.step()
    return training


LOADERS: dict[str, Any] = {
    "shuffled": {"batch_size": 8, "shuffle": True},
    "dropped": {"batch_size": 8, "shuffle": True, "drop_last": True},
    "workers": {"batch_size": 8, "shuffle": True, "num_workers": 2},
    "persistent": {
        "batch_size": 8,
        "shuffle": True,
        "num_workers": 2,
        "persistent_workers": True,
    },
    "batch sampler": {"batch_sampler": BatchSampler(RandomSampler(range(45)), 7, False)},
    "sampler of batches": {
        "batch_size": None,
        "sampler": BatchSampler(RandomSampler(range(45)), 7, False),
        "collate_fn": None,
    },
    "with replacement": {
        "batch_size": 8,
        "sampler": WeightedRandomSampler(torch.rand(45, generator=GENERATOR), 45),
    },
}


def loader_of(name: str) -> DataLoader[Any]:
    data: Any = WithIndex()
    if name == "sampler of batches":
        data = TensorDataset(INPUTS, LABELS, torch.arange(NUM_DATA))
    return DataLoader(data, **LOADERS[name])


@pytest.mark.parametrize("stop", [None, 3])
@pytest.mark.parametrize("name", LOADERS)
def test_a_recorded_loader_names_every_example(name: str, stop: int | None) -> None:
    model, by_hand = net(), ByHand()
    training = trained(model, loader_of(name), by_hand, stop=stop)
    visits = training.visits
    assert visits is not None
    assert visits.num_unmatched == 0
    assert torch.equal(visits.count, by_hand.count.long())
    mean, count = visits.mean_predictions(torch.arange(NUM_DATA))
    seen = by_hand.count > 0
    assert torch.equal(count, by_hand.count.long())
    assert torch.equal(mean[seen], (by_hand.predictions / by_hand.count[:, None])[seen])
    assert mean[~seen].isnan().all()
    means = (by_hand.log_probabilities / by_hand.count[:, None]).gather(1, LABELS[:, None])
    found = visits.prequential(LABELS)
    assert torch.equal(found[seen], -means[seen, 0])
    assert found[~seen].isnan().all()
    by_visit = [losses for losses in by_hand.losses if losses]
    torch.testing.assert_close(
        visits.last_loss(LABELS)[seen], torch.tensor([losses[-1] for losses in by_visit])
    )
    later = torch.tensor([sum(ls[1:]) / len(ls[1:]) if ls[1:] else ls[0] for ls in by_visit])
    torch.testing.assert_close(visits.prequential(LABELS, skip=1)[seen], later)


def test_the_loop_is_what_it_was_and_is_left_so() -> None:
    ends = []
    for listening in (False, True):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(
            WithIndex(), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(4)
        )
        kind, sampler = type(loader), loader.batch_sampler
        training = engram.record(optimizer, model, loader=loader) if listening else None
        assert len(loader) == 6
        assert isinstance(loader, DataLoader)
        for x, y, _ in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        if training is not None:
            training.stop()
        assert type(loader) is kind
        assert loader.batch_sampler is sampler
        assert not model._forward_hooks
        ends.append(model[0].weight.detach().clone())
    assert torch.equal(*ends)


def test_accumulation_closures_and_evaluation_in_between() -> None:
    """Four batches a step; each batch passed twice; epochs broken off; evaluation all the time."""
    model, by_hand = net(), ByHand()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(WithIndex(), batch_size=8, shuffle=True, num_workers=2)
    training = engram.record(optimizer, model, loader=loader)
    for epoch in range(3):
        for number, (x, y, index) in enumerate(loader):
            outputs = model(x)
            by_hand.see(index, outputs)
            functional.cross_entropy(outputs, y).backward()
            model(x)  # of the same batch once more
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
            if number == 2:
                model.eval()
                for x, _, _ in loader:
                    model(x)
                model.train()
                with torch.no_grad():
                    model(INPUTS)
            if number == 4 and epoch == 1:
                break
    assert training.visits is not None
    assert training.visits.num_unmatched == 0
    assert torch.equal(training.visits.count, by_hand.count.long())
    mean, _ = training.visits.mean_predictions(torch.arange(NUM_DATA))
    torch.testing.assert_close(mean, by_hand.predictions / by_hand.count[:, None])


def test_a_loader_that_accelerate_has_prepared() -> None:
    """It hands out, a batch ahead, what a loader inside of it has drawn."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    given = DataLoader(WithIndex(), batch_size=8, shuffle=True)
    model, loader = accelerator.prepare(net(), given)
    by_hand = ByHand()
    training = trained(model, loader, by_hand)
    assert training.visits is not None
    assert training.visits.num_unmatched == 0
    assert torch.equal(training.visits.count, by_hand.count.long())
    mean, _ = training.visits.mean_predictions(torch.arange(NUM_DATA))
    torch.testing.assert_close(mean, by_hand.predictions / by_hand.count[:, None])
    training.stop()
    assert type(loader.base_dataloader) is DataLoader


@pytest.mark.parametrize("skipped", [0, 3])
def test_batches_that_are_gone_over_or_fetched_ahead(skipped: int) -> None:
    """A resumed loop goes over some batches; a prefetching one is a batch ahead of its model."""
    model, by_hand = net(), ByHand()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(WithIndex(), batch_size=8, shuffle=True)
    training = engram.record(optimizer, model, loader=loader)

    def ahead(source: Iterator[Any]) -> Iterator[Any]:
        held = next(source)
        for following in source:
            yield held
            held = following
        yield held

    for _ in range(2):
        batches = iter(loader) if skipped else ahead(iter(loader))
        for number, (x, y, index) in enumerate(batches):
            if number < skipped or (skipped and number == 4):
                continue
            outputs = model(x)
            by_hand.see(index, outputs)
            functional.cross_entropy(outputs, y).backward()
            optimizer.step()
    assert training.visits is not None
    assert torch.equal(training.visits.count, by_hand.count.long())
    mean, _ = training.visits.mean_predictions(torch.arange(NUM_DATA))
    seen = by_hand.count > 0
    torch.testing.assert_close(mean[seen], (by_hand.predictions / by_hand.count[:, None])[seen])


def test_passes_of_other_sizes_are_unmatched() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(WithIndex(), batch_size=8)
    training = engram.record(optimizer, model, loader=loader)
    assert training.visits is None
    model(INPUTS)
    assert training.visits is not None
    assert training.visits.num_unmatched == 1
    assert training.of is not None
    for x, _, _ in loader:
        model(x[:3])
    assert training.visits.num_unmatched == 7
    with pytest.raises(TrainingError, match="none named, 7 forward passes unmatched"):
        training.visits.prequential(LABELS)


@pytest.mark.parametrize("steps", [7, 60, 200])
def test_segments_have_the_visits_of_their_steps(steps: int) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = engram.record(optimizer, model, checkpoints=3)
    kept = []
    for _ in range(steps):
        batch = torch.randperm(NUM_DATA)[:9]
        outputs = model(INPUTS[batch])
        training.visit(batch, outputs)
        kept.append((batch, outputs.detach()))
        optimizer.zero_grad()
        functional.cross_entropy(outputs, LABELS[batch]).backward()
        optimizer.step()
    named = training.of(model)
    assert named.visits is training.visits is not None
    segments = named.segments(3)
    some = torch.tensor([4, 0, 17])
    total = torch.zeros(3).long()
    for segment in segments:
        by_hand = ByHand()
        for batch, outputs in kept[segment.start : segment.end]:
            by_hand.see(batch, outputs)
        assert segment.visits is not None
        mean, count = segment.visits(some)
        assert torch.equal(count, by_hand.count[some].long())
        torch.testing.assert_close(
            mean, (by_hand.predictions / by_hand.count[:, None])[some], equal_nan=True
        )
        losses = torch.tensor([sum(ls) / len(ls) if ls else torch.nan for ls in by_hand.losses])
        found = training.visits.prequential(LABELS, first=segment.start, last=segment.end)
        torch.testing.assert_close(found, losses, equal_nan=True)
        total += count
    assert torch.equal(total, named.visits.count[some])
    assert len(named.visits.sums.intervals) <= 13


def test_sums_are_coarser_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals are merged, then predictions are given up, then it is an error."""
    row = 4 * (1 + 3 + 3)
    for most, intervals_kept, predictions in ((9, 7, True), (4, 2, True), (3, 4, False)):
        visits = Visits(Categorical(), intervals.IntervalSums(max_bytes=most * row * NUM_DATA))
        by_hand = ByHand()
        for step in range(1, 33):
            batch = torch.randperm(NUM_DATA)[:9]
            batch[0] = NUM_DATA - 1
            outputs = torch.randn(9, 3)
            visits.add(batch, outputs)
            by_hand.see(batch, outputs)
            visits.advance(step)
            if step % 2 == 0:
                visits.cut(range(33))
        assert len(visits.sums.intervals) <= intervals_kept
        assert visits.keeps_predictions == predictions
        assert torch.equal(visits.count, by_hand.count.long())
        expected = torch.tensor([sum(ls) / max(1, len(ls)) for ls in by_hand.losses])
        seen = by_hand.count > 0
        torch.testing.assert_close(visits.prequential(LABELS)[seen], expected[seen])
        if not predictions:
            with pytest.raises(TrainingError, match="no memory left"):
                visits.mean_predictions(torch.tensor([0]))
    small = Visits(Categorical(), intervals.IntervalSums(max_bytes=100))
    small.add(torch.arange(20), torch.randn(20, 3))
    with pytest.raises(MemoryLimitError, match="name the targets too"):
        small.settle()


LIKELIHOODS: dict[str, tuple[Any, int, Tensor]] = {
    "categorical": ("categorical", 3, LABELS),
    "smoothed": (Categorical(0.1, [1.0, 2.0, 3.0]), 3, LABELS),
    "soft": ("categorical", 3, torch.rand(NUM_DATA, 3).softmax(1)),
    "bernoulli": ("bernoulli", 1, (LABELS > 0).float()[:, None]),
    "gaussian": (Gaussian(0.3), 2, 1e4 + INPUTS[:, :2]),
    "poisson": ("poisson", 1, LABELS.float()[:, None]),
    "gamma": ("gamma", 1, 1.0 + LABELS.float()[:, None]),
}


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_losses_of_every_likelihood(name: str, told: bool) -> None:
    """The mean loss over visits, from sums over outputs alone or with targets."""
    likelihood, outputs, targets = LIKELIHOODS[name]
    model = net(outputs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    training = engram.record(optimizer, model, likelihood=likelihood)
    used: Any = training.seen.likelihood
    losses = torch.zeros(3, NUM_DATA, dtype=torch.float64)
    for number in range(3):
        order = torch.randperm(NUM_DATA)
        found = model(INPUTS[order]) + (1e4 if name == "gaussian" else 0)
        exact = found.detach().double()
        losses[number, order] = used.loss(exact, used.prepare(exact, targets[order]))
        training.visit(order, found, targets[order] if told else None)
    assert training.visits is not None
    found = training.visits.prequential(None if told else targets)
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if name == "gaussian" and told else {}
    torch.testing.assert_close(
        found.double(), losses.mean(0), **({"rtol": 1e-5, "atol": 1e-5} | tolerance)
    )


def test_a_loss_of_ones_own_has_predictions_and_with_targets_losses() -> None:
    own = from_loss(lambda f, y: (f - y).abs().pow(1.5).sum(1))
    for told in (False, True):
        visits, outputs, targets = Visits(own), torch.randn(5, 2), torch.randn(5, 2)
        visits.add(torch.arange(5), outputs, targets if told else None)
        mean, _ = visits.mean_predictions(torch.arange(5))
        torch.testing.assert_close(mean, own.mean(outputs))
        if told:
            found = visits.prequential()
            torch.testing.assert_close(found, (outputs - targets).abs().pow(1.5).sum(1))
        else:
            with pytest.raises(LikelihoodError, match="name the targets with the visits"):
                visits.prequential(targets)


def test_data_is_read_for_its_targets() -> None:
    visits = Visits(Categorical())
    visits.add(torch.arange(NUM_DATA), torch.randn(NUM_DATA, 3))
    found = visits.prequential(LABELS)
    for data in ((INPUTS, LABELS), TensorDataset(INPUTS, LABELS)):
        assert torch.equal(visits.prequential(data), found)


def test_outputs_that_are_not_finite_are_counted_only() -> None:
    visits, outputs = Visits(Categorical()), torch.zeros(3, 2)
    outputs[1, 0] = torch.nan
    visits.add(torch.tensor([0, 1, 2]), outputs)
    assert visits.count.tolist() == [1, 0, 1]
    assert visits.num_bad == 1


def test_outputs_may_be_changed_afterwards() -> None:
    visits, outputs = Visits(Categorical()), torch.zeros(2, 2)
    visits.add(torch.tensor([0, 1]), outputs)
    outputs += torch.tensor([5.0, 0.0])
    mean, _ = visits.mean_predictions(torch.tensor([0]))
    assert mean.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("way", ["state", "folder"])
def test_visits_are_saved_and_go_on(way: str, tmp_path: Path) -> None:
    whole, by_hand = net(), ByHand()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    training = engram.record(optimizer, whole)

    def steps(training: engram.Training, count: int, seed: int) -> None:
        torch.manual_seed(seed)
        for _ in range(count):
            batch = torch.randperm(NUM_DATA)[:9]
            outputs = whole(INPUTS[batch])
            training.visit(batch, outputs)
            by_hand.see(batch, outputs)
            optimizer.zero_grad()
            functional.cross_entropy(outputs, LABELS[batch]).backward()
            optimizer.step()

    steps(training, 30, 0)
    if way == "folder":
        training.save(tmp_path)
        loaded = engram.load(tmp_path)
    else:
        file = io.BytesIO()
        torch.save(training.state_dict(), file)
        training.stop()
        file.seek(0)
        loaded = engram.record(optimizer, whole)
        loaded.load_state_dict(torch.load(file, weights_only=True))
        steps(loaded, 30, 1)
    assert loaded.visits is not None
    assert torch.equal(loaded.visits.count, by_hand.count.long())
    losses = torch.tensor([sum(ls) / len(ls) for ls in by_hand.losses])
    torch.testing.assert_close(loaded.visits.prequential(LABELS), losses)
    mean, _ = loaded.of(whole).segments(2)[0].visits(torch.tensor([3]))
    assert mean.isfinite().all()


def test_damaged_visits_are_refused() -> None:
    model = net()
    training = engram.record(torch.optim.SGD(model.parameters(), lr=0.1), model)
    training.visit(torch.arange(4), model(INPUTS[:4]))
    state = training.state_dict()
    state["visits"]["sums"]["first"] = torch.zeros(3, 2)
    with pytest.raises(StorageError, match="sums of one shape"):
        training.load_state_dict(state)
    other = engram.record(
        torch.optim.SGD(net(2).parameters(), lr=0.1), likelihood=Categorical(label_smoothing=0.2)
    )
    with pytest.raises(ModelMismatchError, match="smoothing"):
        other.seen.load(training.seen)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


def test_bad_input() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(WithIndex(), batch_size=8)
    with pytest.raises(ArgumentError, match=r"call engram.record\(optimizer, model, loader"):
        engram.record(optimizer, loader=loader)
    for wrong, words in (
        ([1, 2], "the DataLoader of the training; got list"),
        (DataLoader(Endless()), "an IterableDataset"),
        (DataLoader(WithIndex(), num_workers=1, in_order=False), "in_order=False"),
    ):
        with pytest.raises(ArgumentError, match=words):
            engram.record(optimizer, model, loader=wrong)
    with pytest.raises(LikelihoodError, match="one of categorical"):
        engram.record(optimizer, model, likelihood="logistic")
    training = engram.record(optimizer, model, loader=loader)
    other = net()
    with pytest.raises(ArgumentError, match="that no other record listens to"):
        engram.record(torch.optim.SGD(other.parameters(), lr=0.1), other, loader=loader)
    outputs = model(INPUTS[:3])
    for indices, words in (
        ([0, 1], "2 examples"),
        ([[0, 1, 2]], "whole numbers from 0 in one list"),
        ([0, 1, -1], "whole numbers from 0 in one list"),
        ([0.0, 1.0, 2.0], "torch.float32"),
        ("abc", "the indices of a batch"),
    ):
        with pytest.raises((ArgumentError, DataError), match=words):
            training.visit(indices, outputs)  # type: ignore[arg-type]
    training.visit([0, 1, 2], outputs)
    with pytest.raises(ArgumentError, match="visits without targets, as the first one"):
        training.visit([0, 1, 2], outputs, LABELS[:3])
    with pytest.raises(DataError, match="3 outputs for every example"):
        training.visit([0, 1, 2], outputs[:, :2])
    assert training.visits is not None
    with pytest.raises(ArgumentError, match=r"pass prequential\(data\)"):
        training.visits.prequential()
    with pytest.raises(DataError, match="targets of the 45 examples"):
        training.visits.prequential(LABELS[:7])
    with pytest.raises(ArgumentError, match="either skip=1"):
        training.visits.prequential(LABELS, skip=1, first=3)
    training.stop()
    with pytest.raises(TrainingError, match="stopped, loaded or guessed"):
        training.visit([0], outputs[:1])
    with pytest.raises(LikelihoodError, match='likelihood="bernoulli"'):
        Visits(Categorical()).add(torch.tensor([0]), torch.zeros(1, 1))


def test_a_recorded_loader_notes_the_order_before_the_pass() -> None:
    """What a replay needs: the batches, and the random state with which each was passed."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(WithIndex(), batch_size=8, shuffle=True)
    training = engram.record(optimizer, model, loader=loader, replay=True)
    told, states = [], []
    for x, y, index in loader:
        told.append(index)
        states.append(torch.get_rng_state())
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert training.order is not None
    assert [part.indices.tolist() for part in training.order.parts] == [i.tolist() for i in told]
    first = training.order.parts[0].random_state
    assert first is not None
    assert torch.equal(first, states[0])


def test_a_record_goes_with_its_optimizer() -> None:
    """The list of records keeps neither optimizers nor models alive."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engram.record(optimizer, model)
    assert recorded(optimizer) is not None
    gone = weakref.ref(optimizer)
    del optimizer, model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("named", ["loader", "notes"])
@pytest.mark.parametrize("count", [1, NUM_DATA - 1, 2 * NUM_DATA])
def test_data_of_another_number_of_examples_are_not_those_of_the_record(named, count):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(INPUTS, LABELS), 9)
    kind = {"loader": loader} if named == "loader" else {"replay": True}
    training = engram.record(optimizer, model, **kind)
    for rows, (x, y) in zip(torch.arange(NUM_DATA).split(9), loader, strict=True):
        training.note(rows)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    training.stop()
    assert training.num_named == NUM_DATA
    engram.laplace(model, (INPUTS, LABELS), training=training, progress=False)
    others = torch.arange(count) % NUM_DATA
    words = f"the data of the recorded training, 45 examples; got {count}"
    with pytest.raises(DataError, match=words):
        engram.laplace(model, (INPUTS[others], LABELS[others]), training=training, progress=False)
