"""Ctrl-C at any moment leaves process, model and data as they were, and a folder to go on with."""

import multiprocessing
import signal
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import engram
from engram.errors import TrainingError
from interrupting import condition, moments, surroundings, watched
from retraining_problems import RIDGE, classifier, ridge_fit, ridge_problem


@pytest.fixture(autouse=True)
def interrupted_as_in_a_terminal():
    """Processes that run tests side by side ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def fit(own, data):
    torch.set_num_threads(1)
    with torch.no_grad():
        own.weight.copy_(ridge_fit(*data).T)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("train", ["newton", "adam", fit], ids=["newton", "adam", "function"])
def test_a_single_interrupt_anywhere(train):
    model, x, y = ridge_problem(6)
    recipe = engram.recipes.Adam(epochs=2) if train == "adam" else train

    def call():
        engram.retrain(model, (x, y), [0], train=recipe, likelihood=RIDGE, refits=2, progress=False)

    before, weights = surroundings(), condition(model)
    came_out = []
    for moment in moments(call, 12, 12):
        came_out.append(watched(call, moment)[1])  # Python drops one that ends a generator
        assert surroundings() == before, moment
        assert condition(model) == weights, moment
    assert sum(came_out) > 0.8 * len(came_out)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_single_interrupt_of_trainings_on_subsets(workers):
    model, x, y = ridge_problem(6)

    def call():
        engram.retrain(
            lambda: model, (x, y), train=fit, likelihood=RIDGE, subsets=4, keep=0.5,
            workers=workers, progress=False,
        )  # fmt: skip

    before, weights = surroundings(), condition(model)
    for moment in moments(call, 12, 12):
        with suppress(TrainingError):  # it came in a forked process, which goes on counting
            watched(call, moment)
        assert surroundings() == before, moment
        assert condition(model) == weights, moment
        assert multiprocessing.active_children() == [], moment


class Interrupting(Dataset):
    def __init__(self, x, y, at):
        self.x, self.y, self.left = x, y, at

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGINT)
        return self.x[index], self.y[index]


@pytest.mark.parametrize("at", [1, 40, 100])
def test_a_signal_while_the_data_is_read(at):
    model, x, y = classifier()
    before, weights = surroundings(), condition(model)
    with pytest.raises(KeyboardInterrupt):
        engram.retrain(model, Interrupting(x, y, at), [0], progress=False)
    assert surroundings() == before
    assert condition(model) == weights


class InForward(nn.Module):
    def __init__(self, inner, at):
        super().__init__()
        self.inner, self.count = inner, [at]

    def forward(self, x):
        self.count[0] -= 1
        if self.count[0] == 0:
            signal.raise_signal(signal.SIGINT)
        return self.inner(x)

    def __deepcopy__(self, memo):
        copied = InForward(nn.Sequential(*self.inner), 0)
        copied.load_state_dict(self.state_dict())
        copied.count = self.count
        return copied


@pytest.mark.parametrize("at", [1, 2, 5, 9, 14])
def test_a_signal_while_the_model_runs(at):
    inner, x, y = classifier()
    model = InForward(inner, at)
    before, weights = surroundings(), condition(model)
    with pytest.raises(KeyboardInterrupt):
        engram.retrain(model, (x, y), [0, 1], train="lbfgs", progress=False)
    assert surroundings() == before
    assert condition(model) == weights


def test_a_signal_while_a_function_trains(tmp_path):
    model, x, y = ridge_problem()
    calls = []

    def training(own, data):
        with torch.no_grad():
            torch.set_default_dtype(torch.float16)
            torch.use_deterministic_algorithms(True)
            np.random.seed(5)
            calls.append(1)
            own.weight.copy_(ridge_fit(*data).T)
            if len(calls) == 5:
                signal.raise_signal(signal.SIGINT)

    def run():
        return engram.retrain(
            model, (x, y), [0, 1, 2], train=training, likelihood=RIDGE, folder=tmp_path,
            refits=2, progress=False,
        )  # fmt: skip

    before, weights = surroundings(), condition(model)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert surroundings() == before
    assert condition(model) == weights
    calls.clear()
    run()
    assert len(calls) == 1  # two copies were finished and are read
    assert surroundings() == before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", ["refine", "verify", "assess"])
def test_a_single_interrupt_of_what_follows_a_result(name):
    model, x, y = ridge_problem(6)
    settings = {"likelihood": RIDGE, "progress": False}
    posterior = engram.laplace(model, (x, y), structure="full", prior_precision=1.0, **settings)
    result = engram.sensitivities(model, (x, y), posterior, progress=False)
    model.train()
    call = {
        "refine": lambda: engram.refine(
            model, (x, y), result, posterior, indices=[0], progress=False
        ),
        "verify": lambda: engram.verify(model, (x, y), result, sample=3, refits=2, progress=False),
        "assess": lambda: engram.assess(
            model, (x, y), result, posterior, sample=3, iterations=1, progress=False
        ),
    }[name]
    before, weights = surroundings(), condition(model)
    for moment in moments(call, 4, 4):
        watched(call, moment)
        assert surroundings() == before, moment
        assert condition(model) == weights, moment
