"""Every public function with models and data that cannot be: a typed error, or a finite answer.

Whatever happens, a proper model and its data are as before.
"""

import math
from functools import cache

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import engram
from engram.errors import EngramError
from refusal import Refusal
from snapshot import differences, snapshot

QUIET = {"progress": False}
torch.manual_seed(0)
X, Y = torch.randn(9, 4).double(), torch.arange(9) % 3
MODEL = nn.Linear(4, 3).double()


@cache
def fitted():
    posterior = engram.laplace(
        MODEL, (X, Y), structure="full", curvature="ggn", prior_precision=1.0, **QUIET
    )
    return posterior, engram.sensitivities(MODEL, (X, Y), posterior, **QUIET)


def nothing(model, data):
    return model


def tracker(model, **given):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"posterior": "diagonal", "prior_precision": 1.0}
    return engram.Tracker(model, optimizer, **settings, **given).update().loo_loss


def functions(model, data):
    """Everything that takes a model or data."""
    posterior, result = fitted()
    own, here = (MODEL, (X, Y)), (model, data)
    return {
        "laplace": lambda: engram.laplace(*here, prior_precision=1.0, **QUIET),
        "kronecker": lambda: engram.laplace(
            *here, prior_precision=1.0, structure="kronecker", **QUIET
        ),
        "hessian": lambda: engram.laplace(
            *here, prior_precision=1.0, structure="full", curvature="hessian", **QUIET
        ),
        "sensitivities": lambda: engram.sensitivities(*here, posterior, **QUIET).targets,
        "remove": lambda: engram.remove(*here, posterior, [0], **QUIET).group.loss_without,
        "evaluate_on": lambda: engram.remove(*own, posterior, [0], evaluate_on=data, **QUIET),
        "classes": lambda: engram.remove_classes(*here, posterior, **QUIET),
        "train": lambda: engram.influence(*here, (X, Y), posterior, **QUIET),
        "test": lambda: engram.influence(*own, data, posterior, **QUIET),
        "variance": lambda: engram.prediction_variance(*here, posterior, **QUIET),
        "calibrate": lambda: engram.calibrate(*here, posterior, **QUIET),
        "assess": lambda: engram.assess(*here, result, posterior, **QUIET),
        "refine": lambda: engram.refine(*here, result, posterior, **QUIET).loo_loss,
        "recipe": lambda: engram.retrain(*here, [0], train="lbfgs", **QUIET).loo_loss,
        "newton": lambda: engram.retrain(*here, [0], **QUIET).loo_loss,
        "function": lambda: engram.retrain(*here, [0], train=nothing, **QUIET).loo_loss,
        "retrain": lambda: (
            engram.retrain(*own, [0], train="lbfgs", evaluate_on=data, **QUIET).loo_loss
        ),
        "validation": lambda: tracker(MODEL, data=(X, Y), validation=data),
        "tune": lambda: engram.tune(*here, lambda model, delta: None, [1.0], **QUIET),
    }


class Mixed(nn.Module):
    """A net in single precision with a head in double."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3).double()

    def forward(self, x):
        return self.head(self.body(x.float()).tanh().double())


class Counted(Dataset):
    """Says any length."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return X[index], Y[index]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


with torch.inference_mode():
    UNDIFFERENTIABLE = nn.Linear(4, 3).double()
    INFERRED = X.clone(), Y.clone()

WIDE = nn.Sequential(nn.Linear(4, 1500), nn.Tanh(), nn.Linear(1500, 3)).double()
MODELS = {
    "mixed": (Mixed(), "float32 in 'body.weight'"),
    "inference": (UNDIFFERENTIABLE, "inference_mode"),
    "nothing": (None, "nonetype"),
    "function": (torch.tanh, "module"),
    "class": (nn.Linear, "class linear"),
    "lazy": (nn.LazyLinear(3), "lazy"),
    "meta": (nn.Linear(4, 3, device="meta"), "meta device"),
    "other width": (nn.Linear(5, 3).double(), "shapes|model|sizes"),
    "other width, many parameters": (WIDE[1:], "shapes|model|sizes"),
}
DATA = {
    "other width": (torch.randn(9, 5).double(), Y),
    "single precision": (X.float(), Y),
    "whole numbers": (torch.ones(9, 4).long(), Y),
    "complex": (X.to(torch.complex128), Y),
    "NaN": (X * math.nan, Y),
    "NaN targets": (X, Y * math.nan),
    "negative targets": (X, Y - 5),
    "classes too high": (X, Y + 100),
    "overflowing": (X * 1e300, Y),
    "a number": 3,
    "text": "abc",
    "inputs alone": X,
    "nothing in a tuple": (),
    "nothing in a list": [],
    "nothing in a dict": {},
    "arrays": (X.numpy(), Y.numpy()),
    "lists": (X.tolist(), Y.tolist()),
    "pairs of lists": [([0.0, 0, 0, 0], 1)] * 9,
    "a generator": (pair for pair in zip(X, Y, strict=True)),
    "a stream": DataLoader(Stream(), batch_size=2),
    "single items": DataLoader(TensorDataset(X, Y), batch_size=None),
    "other names": {"x": X, "y": Y},
    "one input too many": (X, X, Y),
    "a single target": (X, torch.tensor(1)),
    "negative length": Counted(-1),
    "a length in words": Counted("nine"),
    "too long": Counted(11),
    "one example": (X[:1], Y[:1]),
    "inference": INFERRED,
    "with gradients": (X.clone().requires_grad_(), Y),
}


def outcome(call):
    """The error, or None after a finite answer."""
    try:
        found = call()
    except EngramError as error:
        return error
    if isinstance(found, torch.Tensor):
        assert torch.isfinite(found).all()
    return None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DATA)
def test_hostile_data(name):
    fitted()
    before, rows = snapshot(MODEL), [X.clone(), Y.clone()]
    for call in functions(MODEL, DATA[name]).values():
        outcome(call)
    assert differences(before, snapshot(MODEL)) == []
    assert torch.equal(X, rows[0])
    assert torch.equal(Y, rows[1])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_hostile_models(name):
    """Every function refuses them, and the first one by the true cause."""
    model, words = MODELS[name]
    takes_model = functions(model, (X, Y))
    for own in ("evaluate_on", "test", "retrain", "validation"):
        del takes_model[own]
    if name in ("mixed", "inference"):
        del takes_model["function"], takes_model["tune"]  # the user's own training may do
    for call in takes_model.values():
        assert outcome(call) is not None
    with Refusal(EngramError, words):
        engram.laplace(model, (X, Y), prior_precision=1.0, **QUIET)


@pytest.mark.parametrize("function", ["evaluate_on", "test", "retrain", "validation", "variance"])
def test_other_data_of_another_width(function):
    wide = torch.randn(9, 5).double(), Y
    with Refusal(EngramError, "mat1|shape|size"):
        functions(MODEL, wide)[function]()


@pytest.mark.parametrize(
    "function", ["kronecker", "hessian", "sensitivities", "calibrate", "newton"]
)
def test_data_of_inference_mode_are_as_any_other(function):
    found, expected = (functions(MODEL, data)[function]() for data in (INFERRED, (X, Y)))
    if isinstance(found, torch.Tensor):
        torch.testing.assert_close(found, expected)


def test_calls_within_inference_mode():
    """Gradients are taken there too."""
    with torch.inference_mode():
        posterior = engram.laplace(
            MODEL, (X, Y), structure="full", curvature="ggn", prior_precision=1.0, **QUIET
        )
        found = engram.sensitivities(MODEL, (X, Y), posterior, **QUIET)
    torch.testing.assert_close(found.loo_loss.clone(), fitted()[1].loo_loss)
