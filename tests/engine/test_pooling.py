"""Average pooling by slices, against the library's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from engram.engine.pooling import average_pool

IMAGE = torch.randn(2, 3, 12, 18, dtype=torch.float64)


@pytest.mark.parametrize(
    "arguments",
    [
        (2,),
        (3, 3),
        ((2, 3),),
        ((2, 3), (2, 3), 0),
        (2, None, 0, True, False),
        (2, 2, 0, False, True, 3),
    ],
)
def test_windows_that_tile(arguments: tuple[Any, ...]) -> None:
    for image in (IMAGE, IMAGE[0]):
        found = average_pool(image, *arguments)
        assert found is not None
        torch.testing.assert_close(found, functional.avg_pool2d(image, *arguments))


@pytest.mark.parametrize("arguments", [(5,), (2, 1), (2, 2, 1), (3, (3, 2))])
def test_windows_that_do_not(arguments: tuple[Any, ...]) -> None:
    assert average_pool(IMAGE, *arguments) is None


def test_derivatives_of_every_order() -> None:
    image = torch.randn(2, 2, 4, 6, dtype=torch.float64, requires_grad=True)

    def pooled(x: torch.Tensor) -> torch.Tensor:
        found = average_pool(x, (2, 3))
        assert found is not None
        return found

    assert torch.autograd.gradcheck(pooled, (image,))
    assert torch.autograd.gradgradcheck(pooled, (image,))
