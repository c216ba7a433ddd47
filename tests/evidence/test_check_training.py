"""What a training does by chance: against loops by hand, and functions that misbehave."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

import engram
from engram.errors import ArgumentError, TrainingError
from engram.evidence.check_training import EffectNoise
from interrupting import condition, surroundings

Pair = tuple[Tensor, Tensor]
CALLS = [0]


def data() -> Pair:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 3, generator=generator)
    return inputs, (inputs.sum(1) > 0).long()


def make() -> nn.Module:
    return nn.Linear(3, 2)


def fit(model: nn.Module, given: Pair) -> nn.Module:
    """Two epochs in an order by the global seed."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(2):
        for chosen in torch.randperm(len(given[0])).split(8):
            optimizer.zero_grad()
            functional.cross_entropy(model(given[0][chosen]), given[1][chosen]).backward()
            optimizer.step()
    return model


def counting(model: nn.Module, given: Pair) -> None:
    """Adds to all outputs of one class how often it was called: no seed decides that."""
    CALLS[0] += 1
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor([float(CALLS[0]), 0.0]))


def check(train=fit, model=make, **settings):
    return engram.check_training(model, data(), train=train, progress=False, **settings)


def test_noise_is_that_of_trainings_by_hand() -> None:
    inputs, targets = data()
    losses = []
    for seed in (5, 7, 9, 11):
        torch.manual_seed(seed)
        model = make()
        torch.manual_seed(seed + 1)
        outputs = fit(model, (inputs, targets))(inputs).detach()
        losses.append(functional.cross_entropy(outputs, targets, reduction="none"))
    expected = torch.stack(losses).double()
    before = surroundings()
    found = check(seeds=4, seed=5, effect=0.01)
    assert surroundings() == before
    assert found.deterministic
    assert not found.mixes_batches
    assert not found.from_one_start
    torch.testing.assert_close(found.losses.double(), expected, rtol=1e-6, atol=1e-7)
    assert found.mean_noise == pytest.approx(float(expected.mean(1).std()), rel=1e-5)
    torch.testing.assert_close(found.example_noise, expected.std(0), rtol=1e-4, atol=1e-6)
    assert found.effect is not None
    assert found.effect.noise == pytest.approx(found.mean_noise)
    assert "4 seeds differ by" in repr(found)


def test_a_training_that_no_seed_decides_is_measured_and_said() -> None:
    CALLS[0] = 0
    found = check(counting)
    assert CALLS[0] == 4
    assert found.repeat_difference == pytest.approx(1.0)
    assert not found.deterministic
    assert "not decided by the seed" in repr(found)


@pytest.mark.parametrize(
    ("layers", "mixed"),
    [
        ([nn.Linear(3, 2)], False),
        ([nn.Linear(3, 6), nn.Dropout(0.5), nn.Linear(6, 2)], False),
        ([nn.Linear(3, 6), nn.LayerNorm(6), nn.Linear(6, 2)], False),
        ([nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)], True),
    ],
    ids=["linear", "dropout", "layer norm", "batch norm"],
)
def test_whether_examples_of_a_batch_see_each_other(layers: list[nn.Module], mixed: bool) -> None:
    model = nn.Sequential(*layers)
    before = condition(model)
    found = check(model=model, seeds=2)
    assert condition(model) == before
    assert found.from_one_start
    assert found.mixes_batches is mixed
    assert ("see each other: outputs change" in repr(found)) is mixed


@pytest.mark.parametrize("count", [4, 8])
def test_few_examples_and_a_data_set(count: int) -> None:
    model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    rows = TensorDataset(*(part[:count] for part in data()))

    def over_rows(copy: nn.Module, given: Dataset[Pair]) -> nn.Module:
        return fit(copy, next(iter(DataLoader(given, count))))

    found = engram.check_training(model, rows, train=over_rows, seeds=2, progress=False)
    assert found.mixes_batches


def test_the_pairs_that_an_effect_takes() -> None:
    noisy = EffectNoise("the mean loss", 0.004, 0.02)
    assert not noisy.shows
    # 2 standard errors of the mean of k differences, each of variance 2 noise^2
    k = noisy.pairs
    assert 2 * 0.02 * math.sqrt(2 / k) <= 0.004 < 2 * 0.02 * math.sqrt(2 / (k - 1))
    assert EffectNoise("the mean loss", -0.5, 0.02).pairs == 1
    assert EffectNoise("the mean loss", 0.0, 0.02).pairs == math.inf


def test_effects_are_held_against_the_noise_of_their_own_loss() -> None:
    inputs, targets = data()
    torch.manual_seed(0)
    model = fit(make(), (inputs, targets))
    posterior = engram.laplace(model, (inputs, targets), prior_precision=1.0)
    test = (inputs[:7] + 0.1, targets[:7])
    removal = engram.remove(model, (inputs, targets), posterior, [1, 4], evaluate_on=test)
    found = check(effect=removal)
    assert found.effect is not None
    assert found.effect.effect == removal.group.change
    own = found.losses[:, [1, 4]].double().mean(1).std()
    assert found.effect.noise == pytest.approx(float(own))
    evaluated = check(effect=removal, evaluate_on=test)
    assert evaluated.effect is not None
    assert removal.evaluation is not None
    assert evaluated.evaluation_losses is not None
    assert evaluated.effect.effect == removal.evaluation.change
    over = evaluated.evaluation_losses.double().mean(1).std()
    assert evaluated.effect.noise == pytest.approx(float(over))
    tiny = replace(found, effect=EffectNoise("the mean loss", 0.004, 0.02))
    assert "less than 3 seeds differ by (0.02): no estimate can tell" in " ".join(
        repr(tiny).split()
    )
    with pytest.raises(ArgumentError, match=r"of the 40 examples.*got one of example 90"):
        check(effect=replace_indices(removal, [1, 90]))


def replace_indices(removal: engram.Removal, indices: list[int]) -> engram.Removal:
    facts = (removal.group, None, False, removal.estimator, removal.at, removal.matrix)
    return engram.Removal(torch.tensor(indices), removal.weights, removal.delta, *facts)


def nothing(model: nn.Module, given: Pair) -> None:
    return None


def scaling(model: nn.Module, given: Pair) -> nn.Module:
    given[0].mul_(2.0)
    return fit(model, given)


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"train": nothing}, TrainingError, "nothing, with all weights as before.*return the"),
        ({"train": scaling}, TrainingError, "leaves the data as it is.*data that changed.*clone"),
        ({"train": "sgd"}, ArgumentError, "a training function.*got train=sgd"),
        ({"seeds": 1}, ArgumentError, "number of seeds.*got 1.*use seeds=3"),
        ({"effect": "large"}, ArgumentError, "a removal or a finite change.*engram.remove"),
        ({"effect": math.nan}, ArgumentError, "a removal or a finite change"),
    ],
)
def test_refused(settings: dict, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=f"(?s){words}"):
        check(**settings)


def test_the_number_of_trainings_is_said_before(capsys: pytest.CaptureFixture[str]) -> None:
    engram.check_training(make, data(), train=fit)
    assert "4 trainings, the first seed twice" in capsys.readouterr().err
