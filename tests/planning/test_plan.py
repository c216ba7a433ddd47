"""What a call will take: lines through small calls, and what real calls then take."""

import time

import pytest
import torch
from torch import nn

import engram
from engram.core.data.batches import Batches
from engram.errors import ArgumentError, EngramError
from engram.planning.measuring import Cost, PeakMemory, costs, expected, memory_in_use, part_of

CPU = torch.device("cpu")


def test_time_and_disk_go_on_along_the_line():
    few = [Cost(n, n, 2 + 0.01 * n, 100, 50 + 8 * n) for n in (64, 128)]
    found = expected(few, 10_000, 10_000)
    assert found.seconds == pytest.approx(102)
    assert found.disk == pytest.approx(50 + 80_000)


def test_memory_grows_until_a_batch_is_full_and_then_with_what_is_kept():
    few = [Cost(n, n, 1.0, 1e6 + 1e3 * n, 10.0 * n) for n in (64, 128)]
    found = expected(few, 10_000, 10_000, held=256)
    assert found.memory == pytest.approx(1e6 + 1e3 * 256 + 10 * (10_000 - 128))
    full = [Cost(n, n, 1.0, 5e6, 0.0) for n in (512, 1024)]
    assert expected(full, 10_000, 10_000, held=256).memory == pytest.approx(5e6)


def test_a_line_neither_falls_nor_starts_below_zero():
    falling = [Cost(32, 32, 2.0, 1, 1), Cost(64, 64, 1.0, 1, 1)]
    assert expected(falling, 1000, 1000).seconds == 1.0
    steep = [Cost(32, 32, 0.001, 1, 1), Cost(64, 64, 1.0, 1, 1)]
    assert expected(steep, 640, 640).seconds == pytest.approx(10.0)


def test_a_call_on_everything_is_no_estimate():
    few = [Cost(32, 32, 1.0, 7, 5), Cost(40, 40, 1.1, 8, 6)]
    assert expected(few, 40, 40) == few[-1]


def test_other_units_of_work():
    few = [Cost(32, 320, 1.0, 1, 1), Cost(64, 640, 2.0, 1, 1)]
    assert expected(few, 10_000, 6400).seconds == pytest.approx(20.0)


def test_calls_double_until_one_takes_long():
    made = []

    def call(count):
        made.append(count)
        time.sleep(1.1 if count >= 128 else 0)

    found = costs(call, 1000, CPU, 0)
    assert made == [16, 32, 64, 128]
    assert [cost.examples for cost in found] == [32, 64, 128]
    assert found[-1].seconds > 1


def test_calls_end_with_the_data():
    made = []
    costs(lambda count: made.append(count), 50, CPU, 0)
    assert made == [16, 32, 50]


def test_the_peak_is_seen():
    level = memory_in_use(CPU)
    with PeakMemory(CPU, level) as peak:
        block = torch.ones(40_000_000)  # 160 MB
        time.sleep(0.05)
        del block
    assert 150e6 < peak.bytes < 400e6


@pytest.mark.parametrize("form", ["tuple", "dataset", "loader"])
def test_a_part_is_spread_over_the_data(form):
    x, y = torch.arange(100.0)[:, None], torch.arange(100)
    data = {
        "tuple": (x, y),
        "dataset": torch.utils.data.TensorDataset(x, y),
        "loader": torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=7),
    }[form]
    few = part_of(data, 10)
    labels = [int(y) for batch in Batches(few, 7) for y in batch.targets]
    assert len(labels) == 10
    assert labels == sorted(labels)
    assert labels[0] < 15
    assert labels[-1] > 85
    assert part_of(data, 1000) is data


def problem():
    torch.manual_seed(0)
    x, y = torch.randn(80, 4), torch.arange(80) % 3
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters())
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    return model, (x, y), optimizer


def fit(model, data):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data[0]), data[1]).backward()
        optimizer.step()


def test_every_step_is_planned_and_nothing_is_changed():
    model, data, optimizer = problem()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    numbers, hooks = torch.get_rng_state(), len(optimizer._optimizer_step_post_hooks)
    found = engram.plan(model, data, optimizer=optimizer, train=fit, leave_out=10)
    assert list(found.steps) == ["fit", "pass", "tracker update", "retraining"]
    for step in found.steps.values():
        assert step.seconds > 0
        assert step.disk > 0
        assert step.measured_on == 80
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), numbers)
    assert len(optimizer._optimizer_step_post_hooks) == hooks
    assert model.training
    assert found.fits
    assert list(found.to_frame().columns) == ["seconds", "memory", "disk", "measured_on", "what"]
    assert "Plan for 80 examples and 67 parameters on cpu" in str(found)


def test_disk_is_what_a_saved_result_takes(tmp_path):
    model, data, _ = problem()
    found = engram.plan(model, data, structure="diagonal")
    posterior = engram.laplace(model, data, structure="diagonal", prior_precision=1.0)
    engram.sensitivities(model, data, posterior).save(tmp_path / "result")
    size = sum(path.stat().st_size for path in (tmp_path / "result").rglob("*"))
    assert found.steps["pass"].disk == pytest.approx(size, rel=0.2)


def test_auto_is_what_it_stands_for_with_all_data():
    model, data, _ = problem()
    assert "full" in engram.plan(model, data).steps["fit"].what


def test_wrong_arguments():
    model, data, _ = problem()
    with pytest.raises(ArgumentError, match="leave_out of at least 1"):
        engram.plan(model, data, leave_out=0)
    with pytest.raises(ArgumentError, match="structure to be one of auto, "):
        engram.plan(model, data, structure="x")
    with pytest.raises(ArgumentError, match="estimator"):
        engram.plan(model, data, estimator="x")
    with pytest.raises(EngramError):
        engram.plan(model, data, likelihood="x")
    with pytest.raises(EngramError):
        engram.plan(model, 3)
    with pytest.raises(EngramError):
        engram.plan(model, data, structure="diagonal", train="x")
