"""The walk along a training with augmentation: driven by views, read out at the examples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import engram

Data = tuple[Tensor, Tensor]


def doubled(inputs: Tensor) -> Tensor:
    return 2 * inputs


def same(inputs: Tensor) -> Tensor:
    return inputs.clone()


def left_out(
    model: nn.Module, training: engram.Training, data: Data, structure: str, batch_size: int
) -> engram.Result:
    posterior = engram.laplace(
        model, data, structure=structure, training=training, likelihood="gaussian", progress=False
    )
    return engram.sensitivities(
        model, data, posterior, estimator="trajectory", batch_size=batch_size, progress=False
    )


def line(augment: Callable[[Tensor], Tensor] | None) -> tuple[nn.Module, engram.Training, Data]:
    """A linear regression, trained on views."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, generator=generator).double()
    y = (x @ torch.ones(4).double() + torch.randn(60, generator=generator).double())[:, None]
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    training = engram.record(optimizer, model, augment=augment, likelihood="gaussian")
    for _ in range(20):
        for batch in torch.arange(60).split(20):
            optimizer.zero_grad()
            (0.5 * (model(doubled(x[batch])) - y[batch]).square()).mean().backward()
            optimizer.step()
    return model, training, (x, y)


@pytest.mark.parametrize("structure", ["kronecker", "full"])
def test_what_views_do_to_the_weights_is_read_out_at_the_examples(structure: str) -> None:
    """Views that are twice the inputs: the weights move as with such data, outputs half as far."""
    model, training, (x, y) = line(doubled)
    found = left_out(model, training, (x, y), structure, 60)
    training.augment = None
    twice = left_out(model, training, (2 * x, y), structure, 60)
    torch.testing.assert_close(found.deviation, twice.deviation / 2)


def pictures() -> tuple[nn.Module, engram.Training, Data]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(48, 1, 6, 6, generator=generator), torch.arange(48) % 3
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    training = engram.record(optimizer, model)
    for _ in range(6):
        for batch in torch.arange(48).split(12):
            optimizer.zero_grad()
            functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return model.eval(), training, (x, y)


def walked(augment: Callable[[Tensor], Tensor] | None, structure: str, size: int) -> Tensor:
    model, training, data = pictures()
    training.augment = augment
    given = {"structure": structure, "training": training, "progress": False}
    posterior = engram.laplace(model, data, **given)
    result = engram.sensitivities(
        model, data, posterior, estimator="trajectory", batch_size=size, progress=False
    )
    return result.loo_loss


@pytest.mark.parametrize("structure", ["kronecker", "full"])
def test_views_that_are_the_examples_change_nothing(structure: str) -> None:
    torch.testing.assert_close(walked(same, structure, 16), walked(None, structure, 16))


def test_views_do_not_depend_on_the_batches() -> None:
    def noisy(inputs: Tensor) -> Tensor:
        return inputs + 0.3 * torch.randn_like(inputs)

    torch.testing.assert_close(
        walked(noisy, "kronecker", 5), walked(noisy, "kronecker", 48), rtol=1e-3, atol=1e-4
    )
    assert not torch.allclose(walked(noisy, "kronecker", 48), walked(None, "kronecker", 48))


def test_what_is_no_function_is_refused_before_the_training() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(engram.errors.ArgumentError, match="a function of a batch of inputs"):
        engram.record(optimizer, model, augment="flip")  # type: ignore[arg-type]
