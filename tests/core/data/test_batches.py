"""A pass gives every example once and in order, or an error that says what came instead."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import BatchSampler, DataLoader, TensorDataset, default_collate

import engram
from cases import MLP
from engram.core.data.batches import Batches
from engram.errors import DataError, EngramError
from fitted import posterior
from hostile_data import (
    Augmented,
    Backwards,
    Boasting,
    Drifting,
    Fewer,
    More,
    Pairs,
    SomeBroken,
    SwappedBatches,
    averaged,
    backwards,
    doubled,
    loader,
    shuffled,
    without_the_broken,
)
from refusal import Refusal

X, Y = MLP.data
BROKEN = SomeBroken((X, Y), 3)


def functions():
    """Everything that goes over data, by name."""
    fitted = posterior("mlp", "diagonal")
    model, quiet = MLP.model, {"progress": False}
    return {
        "laplace": lambda data: engram.laplace(model, data, prior_precision=1.0, **quiet),
        "sensitivities": lambda data: engram.sensitivities(model, data, fitted, **quiet),
        "calibrate": lambda data: engram.calibrate(model, data, fitted, **quiet),
        "remove": lambda data: engram.remove(model, data, fitted, [0, 1, 2, 3], **quiet),
        "remove_classes": lambda data: engram.remove_classes(model, data, fitted, **quiet),
        "evaluate_on": lambda data: engram.remove(
            model, (X, Y), fitted, [0], evaluate_on=data, **quiet
        ),
        "train": lambda data: engram.influence(model, data, (X, Y), fitted, **quiet),
        "test": lambda data: engram.influence(model, (X, Y), data, fitted, **quiet),
        "variance": lambda data: engram.prediction_variance(model, data, fitted, **quiet),
        "retrain": lambda data: engram.retrain(model, data, [0], train=lambda *_: None, **quiet),
        "retrain evaluation": lambda data: engram.retrain(
            model, (X, Y), [0], train=lambda *_: None, evaluate_on=data, **quiet
        ),
        "recipe": lambda data: engram.retrain(model, data, [0], train="lbfgs", **quiet),
        "tracker": lambda data: engram.Tracker(
            model,
            torch.optim.Adam(model.parameters()),
            data,
            prior_precision=1.0,
            posterior="diagonal",
        ).update(),
    }


FUNCTIONS = pytest.mark.parametrize("function", functions())

CAME = "2 rows .*got 1|none for example 3"
SHORT = {
    "sampler": (loader((X, Y), sampler=Fewer), "5 of 7"),
    "collate_fn": (
        loader(BROKEN, collate_fn=without_the_broken),
        "2 rows .*got 1|none for example 3",
    ),
}


@FUNCTIONS
@pytest.mark.parametrize("way", SHORT)
def test_fewer_examples_than_the_data_set_has(function, way):
    """Else the rows that never came are whatever the memory held before."""
    data, words = SHORT[way]
    with Refusal(DataError, words):
        functions()[function](data)


WRONG = {
    "backwards sampler": loader((X, Y), sampler=Backwards),
    "swapped batches": loader((X, Y), batch_sampler=SwappedBatches),
    "more": loader((X, Y), sampler=More),
    "backwards collate": loader((X, Y), collate_fn=backwards),
    "shuffling collate": loader((X, Y), collate_fn=shuffled, batch_size=7),
    "doubling collate": loader((X, Y), collate_fn=doubled),
    "mixing collate": loader((X, Y), collate_fn=averaged),
    "too long": Boasting(X, Y),
    "loader too long": loader(Boasting(X, Y)),
}


@pytest.mark.parametrize("function", ["sensitivities", "remove", "evaluate_on", "retrain"])
@pytest.mark.parametrize("way", WRONG)
def test_another_order_or_other_rows(function, way):
    with Refusal(DataError, "order|rows|examples"):
        functions()[function](WRONG[way])


@pytest.mark.parametrize("wrap", [lambda d: d, loader])
@pytest.mark.parametrize("function", ["laplace", "sensitivities", "remove", "tracker"])
def test_augmentation_is_named_as_the_cause(function, wrap):
    with Refusal(DataError, "deterministic", "without augmentation"):
        functions()[function](wrap(Augmented(X, Y)))


def test_data_that_changes_from_pass_to_pass():
    batches = Batches(Drifting(X, Y), 3)
    with Refusal(DataError, "changed since the first pass"):
        for _ in range(20):
            list(batches)


def test_training_by_a_function_may_augment():
    """Only estimates need the examples to stay; training has its noise floor."""

    def train(model, data):
        for x, y in DataLoader(data, batch_size=3):
            nn.functional.cross_entropy(model(x), y).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    truth = engram.retrain(MLP.model, Augmented(X, Y), [0], train=train, progress=False)
    assert truth.noise_floor.reseeded > 0


def test_padding_is_not_another_order():
    """A row may be longer in a batch than by itself, at either end."""
    rows = [torch.arange(1.0, n + 2) for n in range(6)]

    def padded(items, side="right"):
        x = nn.utils.rnn.pad_sequence([x for x, _ in items], True, padding_side=side)
        return x, torch.stack([y for _, y in items])

    data = [(row, torch.tensor(n)) for n, row in enumerate(rows)]
    for collate in (padded, lambda items: padded(items, "left")):
        found = list(Batches(DataLoader(data, 4, collate_fn=collate), 1))
        assert [len(batch) for batch in found] == [4, 2]
    with Refusal(DataError, "another row where example 0 belongs"):
        list(Batches(DataLoader(data, 4, collate_fn=lambda items: padded(items[::-1])), 1))


def test_a_collate_fn_that_takes_items_apart_leaves_them_whole():
    data = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]

    def popping(items):
        labels = torch.stack([item.pop("labels") for item in items])
        return default_collate(items) | {"labels": labels}

    batches = Batches(DataLoader(data, 2, collate_fn=popping), 1)
    assert torch.equal(batches.take(torch.arange(7)).targets, Y)
    assert all("labels" in item for item in data)


def test_ragged_data_without_a_collator():
    data = [(torch.randn(n + 4).double(), y) for n, y in enumerate(Y)]
    for given in (data, DataLoader(data, 3)):
        with Refusal(DataError, "one shape", "collate_fn"):
            engram.laplace(MLP.model, given, progress=False, prior_precision=1.0)


class Two(nn.Module):
    """Two inputs, by position or by name."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.left, self.right = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()

    def forward(self, a, b):
        return self.left(a) + self.right(b).tanh()


class Nested(Two):
    """The same with its inputs in a dict in a dict."""

    def forward(self, inputs):
        return super().forward(inputs["parts"]["a"], inputs["parts"]["b"][0])


SHAPES = {
    "tuple": ((X, X.flip(1)), Y),
    "list": [[X, X.flip(1)], Y],
    "dict": ({"a": X, "b": X.flip(1)}, Y),
    "tuple items": Pairs((X, Y), lambda x: (x, x.flip(0))),
    "dict items": Pairs((X, Y), lambda x: {"a": x, "b": x.flip(0)}),
    "tuple loader": loader(Pairs((X, Y), lambda x: (x, x.flip(0)))),
}


def scores(model, data):
    fitted = engram.laplace(
        model, data, structure="full", curvature="ggn", progress=False, prior_precision=1.0
    )
    return engram.sensitivities(model, data, fitted, progress=False).deviation


@pytest.mark.parametrize("shape", SHAPES)
def test_inputs_in_tuples_and_dicts(shape):
    torch.testing.assert_close(scores(Two(), SHAPES[shape]), scores(Two(), (X, X.flip(1), Y)))


def test_nested_inputs():
    nested = {"inputs": {"parts": {"a": X, "b": [X.flip(1)]}}, "labels": Y}
    items = [
        {"inputs": {"parts": {"a": x, "b": [x.flip(0)]}}, "labels": y}
        for x, y in zip(X, Y, strict=True)
    ]
    expected = scores(Two(), (X, X.flip(1), Y))
    for data in (nested, items, DataLoader(items, 3)):
        torch.testing.assert_close(scores(Nested(), data), expected)


def test_nested_tensors_are_left_out_together_by_a_training_function():
    seen = []

    def train(model, data):
        seen.append((data[0]["a"].shape, data[1].shape))
        return model

    data = ({"a": X, "b": X.flip(1)}, Y)
    engram.retrain(Two(), data, [2, 5], train=train, progress=False)
    assert seen[-1] == ((6, 4), (6,))


REFUSED = {
    "nodes": ({"x": torch.randn(17, 4), "labels": Y}, "17", "first dimension|lengths"),
    "packed": ((pack_sequence([X[0], X[1][:2]]), Y[:2]), "packedsequence", "tensors"),
    "text": ([("a", 0), ("b", 1)], "list of str", "tensor"),
    "one number": ((X, torch.tensor(1)), "first dimension|single|lengths", "tensor"),
    "numpy list": ([X.numpy(), Y.numpy()], "list", "tensors"),
    "sparse": ((X.to_sparse(), Y), "sparse", "dense"),
    "string": ("abcdefg", "str", "tensors"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_data_of_no_known_form(name):
    data, *words = REFUSED[name]
    with Refusal(DataError, *words):
        engram.laplace(MLP.model, data, progress=False, prior_precision=1.0)


def test_a_batch_of_nodes_is_named():
    """A collate_fn that puts the nodes of several graphs below each other."""
    graphs = [({"x": torch.randn(n + 2, 4)}, torch.tensor(n % 2)) for n in range(5)]

    def joined(items):
        return {"x": torch.cat([g["x"] for g, _ in items])}, torch.stack([y for _, y in items])

    with Refusal(DataError, "rows at \\['x'\\] for", "graphs"):
        engram.laplace(
            MLP.model, DataLoader(graphs, 3, collate_fn=joined), progress=False, prior_precision=1.0
        )


def test_outputs_of_other_rows_than_examples():
    class Pooled(nn.Linear):
        def forward(self, x):
            return super().forward(x).repeat_interleave(2, 0)

    with Refusal(DataError, "one row of outputs per example", "6 rows for 3"):
        engram.laplace(Pooled(4, 3).double(), (X, Y), progress=False, prior_precision=1.0)


class InPlace(nn.Module):
    """Writes into its input, first by itself and then by a layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.rectify, self.layer = nn.ReLU(inplace=True), nn.Linear(4, 3).double()

    def forward(self, x):
        x.add_(0.3)
        x[:, 0] = x[:, 1]
        return self.layer(self.rectify(x))


class OutOfPlace(InPlace):
    def forward(self, x):
        x = x + 0.3
        x = torch.cat([x[:, 1:2], x[:, 1:]], 1)
        return self.layer(x.relu())


def results(model, data):
    fitted = engram.laplace(model, data, structure="full", progress=False, prior_precision=1.0)
    outcome = engram.remove(model, data, fitted, [1, 4], evaluate_on=data, progress=False)
    truth = engram.retrain(model, data, [3], train="lbfgs", progress=False)
    return [
        engram.sensitivities(model, data, fitted, progress=False).loo_loss,
        outcome.evaluation.loss_without,
        engram.influence(model, data, data, fitted, progress=False),
        truth.deviation,
    ]


@pytest.mark.parametrize("wrap", [lambda *d: d, TensorDataset])
def test_a_model_that_writes_into_its_input(wrap):
    """The caller's tensors stay, and every pass over a batch sees the same."""
    x, y = X.clone(), Y.clone()
    found = results(InPlace(), wrap(x, y))
    assert torch.equal(x, X)
    assert torch.equal(y, Y)
    for got, expected in zip(found, results(OutOfPlace(), (X, Y)), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-8)


class Together(Two):
    """Both inputs as one argument."""

    def forward(self, pair):
        return super().forward(*pair)


def test_inputs_that_the_model_takes_as_one():
    with Refusal(EngramError, "argument of its own", r"model\(a, b\)"):
        engram.laplace(Together(), ((X, X.flip(1)), Y), progress=False, prior_precision=1.0)
    with Refusal(EngramError, "key", "does not know"):
        engram.laplace(Two(), ({"a": X, "b": X, "c": X}, Y), progress=False, prior_precision=1.0)


def test_a_training_function_gets_batches_of_the_users_sampler():
    sizes = []

    def train(model, data):
        sizes.extend(len(x) for x, _ in data)
        return model

    data = loader((X, Y), batch_sampler=type("InOrder", (BatchSampler,), {}))
    engram.retrain(MLP.model, data, [0], train=train, refits=2, progress=False)
    assert set(sizes) == {2, 1}


def test_a_collate_fn_that_draws_random_numbers():
    """As one that masks words at random, or mixes examples with random shares."""

    def noisy(items):
        x, y = default_collate(items)
        return x + torch.rand_like(x), y + torch.rand(len(y))

    with Refusal(DataError, "deterministic", "without augmentation"):
        engram.laplace(
            MLP.model, loader((X, Y), collate_fn=noisy), progress=False, prior_precision=1.0
        )


def test_a_pass_takes_nothing_from_the_loaders_generator():
    """Every iterator draws a seed for its workers, from the user's generator where there is one."""
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    source = DataLoader(TensorDataset(*MLP.data), batch_size=2, generator=generator)
    engram.sensitivities(MLP.model, source, posterior("mlp", "full"), progress=False)
    assert torch.equal(generator.get_state(), before)


def test_persistent_workers_go_on_with_the_callers_pass():
    """They serve one pass at a time: a call in the midst of an epoch would begin it anew."""
    model, fitted = MLP.model, posterior("mlp", "full")
    source = DataLoader(
        TensorDataset(*MLP.data), batch_size=2, num_workers=1, persistent_workers=True
    )
    seen = 0
    for number, (x, _) in enumerate(source):
        seen += len(x)
        if number == 0:
            found = engram.influence(model, source, source, fitted, progress=False)
    assert seen == len(MLP.data[0])
    expected = engram.influence(model, MLP.data, MLP.data, fitted, progress=False)
    torch.testing.assert_close(found, expected)
