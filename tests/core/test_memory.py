"""Too little memory: told before, halved batches, and an error of its own kind where that fails."""

import subprocess
import sys
import warnings

import psutil
import pytest
import torch
from torch import nn

import engram
from cases import MLP
from engram.core.data.columns import Columns
from engram.core.memory import available_bytes, is_out_of_memory
from engram.errors import MemoryLimitError
from fitted import posterior
from refusal import Refusal

CPU = torch.device("cpu")


LIMITED = """
import resource, warnings
import psutil, torch
import engram
from engram.core.memory import available_bytes

def limit(more):
    space = psutil.Process().memory_info().vms + more
    resource.setrlimit(resource.RLIMIT_AS, (space, resource.RLIM_INFINITY))

torch.manual_seed(0)
model, wide = torch.nn.Linear(3, 600), torch.nn.Linear(3, 20_000)
data = (torch.randn(32, 3), torch.randint(0, 600, (32,)))
settings = dict(structure="diagonal", prior_precision=1.0, tolerance=0, progress=False)
limit(80 * 2**20)
print(0 < available_bytes(torch.device("cpu")) <= 80 * 2**20)

warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as said:
    engram.laplace(model, data, batch_size=32, **settings)
print(any("out of memory with 32 examples" in str(w.message) for w in said))

try:
    engram.laplace(wide, data, **settings)
except engram.EngramError as error:
    print(type(error).__name__, isinstance(error, MemoryError), "memory" in str(error))
"""


def test_under_a_limit():
    """What is free knows it; batches are halved; and what cannot be done has its own error.

    The outputs' Hessians of 32 examples with 600 outputs are 46 MB, of 4 examples 6 MB, and of
    one with 20,000 outputs 1.6 GB. In a process of its own, where the limit stays.
    """
    done = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, text=True, check=False
    )
    assert done.stdout.split("\n")[:3] == ["True", "True", "MemoryLimitError True True"], (
        done.stderr
    )


def test_columns_that_cannot_fit_are_told_before():
    """102 GB for the outputs of 20,000 sequences with 1,280,000 numbers each."""
    columns = Columns(20_000)
    with Refusal(MemoryLimitError, "102 gb|103 gb", "20,000 x 1,280,000", "fewer"):
        columns.add({"outputs": torch.zeros(1, 1_280_000)})


def test_influences_that_cannot_fit_are_told_before():
    fitted, (x, y) = posterior("mlp", "diagonal"), MLP.data
    many = 10**12
    data = x[:1].expand(many, -1), y[:1].expand(many)
    with Refusal(MemoryLimitError, "7 x 1,000,000,000,000", "fewer test examples"):
        engram.influence(MLP.model, MLP.data, data, fitted, progress=False)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"), True),
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_which_errors_are_allocations(error, expected):
    assert is_out_of_memory(error) is expected


def test_a_raw_failure_in_the_model_is_named():
    class Greedy(nn.Linear):
        def forward(self, x):
            if len(x) > 3:
                torch.empty(10**15)
            return super().forward(x)

    with pytest.warns(UserWarning, match="out of memory with 6 examples at a time; trying 3"):
        engram.laplace(
            Greedy(4, 3).double(),
            MLP.data,
            structure="full",
            batch_size=6,
            progress=False,
            prior_precision=1.0,
        )


class Identity(torch.autograd.Function):
    """Whose second derivative takes more memory than there is, for more than three examples."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return Greedily.apply(gradient)


class Greedily(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if len(gradient) > 3:
            torch.empty(10**15)
        return gradient.clone()


def test_a_lack_of_memory_does_not_change_which_curvature_is_fitted():
    """Examples at a time are halved: it is no sign of a missing second derivative."""

    class Curved(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 2).double(), nn.Linear(2, 3).double()

        def forward(self, x):
            return self.last(Identity.apply(self.first(x)).tanh())

    fits = {}
    for size in (3, 6):
        torch.manual_seed(0)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            fits[size] = engram.laplace(
                Curved(), MLP.data, prior_precision=10.0, batch_size=size, progress=False
            )
    assert fits[3].curvature == fits[6].curvature == "hessian"
    assert any("out of memory with 6 examples" in str(w.message) for w in said)


def test_free_memory_is_within_the_machine():
    assert 0 < available_bytes(CPU) <= psutil.virtual_memory().total


def test_variances_of_too_many_outputs():
    """Half a million outputs: not even one example's V can be had."""
    model = nn.Linear(1, 500_000)
    data = torch.zeros(2, 1), torch.arange(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fitted = engram.posterior_of(optimizer, model, num_data=2, prior_precision=1.0)
    with (
        Refusal(MemoryLimitError, "memory with 1 examples"),
        pytest.warns(UserWarning, match="trying 1"),
    ):
        engram.prediction_variance(model, data, fitted, progress=False)
