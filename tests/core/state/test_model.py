"""Modes that do more than set a flag, buffers, and what hangs on the process."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import engram
from autograd_deviation import expected_deviation
from engram.core.state.model import state_preserved
from engram.core.state.modes_and_buffers import Modes
from engram.core.state.process import kept_surroundings, of_the_thread, restored
from fitted import assert_close
from interrupting import surroundings
from snapshot import differences, snapshot

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(7, 4, generator=GENERATOR, dtype=torch.float64)
Y = torch.arange(7) % 3


class LowRank(nn.Linear):
    """An update of a frozen weight, merged into it by eval() as loralib does."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.weight.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, inputs))
        self.up = nn.Parameter(torch.randn(outputs, 2))
        self.drop = nn.Dropout(0.3)
        self.merged = False

    def train(self, mode=True):
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (-1 if mode else 1) * (self.up.data @ self.down.data)
            self.merged = not mode
        return self

    def forward(self, x):
        plain = F.linear(x, self.weight, self.bias)
        return plain if self.merged else plain + self.drop(x) @ self.down.T @ self.up.T


class KeepsNormalisation(nn.Sequential):
    """Trains all but its batch normalisation."""

    def train(self, mode=True):
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.training = False
        return self


def adapted():
    torch.manual_seed(0)
    return KeepsNormalisation(
        LowRank(4, 5), nn.BatchNorm1d(5), nn.Sequential(nn.Tanh(), LowRank(5, 3))
    ).double()


def fit(model):
    return engram.laplace(model, (X, Y), structure="diagonal", progress=False, prior_precision=1.0)


def estimate(model, fitted):
    return engram.sensitivities(model, (X, Y), fitted, estimator="linear", progress=False)


def unmerged(model):
    """In eval mode, with its updates beside the weights."""
    model.eval()
    for module in model.modules():
        if isinstance(module, LowRank):
            module.train()
            module.drop.eval()
    return model


def mixed(model):
    model.train()
    model[0].eval()
    return model


MODES = {"train": lambda m: m.train(), "eval": lambda m: m.eval(), "mixed": mixed}


@pytest.mark.parametrize("mode", MODES)
def test_an_update_that_eval_merges_counts(mode):
    model = MODES[mode](adapted())
    fitted = fit(model)
    result = estimate(model, fitted)
    assert set(result.coverage.values()) == {"frozen", "rule", "copies"}
    reference = unmerged(adapted())
    assert_close(result.deviation, expected_deviation(reference, X, Y, fitted), 1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_merged_or_not_it_is_as_before_bit_by_bit(mode):
    model = MODES[mode](adapted())
    before = snapshot(model)
    flags = [module.merged for module in model.modules() if isinstance(module, LowRank)]
    fitted = fit(model)
    estimate(model, fitted)
    engram.remove(model, (X, Y), fitted, [0, 1], progress=False)
    assert differences(before, snapshot(model)) == []
    assert flags == [m.merged for m in model.modules() if isinstance(m, LowRank)]


class Counting(nn.Module):
    """Counts its calls in a buffer, whatever the mode, and makes another one when first called."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.ones(3, dtype=x.dtype))
        return self.layer(x) * self.scale


def test_buffers_are_as_before():
    model = Counting().double()
    before = snapshot(model)
    estimate(model, fit(model))
    assert differences(before, snapshot(model)) == []
    assert list(dict(model.named_buffers())) == ["calls"]


class Raising(nn.Linear):
    """Fails when it is put into train mode the second time."""

    times = 0

    def train(self, mode=True):
        Raising.times += 1
        if Raising.times > 1:
            raise RuntimeError("no more switching")
        return super().train(mode)


def test_a_mode_that_cannot_be_restored_leaves_the_rest_as_before():
    Raising.times = 0
    model = Raising(4, 3).double()
    before = surroundings()
    with pytest.raises(RuntimeError, match="no more switching"):
        fit(model)
    assert surroundings() == before


def attention():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 3)).double()


TOKENS = torch.randn(9, 3, 4, generator=GENERATOR, dtype=torch.float64)


def deviation_of(model):
    data = (TOKENS, torch.arange(9) % 3)
    fitted = engram.laplace(model, data, structure="diagonal", progress=False, prior_precision=1.0)
    return engram.sensitivities(
        model, data, fitted, estimator="linear", batch_size=1, progress=False
    ).deviation


@pytest.mark.parametrize("shared", [True, False])
def test_threads_give_the_answer_of_one(shared):
    """On one model they take turns; on two they share the process and its attention kernels."""
    models = [attention()] * 4 if shared else [attention() for _ in range(4)]
    expected, before = deviation_of(attention()), surroundings()
    found, failures = {}, []

    def work(number):
        try:
            for _ in range(3):
                found[number] = deviation_of(models[number])
        except Exception as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert surroundings() == before
    for number in range(4):
        assert_close(found[number], expected, 1e-12)


def test_threads_that_train_again_and_those_that_look_do_not_wait_for_each_other():
    """One holds the model and wants the process, as refine does; the other wants both."""
    model = attention()
    data = (TOKENS, torch.arange(9) % 3)
    looking = threading.Event()

    def look():
        with state_preserved(model):
            looking.set()
            threading.Event().wait(0.3)
            with kept_surroundings():
                pass

    def train():
        looking.wait()
        recipe = engram.recipes.Adam(epochs=1)
        engram.retrain(model, data, [0], train=recipe, refits=2, progress=False)

    threads = [threading.Thread(target=work, daemon=True) for work in (look, train)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def test_a_copy_is_not_taken_while_another_thread_looks():
    """Merged or not, in train mode or not: what is trained are copies of the model as it is."""
    model = adapted().train()
    looking, done = threading.Event(), []

    def look():
        with state_preserved(model):
            looking.set()
            threading.Event().wait(0.3)
            done.append("looked")

    def train(own, data):
        done.append(own.training)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    looking.wait()
    with pytest.raises(engram.errors.EngramError):  # the function above does not train
        engram.retrain(model, (X, Y), [0], train=train, refits=2, progress=False)
    thread.join(60)
    assert done[:2] == ["looked", True]


def interrupted(step, *given):
    """As Ctrl-C would end it, just after the step."""
    with restored(tuple(of_the_thread())):
        step(*given)
        raise KeyboardInterrupt


def test_hooks_on_saved_tensors_are_taken_away():
    """Ctrl-C while they are put on leaves them on, and torch.func refuses to work with any."""
    autograd = torch._C._autograd
    with pytest.raises(KeyboardInterrupt):
        interrupted(autograd._push_saved_tensors_default_hooks, torch.clone, torch.clone)
    assert autograd._top_saved_tensors_default_hooks(True) is None
    with pytest.raises(KeyboardInterrupt):
        interrupted(autograd._saved_tensors_hooks_disable, "not now")
    assert autograd._saved_tensors_hooks_is_enabled()


def test_a_model_of_transformers_is_not_copied():
    """Its train() is one of its own, and changes nothing."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 10}

    class Merging(transformers.GPT2LMHeadModel):
        def train(self, mode=True):
            return super().train(mode)

    config = transformers.GPT2Config(**sizes)
    assert not Modes.now(transformers.GPT2LMHeadModel(config)).switching
    assert len(Modes.now(Merging(config)).switching) == 1
