"""Columns of N rows, put together from batches."""

import pytest
import torch

from engram.core.data.columns import Columns, finite
from engram.errors import DataError, NonFiniteError


def test_batches_follow_each_other():
    columns, rows = Columns(5), torch.randn(5, 2)
    for part in rows.split(2):
        columns.add({"outputs": part, "loss": part[:, 0]})
    assert torch.equal(columns["outputs"], rows)
    assert torch.equal(columns.complete()["loss"], rows[:, 0])


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_halves_are_widened(kind):
    columns = Columns(2)
    columns.add({"loss": torch.tensor([0.5, 2.0], dtype=kind)})
    assert torch.equal(columns["loss"], torch.tensor([0.5, 2.0]))


@pytest.mark.parametrize(("wanted", "given"), [(3, 2), (2, 3)])
def test_too_few_or_too_many_rows_are_refused(wanted, given):
    columns = Columns(wanted)

    def fill():
        columns.add({"loss": torch.zeros(given)})
        columns.complete()

    with pytest.raises(DataError, match=f"expected {wanted} rows, one per example.*got {given}"):
        fill()


def test_the_first_row_that_is_no_number_is_named():
    rows = torch.zeros(4, 2, 2)
    assert finite("variances", rows) is rows
    rows[2, 0, 1] = torch.inf
    with pytest.raises(NonFiniteError, match="example 2"):
        finite("variances", rows)
