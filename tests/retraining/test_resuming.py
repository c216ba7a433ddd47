"""A folder is gone on with only where everything that decides the result is the same."""

import functools
import importlib
import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import engram
from engram.core.identity.description import Description
from engram.errors import RunFolderError
from engram.likelihoods import from_loss
from engram.retraining.recipes import LBFGS, Newton
from retraining_problems import RIDGE, ridge_fit, ridge_problem

SOURCE = Path(__file__).parent.parent.parent / "src"
SCALE = 1.0
CONFIG = types.SimpleNamespace(scale=1.0)


def run(folder, train="lbfgs", model=None, data=None, likelihood=RIDGE, **settings):
    own, x, y = ridge_problem(8)
    return engram.retrain(
        model or own, (x, y) if data is None else data, [0, 1], train=train,
        likelihood=likelihood, folder=folder, refits=2, progress=False, **settings,
    )  # fmt: skip


def set_weights(own, data, scale):
    x, y = data if isinstance(data, tuple) else data.dataset.dataset.tensors
    with torch.no_grad():
        own.weight.copy_(scale * ridge_fit(x, y).T)


def with_constant(text):
    space = {"set_weights": set_weights, "__name__": "__main__"}
    exec(f"def fit(own, data):\n    set_weights(own, data, {text})", space)
    return space["fit"]


def with_global(scale):
    def fit(own, data):
        set_weights(own, data, SCALE)

    return types.FunctionType(
        fit.__code__, {"set_weights": set_weights, "SCALE": scale, "__name__": "own"}, "fit"
    )


def with_closure(scale):
    def fit(own, data):
        set_weights(own, data, scale)

    return fit


def with_tensor(scale):
    return with_closure(torch.tensor(scale))


def with_array(scale):
    return with_closure(np.array([scale])[0])


def with_default(scale):
    def fit(own, data, scale=scale):
        set_weights(own, data, scale)

    return fit


def with_keyword(scale):
    def fit(own, data, *, scale=scale):
        set_weights(own, data, scale)

    return fit


def with_partial(scale):
    def fit(scale, own, data):
        set_weights(own, data, scale)

    return functools.partial(fit, scale)


def with_inner(scale):
    def inner():
        return scale

    def fit(own, data):
        set_weights(own, data, (lambda: inner())())

    return fit


def with_nested_code(scale):
    inner = "0.5" if scale == 1.0 else "2.0"
    space = {"set_weights": set_weights, "__name__": "__main__"}
    exec(f"def fit(own, data):\n    set_weights(own, data, (lambda: {inner})())", space)
    return space["fit"]


def decorated(scale):
    return torch.no_grad()(with_closure(scale))


class Trainer:
    def __init__(self, scale):
        self.scale = scale

    def fit(self, own, data):
        set_weights(own, data, self.scale)

    def __call__(self, own, data):
        self.fit(own, data)


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale):
        self.scale = scale

    def __call__(self, own, data):
        set_weights(own, data, self.scale)


def with_class(scale):
    made = type("Made", (), {"scale": scale})

    def fit(own, data):
        set_weights(own, data, made.scale)

    return fit


def with_module(scale):
    module = types.ModuleType("own_settings")
    module.inner = types.ModuleType("own_settings.inner")
    module.inner.scale = scale

    def fit(own, data):
        set_weights(own, data, module.inner.scale)

    return fit


def with_import(scale):
    module = types.ModuleType("own_imported")
    module.scale = scale
    sys.modules["own_imported"] = module

    def fit(own, data):
        from own_imported import scale

        set_weights(own, data, scale)

    return fit


WAYS = {
    "constant": lambda scale: with_constant(repr(scale)),
    "code": lambda scale: with_constant("1.0" if scale == 1.0 else "1.0 + 1.0"),
    "global": with_global,
    "closure": with_closure,
    "tensor": with_tensor,
    "array": with_array,
    "default": with_default,
    "keyword": with_keyword,
    "partial": with_partial,
    "function it calls": with_inner,
    "code inside": with_nested_code,
    "decorated": decorated,
    "method": lambda scale: Trainer(scale).fit,
    "callable": Trainer,
    "slots": Slotted,
    "class": with_class,
    "namespace": lambda scale: with_closure(types.SimpleNamespace(scale=scale).scale),
    "module": with_module,
    "import": with_import,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_training_function_that_changed_is_another(tmp_path, way):
    run(tmp_path, WAYS[way](1.0))
    run(tmp_path, WAYS[way](1.0))  # made anew, and the same
    with pytest.raises(RunFolderError, match=r"code.* differ"):
        run(tmp_path, WAYS[way](2.0))


@pytest.mark.parametrize(
    ("way", "name"), [("global", "SCALE"), ("closure", "scale"), ("module", "module.inner.scale")]
)
def test_the_error_names_what_a_function_refers_to_otherwise(tmp_path, way, name):
    run(tmp_path, WAYS[way](1.0))
    with pytest.raises(RunFolderError, match=rf"where code, train\.{name} differ\b"):
        run(tmp_path, WAYS[way](2.0))


def leaky(slope):
    model = nn.Sequential(nn.Linear(4, 2, bias=False), nn.LeakyReLU(slope)).double()
    nn.init.constant_(model[0].weight, 0.1)
    return model


class Scaled(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.inner = nn.Linear(4, 2, bias=False).double()
        nn.init.constant_(self.inner.weight, 0.1)
        vars(self).update(settings)

    def forward(self, x):
        return self.scale * self.inner(x)


class Otherwise(Scaled):
    def forward(self, x):
        return self.inner(x) * 3.0


def hooked(scale):
    model = leaky(0.1)
    model.register_forward_hook(lambda module, inputs, outputs: scale * outputs)
    return model


def buffered(scale):
    model = Scaled()
    model.register_buffer("scale", torch.tensor(scale), persistent=False)
    return model


def tied(shared):
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False).double() for _ in range(2)))
    first = nn.Linear(4, 2, bias=False).double()
    for layer in (*model, first):
        nn.init.constant_(layer.weight, 0.1)
    if shared:
        model[1].weight = model[0].weight
    return nn.Sequential(first, *model)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (lambda: leaky(0.01), lambda: leaky(0.9)),
        (lambda: Scaled(scale=1.0), lambda: Scaled(scale=2.0)),
        (lambda: Scaled(scale=1.0), lambda: Otherwise(scale=1.0)),
        (lambda: buffered(1.0), lambda: buffered(2.0)),
        (lambda: hooked(1.0), lambda: hooked(2.0)),
        (lambda: tied(True), lambda: tied(False)),
    ],
    ids=["LeakyReLU", "attribute", "forward", "buffer", "hook", "tied weights"],
)
def test_a_model_that_computes_otherwise_is_another(tmp_path, before, after):
    run(tmp_path, model=before())
    run(tmp_path, model=before())
    with pytest.raises(RunFolderError, match="model differs"):
        run(tmp_path, model=after())


def squared(scale):
    return from_loss(lambda f, y: scale * 0.5 * ((f - y) ** 2).sum(1))


def test_a_loss_that_changed_is_another(tmp_path):
    run(tmp_path, likelihood=squared(1.0))
    run(tmp_path, likelihood=squared(1.0))
    with pytest.raises(RunFolderError, match="loss differs"):
        run(tmp_path, likelihood=squared(2.0))


def test_a_recipe_with_another_posterior_is_another(tmp_path):
    model, x, y = ridge_problem(8)
    one, other = (
        engram.laplace(
            model,
            (x + shift, y),
            likelihood=RIDGE,
            structure="full",
            progress=False,
            prior_precision=1.0,
        )
        for shift in (0.0, 1.0)
    )
    run(tmp_path, train=Newton(posterior=one))
    with pytest.raises(RunFolderError, match="code differs"):
        run(tmp_path, train=Newton(posterior=other))
    with pytest.raises(RunFolderError, match="train, code differ"):
        run(tmp_path, train=LBFGS())


class Read(Dataset):
    """Examples made one by one, as from files."""

    def __init__(self, x, y):
        self.read = lambda i: (x[i], y[i])
        self.count = len(x)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.read(index)


@pytest.mark.parametrize("kind", [TensorDataset, Read, lambda *xy: DataLoader(Read(*xy))])
def test_one_label_of_a_large_data_set_is_seen(tmp_path, kind):
    model, x, y = ridge_problem(600)
    run(tmp_path, "lbfgs", data=kind(x, y), model=model)
    run(tmp_path, "lbfgs", data=kind(x, y.clone()), model=model)
    y[301] += 1.0
    with pytest.raises(RunFolderError, match="data differs"):
        run(tmp_path, "lbfgs", data=kind(x, y), model=model)


class Opaque:
    """Nobody can say what is inside."""

    def __reduce_ex__(self, protocol):
        raise TypeError("cannot be copied")

    def scale(self):
        return 1.0


def test_what_cannot_be_seen_is_named_and_needs_the_users_word(tmp_path):
    inside = Opaque()

    def fit(own, data):
        set_weights(own, data, inside.scale())

    with pytest.warns(UserWarning, match=r"trust_folder=True.*train\.inside .*Opaque"):
        first = run(tmp_path, fit)
    with pytest.raises(RunFolderError, match=r"cannot be seen: train\.inside .*trust_folder=True"):
        run(tmp_path, fit)
    again = run(tmp_path, fit, trust_folder=True)
    assert torch.equal(first.deviation, again.deviation)


def test_trust_is_no_word_for_what_is_seen_to_differ(tmp_path):
    run(tmp_path, with_closure(1.0))
    with pytest.raises(RunFolderError, match=r"train\.scale differ"):
        run(tmp_path, with_closure(2.0), trust_folder=True)


def test_examples_that_differ_each_time_cannot_be_seen(tmp_path):
    _, x, y = ridge_problem(8)
    generator = np.random.default_rng(0)

    class Noisy(Read):
        def __getitem__(self, index):
            return x[index] + float(generator.normal()), y[index]

    def fit(own, data):
        own.weight.data.mul_(0.9)

    with pytest.warns(UserWarning, match="data .examples that differ each time"):
        run(tmp_path, fit, data=Noisy(x, y))
    with pytest.raises(RunFolderError, match="examples that differ each time"):
        run(tmp_path, fit, data=Noisy(x, y))


def test_several_processes_need_the_users_word_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RunFolderError, match="trust_folder=True"):
        run(tmp_path, with_closure(open(os.devnull)))  # noqa: SIM115


def test_nothing_is_unseen_of_what_training_code_commonly_holds():
    import logging

    log, lock, device = logging.getLogger("own"), threading.Lock(), torch.device("cpu")
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(2))])
    loader = DataLoader(TensorDataset(torch.zeros(3, 2)), shuffle=True)
    things = [
        log, lock, device, optimizer, loader, torch.float32, np.float64(0.5), np.sin, torch.relu,
        nn.LSTM(2, 3), nn.functional.relu, torch.optim.SGD, Path("x"), range(3), slice(1),
        {"a", "b"}, np.random.default_rng(0), torch.Generator(), functools.lru_cache(with_closure),
        nn.CrossEntropyLoss(weight=torch.ones(3)), torch.optim.lr_scheduler.StepLR(optimizer, 3),
        str.join, "x".join, [1].append, Trainer, type("Empty", (), {}), nn.TransformerEncoderLayer(
            4, 2
        ),
    ]  # fmt: skip
    for thing in things:
        described = Description()
        described.of(thing, "thing")
        assert described.unseen == [], thing


def by_globals(own, data):
    set_weights(own, data, globals()["SCALE"])


def by_eval(own, data):
    set_weights(own, data, eval("SCALE"))


def by_import(own, data):
    set_weights(own, data, importlib.import_module("math").pi)


@pytest.mark.parametrize("function", [by_globals, by_eval, by_import])
def test_what_is_found_by_name_cannot_be_seen(function):
    described = Description()
    described.of(function, "train")
    assert len(described.unseen) == 1
    assert "by name" in described.unseen[0]


def test_a_circle_has_an_end():
    def circle(value):
        made = [value]
        made.append(made)
        return Description().of(made, "x")

    assert circle(1) == circle(1) != circle(2)


SCRIPT = """
import sys
import torch
from torch import nn
from engram.core.identity.description import Description

class Settings:
    names = {"alpha", "beta", "gamma", "delta"}
    def __init__(self):
        self.table = {k: object for k in sorted(self.names)}

settings, near = Settings(), frozenset("abcdefgh")

def fit(model, data, rate=0.1):
    inner = lambda x: x in near or x in {"u", "v", "w"}
    return inner(settings), nn.functional.relu, torch.optim.Adam

described = Description()
model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), nn.LSTM(2, 2))
for p in model.parameters():
    nn.init.constant_(p, 0.5)
print(described.of(fit, "f"), described.of(model, "m"), described.unseen)
"""


def test_digests_are_the_same_in_another_process(tmp_path):
    found = set()
    for seed in ("1", "2"):
        script = tmp_path / seed / f"script{seed}.py"
        script.parent.mkdir()
        script.write_text(SCRIPT)
        environment = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, script], env=environment, capture_output=True, text=True, check=True
        )
        found.add(done.stdout)
    assert len(found) == 1
    assert found.pop().endswith(" []\n")
