"""Architectures with one output, with one example, and in batches that do not come out even."""

import copy

import pytest
import torch
from torch import nn

import engram
from cases import ARCHITECTURES, CASES
from fitted import assert_close
from single_examples import one_example, raw_outputs, select

NAMES = [case.name for case in ARCHITECTURES]


class OneOutput(nn.Module):
    """A weighted sum of a model's outputs, whatever the model is called with."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *args, **kwargs):
        outputs = raw_outputs(self.model, kwargs or args)
        rows = outputs.reshape(len(outputs), -1)
        return (rows * torch.arange(1, rows.shape[1] + 1)).sum(1, keepdim=True)


def expected_deviation(model, inputs, targets, fitted):
    """J S^-1 J' (f - y) of one output, by one backward pass for each example."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = []
    for n, target in enumerate(targets):
        (output,) = raw_outputs(model, one_example(inputs, n)).reshape(-1)
        found = torch.autograd.grad(
            output, list(parameters.values()), allow_unused=True, materialize_grads=True
        )
        gradient = dict(zip(parameters, found, strict=True))
        step = fitted.solve(gradient)
        spread = sum((gradient[name] * step[name]).sum() for name in parameters)
        rows.append(spread * (output.detach() - target))
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("name", "count", "batch_size"),
    [*((name, 7, 3) for name in NAMES), *((name, 1, "auto") for name in NAMES[::5])],
)
def test_one_output(name, count, batch_size):
    case = CASES[name]
    inputs = select(case.dense.inputs, slice(0, count))
    targets = torch.linspace(-1, 1, 7, dtype=torch.float64)[:count, None]
    model = OneOutput(copy.deepcopy(case.model)).eval()
    data = {**inputs, "labels": targets} if isinstance(inputs, dict) else (inputs, targets)
    choice = {"batch_size": batch_size, "progress": False}
    fitted = engram.laplace(
        model, data, likelihood="gaussian", structure="diagonal", prior_precision=1.0, **choice
    )
    found = engram.sensitivities(model, data, fitted, estimator="linear", **choice).deviation
    assert_close(found, expected_deviation(model, inputs, targets, fitted), 1e-9)
