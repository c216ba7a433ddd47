"""Retraining to no minimum: a recorded training walked again, and a loop from new first weights."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional

import engram
from engram.errors import ArgumentError, RunFolderError, TrainingError
from engram.retraining.pace import StepPace
from engram.retraining.recipes import FromStart, Replay
from engram.training.replay import Path, loss_of
from interrupting import surroundings
from recorded_training import NUMBER, examples, fit, net, recorded

ROUNDING = {"rtol": 1e-6, "atol": 1e-6}  # of a difference that is added again


@pytest.fixture(scope="module")
def walked():
    return recorded()


def test_a_replay_is_the_loop_written_out(walked):
    model, data, training = walked
    truth = engram.retrain(model, data, [0, 7], train=training, progress=False)
    for row, example in enumerate([0, 7]):
        again = engram.replay(model, data, training, [example], progress=False)
        with torch.no_grad():
            expected = again(data[0][example : example + 1])[0]
        torch.testing.assert_close(truth.outputs[row] + truth.deviation[row], expected, **ROUNDING)
    assert truth.noise_floor.repeated == truth.noise_floor.drift == 0
    assert truth.trained_by == "replay of 15 steps of AdamW"
    with torch.no_grad():
        losses = functional.cross_entropy(model(data[0]), data[1], reduction="none")
    assert torch.equal(truth.refit_loss, losses)


def test_what_comes_before_the_first_visit_is_not_walked(walked):
    model, data, training = walked
    path = Path(model, data, training, loss_of("categorical"))
    first = {}
    for part in training.order.parts:
        for example in part.indices.tolist():
            first.setdefault(example, part.step)
    for example in range(NUMBER):
        start = path.before(torch.tensor([example])).step
        assert start < first[example]
        assert not [s for s in training.grid.snapshots if start < s.step < first[example]]
    late = max(first, key=first.get)
    group = torch.tensor([late, min(first, key=first.get)])
    assert path.before(group).step == 0


def test_groups_evaluation_and_kept_models(walked):
    model, data, training = walked
    truth = engram.retrain(
        model, data, groups={"a": [0, 1], "b": [2]}, train=training, evaluate_on=data,
        keep_models=True, progress=False,
    )  # fmt: skip
    again = engram.replay(model, data, training, [0, 1], progress=False)
    copy = truth.model(0, model)
    for name, value in again.state_dict().items():
        assert torch.equal(copy.state_dict()[name], value)
    assert truth.evaluation_loss.shape == (2, NUMBER)


def test_a_folder_belongs_to_its_training(walked, tmp_path):
    model, data, training = walked
    first = engram.retrain(model, data, [3], train=training, folder=tmp_path, progress=False)
    again = engram.retrain(model, data, [3], train=Replay(training), folder=tmp_path)
    assert torch.equal(first.deviation, again.deviation)
    halved = Replay(training, loss=lambda f, y: 0.5 * functional.cross_entropy(f, y))
    with pytest.raises(RunFolderError):
        engram.retrain(model, data, [3], train=halved, folder=tmp_path, progress=False)


def test_a_record_without_order_cannot_be_walked(walked):
    model, data, _ = walked
    guessed = engram.Training.guess(model, learning_rate=0.1, steps=3)
    with pytest.raises(TrainingError, match="a record that can be replayed"):
        engram.retrain(model, data, [3], train=guessed, progress=False)


def test_a_loop_from_new_first_weights_is_the_same_with_one_seed():
    data = examples()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        expected = net()
        fit(expected, data)
    truth = engram.retrain(
        expected.eval(), data, [4], train=FromStart(fit, net), seed=5, progress=False
    )
    assert truth.noise_floor.drift == 0
    kept = torch.arange(NUMBER) != 4
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        other = net()
        fit(other, (data[0][kept], data[1][kept]))
    with torch.no_grad():
        expected = other.eval()(data[0][4:5])
    torch.testing.assert_close(truth.outputs + truth.deviation, expected, **ROUNDING)


def test_a_first_model_is_never_trained():
    first, data = net(), examples()
    before = [p.detach().clone() for p in first.parameters()]
    engram.retrain(net(), data, [1], train=FromStart(fit, first), refits=2, progress=False)
    assert all(torch.equal(p, b) for p, b in zip(first.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FromStart("fit", net), "a training function fit(model, data)"),
        (lambda: FromStart(fit, 3), "a function that makes a new model"),
        (lambda: FromStart(lambda model: None, net), "a training function fit(model, data)"),
    ],
)
def test_what_is_no_start_is_said(make, words):
    with pytest.raises(ArgumentError, match=re.escape(words)):
        make()


def test_a_loop_that_gives_nothing_is_said():
    with pytest.raises(TrainingError, match="nothing, with all weights as before"):
        engram.retrain(
            net(), examples(), [1], train=FromStart(lambda m, d: None, net), progress=False
        )
    with pytest.raises(ArgumentError, match="a start that makes a model"):
        engram.retrain(net(), examples(), [1], train=FromStart(fit, dict), progress=False)


class Told:
    """A bar that remembers."""

    def __init__(self, total: int) -> None:
        self.total, self.shown, self.updates, self.words = total, True, [], []

    def update(self, count: float = 1) -> None:
        self.updates.append(count)

    def tell(self, words: str) -> None:
        self.words.append(words)


def test_trainings_are_shown_by_their_steps(capsys):
    weight = nn.Parameter(torch.zeros(1))
    optimizer, pace, bar = torch.optim.SGD([weight], lr=0.1), StepPace(), Told(3)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.step()

    before = surroundings()
    for steps in (4, 4, 6):
        with pace.reported(bar):
            train(steps)
    assert bar.words == [f"{n} steps of the first" for n in (1, 2, 3, 4)]
    assert bar.updates == pytest.approx([1] + 4 * [0.25] + [0] + 4 * [0.25] + [0])
    with pytest.raises(ZeroDivisionError), pace.reported(bar):
        train(1 // 0)
    count = len(bar.updates)
    optimizer.step()  # nobody counts any more
    assert len(bar.updates) == count
    assert surroundings() == before


def test_what_trainings_will_take_is_said_before(walked, monkeypatch, capsys):
    model, data, training = walked
    monkeypatch.setattr("engram.retraining.pace.WORTH_SAYING", 0.0)
    engram.retrain(model, data, [0, 7], train=training)
    said = capsys.readouterr().err
    assert re.search(r"about .* s: 3 trainings, .* s each, 15 of 15 recorded steps, measured", said)
    monkeypatch.setattr("engram.retraining.pace.LONG_FIRST", 0.0)
    engram.retrain(model, data, [0, 7], train=FromStart(fit, net))
    said = capsys.readouterr().err
    assert len(re.findall(r"5 trainings; the first has taken 1 steps in .* s, and", said)) == 1
    assert re.search(r"about .*: 5 trainings, .* measured on the first, which took 15 steps", said)
