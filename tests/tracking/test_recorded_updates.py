"""Updates of a tracker with the training time that it has recorded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ivon import IVON
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import engram
from engram.core.data.batches import Batches
from engram.core.data.parts import part_of
from engram.errors import ArgumentError, ModelMismatchError

NUM_DATA = 60
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=1e-3),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
}


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_DATA, 4, generator=generator, dtype=torch.float64)
    noise = torch.randn(NUM_DATA, generator=generator, dtype=torch.float64)
    return x, (x[:, 0] + 0.7 * noise > 0).long()


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 2)]
    return nn.Sequential(*layers).double()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    x, y = data()
    model.train()
    for _ in range(steps):
        batch = torch.randperm(NUM_DATA)[:20]
        optimizer.zero_grad()
        functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_has_the_recorded_time(name: str) -> None:
    model = net()
    optimizer = OPTIMIZERS[name](model.parameters())
    tracker = engram.Tracker(model, optimizer, data())
    assert tracker.training is not None
    for epoch in range(3):
        train(model, optimizer, 5)
        found = tracker.update(step=epoch)
    expected = engram.sensitivities(
        model,
        data(),
        engram.laplace(
            model, data(), structure="kronecker", curvature="fisher", training=tracker.training
        ),
        estimator="linear",
    )
    assert found is not None
    assert model.training
    torch.testing.assert_close(found.loo_loss, expected.loo_loss)
    assert tracker.history.records[-1].estimate == pytest.approx(expected.loo_nll)
    assert "recorded 15 steps" in repr(tracker.posterior())


def test_a_walk_along_the_training_is_asked_for() -> None:
    model = net()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    tracker = engram.Tracker(model, optimizer, data())
    train(model, optimizer, 12)
    found = tracker.update(estimator="trajectory")
    expected = engram.sensitivities(
        model, data(), tracker.posterior(), estimator="trajectory", progress=False
    )
    assert found is not None
    torch.testing.assert_close(found.loo_loss, expected.loo_loss)


def test_a_named_structure_takes_time_and_prior_from_the_record() -> None:
    model = net()
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    tracker = engram.Tracker(model, optimizer, data(), posterior="diagonal")
    train(model, optimizer, 6)
    found = tracker.posterior()
    expected = engram.laplace(
        model, data(), structure="diagonal", training=tracker.training, progress=False
    )
    assert found.stopped
    assert found.digest == expected.digest


def test_streamed_steps_wait_for_a_recorded_step_with_a_named_structure() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    tracker = engram.Tracker(model, optimizer, data(), posterior="kronecker")
    x, y = data()
    for _ in range(2):
        for batch in torch.arange(NUM_DATA).split(20):
            optimizer.zero_grad()
            with tracker.step(batch):
                functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    first, second = tracker.history.records
    assert first.examples == 0
    assert second.examples == NUM_DATA


def test_an_optimizer_of_all_examples_keeps_its_own_posterior() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double()
    optimizer = IVON(model.parameters(), lr=0.1, ess=NUM_DATA, hess_init=0.1, weight_decay=1e-3)
    tracker = engram.Tracker(model, optimizer, data())
    x, y = data()
    with optimizer.sampled_params(train=True):
        functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    expected = engram.posterior_of(optimizer, model, num_data=NUM_DATA)
    assert tracker.posterior().digest == expected.digest


def test_a_tracker_that_comes_late_guesses_what_it_has_missed() -> None:
    model = net()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    train(model, optimizer, 10)
    tracker = engram.Tracker(model, optimizer, data())
    train(model, optimizer, 4)
    assert "guessed 14 steps" in repr(tracker.posterior())
    train(model, optimizer, 7)
    assert "recorded 11 steps of AdamW, 10 before them missing" in repr(tracker.posterior())


def test_the_recorded_time_goes_on_after_a_restart() -> None:
    model = net()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    tracker = engram.Tracker(model, optimizer, data())
    train(model, optimizer, 6)
    tracker.update()
    states = copy.deepcopy([part.state_dict() for part in (model, optimizer, tracker)])
    again = net()
    other = OPTIMIZERS["AdamW"](again.parameters())
    resumed = engram.Tracker(again, other, data())
    for part, state in zip((again, other, resumed), states, strict=True):
        part.load_state_dict(state)
    for one, stepped in ((model, optimizer), (again, other)):
        torch.manual_seed(1)
        train(one, stepped, 6)
    assert resumed.posterior().digest == tracker.posterior().digest
    assert resumed.training is not None
    assert resumed.training.num_missing_steps == 0
    first, second = tracker.update(), resumed.update()
    assert first is not None
    assert second is not None
    assert first.loo_loss.equal(second.loo_loss)


def test_another_optimizers_state_leaves_everything_as_it_was() -> None:
    model = net()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    tracker = engram.Tracker(model, optimizer, data())
    train(model, optimizer, 3)
    tracker.update()
    wrong = engram.Tracker(again := net(), OPTIMIZERS["SGD"](again.parameters()), data())
    with pytest.raises(ModelMismatchError, match="the record of a SGD"):
        wrong.load_state_dict(tracker.state_dict())
    assert len(wrong.history) == 0
    assert wrong.training is not None
    assert wrong.training.num_steps == 0


def test_settings_that_are_refused_leave_no_hooks() -> None:
    model = net()
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    with pytest.raises(ArgumentError, match="posterior='kronecker' and average"):
        engram.Tracker(model, optimizer, data(), posterior="kronecker", average=0.9)
    assert not optimizer._optimizer_step_post_hooks


def test_some_examples_stand_for_all() -> None:
    model = net()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    tracker = engram.Tracker(model, optimizer, data(), examples=25)
    torch.manual_seed(1)
    train(model, optimizer, 8)
    twin = net()  # the same training, in a record without names, which any data can go with
    of_twin = OPTIMIZERS["AdamW"](twin.parameters())
    unnamed = engram.record(of_twin)
    torch.manual_seed(1)
    train(twin, of_twin, 8)
    found = tracker.update()
    assert found is not None
    chosen = found.indices
    assert len(chosen) == 25
    assert chosen.unique().equal(chosen)
    posterior = tracker.posterior()
    assert posterior.num_data == NUM_DATA
    x, y = data()
    some = engram.laplace(
        twin,
        (x[chosen], y[chosen]),
        structure="kronecker",
        curvature="fisher",
        training=unnamed,
        progress=False,
    )
    # 60/25 (S + n/C) of the 25, in every direction
    vector = {n: torch.randn_like(m) for n, m in some.mean.items() if n in some.block_of}
    expected, solved = some.solve(vector), posterior.solve(vector)
    for name, value in expected.items():
        torch.testing.assert_close(solved[name], value * 25 / NUM_DATA)
    assert posterior.prior_precision == pytest.approx(some.prior_precision * NUM_DATA / 25)
    row = tracker.history.loo_loss[-1]
    assert row.isnan().sum() == NUM_DATA - 25
    torch.testing.assert_close(row[chosen].double(), found.loo_loss, rtol=1e-5, atol=1e-6)
    assert tracker.history.records[-1].examples == 25
    assert tracker.update().indices.equal(chosen)  # type: ignore[union-attr]
    tracker.history.score_figure()


def test_some_examples_with_a_prior_that_is_given() -> None:
    model = net()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    given = {"posterior": "kronecker", "prior_precision": 3.0, "examples": 20}
    posterior = engram.Tracker(model, optimizer, data(), **given).posterior()
    assert posterior.prior_precision == pytest.approx(3.0)
    everything = engram.Tracker(model, optimizer, data(), **(given | {"examples": NUM_DATA}))
    assert everything.posterior().num_data == posterior.num_data
    assert everything.looked_at.indices is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"examples": 0}, "examples"),
        ({"examples": 20, "estimator": "trajectory"}, "with all examples; got 20 of 60"),
        ({"examples": 20, "held_out": 10}, "look at all examples; got examples=20"),
    ],
)
def test_examples_that_cannot_be(given: dict[str, Any], message: str) -> None:
    model = net()
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    with pytest.raises(ArgumentError, match=message):
        engram.Tracker(model, optimizer, data(), **given)


def test_a_part_of_every_form_of_data() -> None:
    x, y = data()
    chosen = torch.tensor([3, 1, 50])
    rows = TensorDataset(x, y)
    loader = DataLoader(rows, 7, collate_fn=lambda items: torch.utils.data.default_collate(items))
    for form in ((x, y), rows, loader, {"inputs": x, "labels": y}):
        found = Batches(part_of(form, chosen), 2).take(torch.arange(3))
        assert found.targets.equal(y[chosen])
        assert next(iter(torch.utils._pytree.tree_leaves(found.inputs))).equal(x[chosen])
