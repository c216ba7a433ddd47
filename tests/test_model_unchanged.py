"""The caller's model and surroundings are as before, also after an exception."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, TensorDataset

import engram
from cases import CASES, MLP
from engram.core.state.model import state_preserved
from fitted import posterior
from snapshot import differences, snapshot

NAMES = (
    "mlp",
    "conv2d_groups",
    "batch_norm2d",
    "encoder_layer_dropout",
    "attention_batch_second",
    "filter_response_norm",
    "tied_embedding",
    "weight_norm",
    "frozen_layer",
    "in_place_residual",
    "lstm",
    "vision_transformer",
)


def _fit(prior_precision=1.0, **choice):
    return lambda model, data, fitted, likelihood: engram.laplace(
        model,
        data,
        likelihood=likelihood,
        prior_precision=prior_precision,
        progress=False,
        **choice,
    )


def _estimate(estimator):
    return lambda model, data, fitted, likelihood: engram.sensitivities(
        model, data, fitted, estimator=estimator, progress=False
    )


def _remove(model, data, fitted, likelihood):
    engram.remove(model, data, fitted, [0, 6], evaluate_on=data, progress=False)


def _pairs(model, data, fitted, likelihood):
    engram.influence(model, data, data, fitted, progress=False)


CALLS = {
    "kronecker": _fit(structure="kronecker"),
    "ekfac": _fit(structure="ekfac"),
    "full": _fit(structure="full"),
    "low_rank": _fit(structure="low_rank"),
    "sampled": _fit(structure="diagonal", curvature="fisher"),
    "hessian": _fit(structure="last_layer", curvature="hessian", prior_precision=100.0),
    "linear": _estimate("linear"),
    "corrected": _estimate("corrected"),
    "iterated": _estimate("iterated"),
    "remove": _remove,
    "influence": _pairs,
}


def lived_in(model: nn.Module) -> nn.Module:
    """A copy as a user has it mid-training: mixed modes, gradients and a hook of their own."""
    model = copy.deepcopy(model)
    for position, module in enumerate(model.modules()):
        # BatchNorm has no per-example gradient in training mode.
        module.training = position % 2 == 0 and not isinstance(module, nn.BatchNorm2d)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 0.5)
    model.register_forward_hook(lambda module, args, output: None)
    return model


def loader(data):
    return DataLoader(TensorDataset(*data), batch_size=3)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", NAMES)
def test_unchanged_after_a_call(name, call):
    case = CASES[name]
    model, fitted = lived_in(case.model), posterior(name, "kronecker")
    data, likelihood = loader(case.data), case.public_likelihood
    before = snapshot(model)
    CALLS[call](model, data, fitted, likelihood)
    assert differences(before, snapshot(model)) == []


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["mlp", "conv2d_groups", "encoder_layer_dropout"])
def test_unchanged_after_bad_data(name, call):
    """The last batch holds a NaN, so the error comes after two good batches."""
    case = CASES[name]
    model, fitted = lived_in(case.model), posterior(name, "kronecker")
    x, y = case.data
    x = x.clone()
    x[6] = float("nan")
    data, likelihood = loader((x, y)), case.public_likelihood
    before = snapshot(model)
    with pytest.raises(engram.errors.EngramError):
        CALLS[call](model, data, fitted, likelihood)
    assert differences(before, snapshot(model)) == []


def test_a_sample_leaves_the_generator_alone():
    before = snapshot(CASES["mlp"].model)
    posterior("mlp", "full").sample(2, torch.Generator().manual_seed(0))
    assert differences(before, snapshot(CASES["mlp"].model)) == []


class Interrupted(nn.Module):
    """Raises from within the network once it has run a few times."""

    def __init__(self, body: nn.Module, calls: int) -> None:
        super().__init__()
        self.body, self.left = body, [calls]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body.body(x)
        self.left[0] -= 1
        if self.left[0] < 0:
            raise KeyboardInterrupt
        return self.body.head(h)


@pytest.mark.parametrize("calls", range(8))
@pytest.mark.parametrize("call", CALLS)
def test_unchanged_after_an_interruption(call, calls):
    """Ctrl-C at any moment, not only a clean error."""
    case = CASES["mlp"]
    whole = Interrupted(case.model, 10**9)
    data = loader(case.data)
    fitted = engram.laplace(whole, data, structure="diagonal", progress=False, prior_precision=1.0)
    model = lived_in(whole)
    model.left = [calls]
    before = snapshot(model)
    with contextlib.suppress(KeyboardInterrupt):
        CALLS[call](model, data, fitted, case.public_likelihood)
    assert differences(before, snapshot(model)) == []


class Refusing(TorchFunctionMode):
    """Any operation is an error, as for a recorder that knows what comes next."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        raise RuntimeError(function)


def test_a_mode_of_torch_that_was_left_open_does_not_see_the_restoring():
    def interrupted(model):
        Refusing().__enter__()  # Ctrl-C may come while a mode is being left
        raise KeyboardInterrupt

    model = MLP.model
    before = snapshot(model)
    with pytest.raises(KeyboardInterrupt), state_preserved(model):
        interrupted(model)
    assert differences(before, snapshot(model)) == []
