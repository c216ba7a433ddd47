"""Arguments that no call accepts are refused by name, whatever they are."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import engram
from engram.errors import ArgumentError, EngineError, EngramError, NonFiniteError
from engram.retraining.recipes import LBFGS, SGD, Adam, Newton
from retraining_problems import RIDGE, classifier, ridge_fit, ridge_problem


def fit(own, data):
    with torch.no_grad():
        own.weight.copy_(ridge_fit(*data).T)


def run(indices=(0,), train="lbfgs", model=None, **settings):
    given, x, y = ridge_problem()
    return engram.retrain(
        model or given, (x, y), None if "groups" in settings else indices, train=train,
        likelihood=RIDGE, refits=2, progress=False, **settings,
    )  # fmt: skip


@pytest.mark.parametrize(
    "indices",
    [
        [1j], [2**70], "ab", 3, [None], [[1, 2]], {1, 2}, {1: 2}, [[1], [2, 3]], [True], [0.0],
        np.array([1.0]), np.array([True] * 14), np.array([14], dtype=np.uint64),
        np.array([2**64 - 1], dtype=np.uint64), torch.tensor(3), iter([1]),
    ],
    ids=lambda value: f"{type(value).__name__} {value!s:.20}".partition(" object")[0],
)  # fmt: skip
def test_indices(indices):
    with pytest.raises(ArgumentError):
        run(indices)
    with pytest.raises(ArgumentError):
        run(groups=[indices])


@pytest.mark.parametrize(
    "indices", [np.array([3, 1], dtype=np.uint64), [np.int32(3), np.int64(1)], range(3, 0, -2)]
)
def test_whole_numbers_of_any_type_are_indices(indices):
    assert run(indices).indices.tolist() == [3, 1]


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (3, "list of groups"),
        ("ab", "list of groups"),
        ({"1": [1], 1: [2]}, "'1' twice"),
        ({}, "at least one group"),
        ([[]], "at least one index"),
        ({"a": None}, "all 14"),
    ],
    ids=str,
)
def test_groups(groups, words):
    with pytest.raises(ArgumentError, match=words):
        run(groups=groups)


@pytest.mark.parametrize("classes", [1, "01", [0.5], [None], [True], [0, 0], [], [9]], ids=str)
def test_classes(classes):
    model, x, y = classifier()
    with pytest.raises(ArgumentError, match="class"):
        engram.retrain(model, (x, y), classes=classes, progress=False)


@pytest.mark.parametrize("kind", [Newton, LBFGS])
@pytest.mark.parametrize("name", ["relative_gradient", "iterations", "history"])
@pytest.mark.parametrize("value", [0, -1, None, "3", True, math.nan, math.inf], ids=str)
def test_settings_of_recipes_that_converge(kind, name, value):
    with pytest.raises(ArgumentError, match=name):
        kind(**{name: value})


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *((Adam, {name: value}) for name in ("epochs", "batch_size", "learning_rate", "epsilon")
          for value in (0, -1, "3", True, math.nan)),
        *((Adam, {"betas": value}) for value in (0.9, None, (0.9,), (0.9, 1.0), ("a", "b"))),
        *((SGD, {"momentum": value}) for value in (1.0, -0.1, None, "a", math.nan)),
        (Adam, {"epochs": 1.5}), (Adam, {"batch_size": 2.0}), (Adam, {"epochs": None}),
    ],
    ids=str,
)  # fmt: skip
def test_settings_of_recipes_by_time(kind, settings):
    with pytest.raises(ArgumentError):
        kind(**settings)


def test_recipes_take_numbers_of_numpy():
    run(train=Adam(np.float32(0.01), epochs=np.int64(2), batch_size=np.int32(4)))
    run(train=LBFGS(iterations=np.int64(5), history=np.int64(3)))


@pytest.mark.parametrize("folder", [3, b"run", "", "a\0b"], ids=str)
def test_folders(folder):
    with pytest.raises(ArgumentError, match="name of a folder"):
        run(folder=folder)


@pytest.mark.parametrize("train", [lambda: None, lambda own: None, lambda a, b, c: None])
def test_functions_of_another_form(train):
    with pytest.raises(ArgumentError, match=r"fit\(model, data\)"):
        run(train=train)
    model, x, y = ridge_problem()
    with pytest.raises(ArgumentError, match=r"train\(model, prior_precision\)"):
        engram.tune(model, (x, y), train, [1.0, 2.0], likelihood=RIDGE, progress=False)


@pytest.mark.parametrize("train", [None, "newton", nn.Linear, 3, SGD()], ids=str)
def test_tune_wants_a_function(train):
    model, x, y = ridge_problem()
    with pytest.raises(ArgumentError, match="training function"):
        engram.tune(model, (x, y), train, [1.0, 2.0], likelihood=RIDGE, progress=False)


def made_in_inference_mode():
    with torch.inference_mode():
        return nn.Linear(4, 2).double()


MODELS = {
    "none": (None, ArgumentError, "torch.nn.Module; got NoneType"),
    "class": (nn.Linear, ArgumentError, "the class Linear"),
    "function": (lambda x: x, ArgumentError, "got function"),
    "lazy": (nn.LazyLinear(2), EngineError, "lazy layer"),
    "meta": (nn.Linear(4, 2, device="meta"), EngineError, "meta device"),
    "complex": (nn.Linear(4, 2, dtype=torch.complex128), EngineError, "complex numbers"),
    "inference": (made_in_inference_mode(), EngineError, "made under torch.inference_mode"),
}
OTHER_WIDTHS = {
    "wide": (nn.Linear(9, 2).double(), EngineError, "runs on the data; got RuntimeError"),
    "single": (nn.Linear(4, 2), EngineError, "runs on the data; got RuntimeError"),
}


def everything(model):
    given, x, y = ridge_problem()
    data, settings = (x, y), {"likelihood": RIDGE, "progress": False}
    posterior = engram.laplace(given, data, structure="full", prior_precision=1.0, **settings)
    result = engram.sensitivities(given, data, posterior, progress=False)
    return {
        "retrain": lambda: engram.retrain(model, data, [0], **settings),
        "function": lambda: engram.retrain(model, data, [0], train=fit, **settings),
        "verify": lambda: engram.verify(model, data, result, sample=3, progress=False),
        "refine": lambda: engram.refine(model, data, result, posterior, progress=False),
        "assess": lambda: engram.assess(model, data, result, posterior, progress=False),
        "tune": lambda: engram.tune(model, data, fit, [1.0, 2.0], **settings),
        "laplace": lambda: engram.laplace(model, data, prior_precision=1.0, **settings),
    }


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    model, kind, words = MODELS[name]
    for call in everything(model).values():
        with pytest.raises(kind, match=words):
            call()


@pytest.mark.parametrize("name", OTHER_WIDTHS)
def test_models_that_do_not_run_on_the_data(name):
    model, kind, words = OTHER_WIDTHS[name]
    calls = everything(model)
    for function in ("retrain", "function", "verify"):
        with pytest.raises(kind, match=words):
            calls[function]()


@pytest.mark.parametrize("result", [None, "a", nn.Linear(4, 2)], ids=str)
def test_results(result):
    model, x, y = ridge_problem()
    posterior = engram.laplace(
        model, (x, y), likelihood=RIDGE, structure="full", progress=False, prior_precision=1.0
    )
    for call in (
        lambda: engram.verify(model, (x, y), result, sample=3, progress=False),
        lambda: engram.refine(model, (x, y), result, posterior, progress=False),
        lambda: engram.assess(model, (x, y), result, posterior, progress=False),
    ):
        with pytest.raises(ArgumentError, match=r"result of engram\.sensitivities"):
            call()


@pytest.mark.parametrize("train", ["lbfgs", fit], ids=["recipe", "function"])
def test_data_to_evaluate_on(train):
    _, x, y = ridge_problem()
    with pytest.raises(NonFiniteError):
        run(train=train, evaluate_on=(x * math.nan, y))
    with pytest.raises(EngineError, match="a model that runs on"):
        run(train=train, evaluate_on=(x[:, :2], y))
    with pytest.raises(EngramError):
        run(train=train, evaluate_on=(x, y[:, :1]))


def test_data_to_validate_on():
    model, x, y = ridge_problem()

    def train(own, delta):
        own.weight.data.mul_(0.9)

    for held_out, kind in (((x * math.nan, y), NonFiniteError), ((x[:, :2], y), EngineError)):
        with pytest.raises(kind):
            engram.tune(
                model, (x, y), train, [1.0], likelihood=RIDGE, posterior="full",
                validation=held_out, progress=False,
            )  # fmt: skip


def test_one_example_leaves_the_prior():
    model, x, y = ridge_problem()
    truth = engram.retrain(
        model,
        (x[:1], y[:1]),
        train=Newton(relative_gradient=1e-8),
        likelihood=RIDGE,
        progress=False,
    )
    assert torch.allclose(truth.outputs + truth.deviation, torch.zeros(1, 2).double(), atol=1e-6)


def test_calls_inside_inference_mode_are_as_outside():
    model, x, y = ridge_problem()

    def descent(own, data, rate=0.001):
        loss = ((own(data[0]) - data[1]) ** 2).sum()
        gradient = torch.autograd.grad(loss, own.weight)[0]
        own.weight.data.sub_(rate * gradient)

    calls = everything(model)
    settings = {"likelihood": RIDGE, "progress": False}
    calls["function"] = lambda: engram.retrain(model, (x, y), [0], train=descent, **settings)
    calls["tune"] = lambda: engram.tune(
        model, (x, y), lambda own, delta: descent(own, (x, y)), [1.0, 2.0], **settings
    )
    for name, call in calls.items():
        outside = call()
        with torch.inference_mode():
            inside = call()
            assert torch.is_inference_mode_enabled()
        if name in ("retrain", "function", "refine"):
            assert torch.allclose(inside.deviation, outside.deviation, atol=1e-10), name
