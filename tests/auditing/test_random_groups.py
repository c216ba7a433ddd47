"""Random groups are not said to hurt, and a dirty one is."""

import numpy as np
import pandas as pd
import pytest
import torch

import engram
from engram.auditing.random_groups import Gains, Null, random_groups


def drawn(size: int, mean: float, spread: float, generator: torch.Generator) -> Gains:
    """The gains of 400 others by a removal that they all see alike, and their own noise."""
    gains = Gains(torch.zeros(400, dtype=torch.float64), size, 1000)
    shared = gains.reach * mean + gains.reach**0.5 * spread * torch.randn((), generator=generator)
    own = 0.01 * torch.randn(400, generator=generator).double()
    return Gains(shared + own, size, 1000)


@pytest.mark.parametrize("mean", [0.0, 0.01, -0.01])
def test_intervals_of_random_groups_hold_zero_as_often_as_they_say(mean):
    generator, missed, sizes = torch.Generator().manual_seed(0), 0, (400, 250, 200, 150)
    for _ in range(200):
        null = Null.of([drawn(n, mean, 0.003, generator) for n in sizes * 2], len(sizes))
        real = [null.compared(drawn(n, mean, 0.003, generator)) for n in sizes]
        missed += any(abs(harm) > reach for harm, reach, _ in real)
    assert missed <= 20  # 5 % of 200 are expected, together


def test_what_is_beyond_random_is_the_harm():
    generator = torch.Generator().manual_seed(0)
    null = Null.of([drawn(200, 0.001, 0.0001, generator) for _ in range(8)], 4)
    gains = drawn(200, 0.001, 0.0001, generator)
    harm, reach, expected = null.compared(Gains(gains.each + 0.1, 200, 1000))
    assert abs(harm - 0.1) < reach < 0.02
    assert abs(expected - 0.001 * 250) < 0.01  # x = 200 / (1 - 200 / 1000)


def test_random_groups_have_the_size_and_classes_of_the_real_ones():
    strata = torch.arange(100) % 3
    members = [torch.arange(60), torch.arange(60, 100)]
    found = random_groups(members, strata, seed=0)
    assert len(found) == 8
    for place, positions in enumerate(found):
        own = members[place % 2]
        assert torch.equal(strata[positions].bincount(), strata[own].bincount())
        assert len(positions.unique()) == len(own)
    assert not torch.equal(found[0], found[2])
    many = [torch.arange(9 * k, 9 * k + 9) for k in range(11)]
    assert len(random_groups(many, strata, seed=0)) == 8


def test_random_annotators_do_not_hurt_and_a_careless_one_does():
    generator = np.random.default_rng(0)
    x = np.concatenate([generator.normal(m, 1.5, (100, 2)) for m in (-1, 1, 4)])
    y = np.repeat([0, 1, 2], 100)
    who = generator.choice(["ann", "bob", "cid", "dan"], 300)
    frame = pd.DataFrame(x, columns=["a", "b"]).assign(label=[f"k{k}" for k in y], who=who)
    plain = engram.audit(frame, group_by="who", epochs=8, progress=False)
    assert not plain.groups["hurts"].any()
    assert (plain.groups["random"] > 0).all()  # that all of them would seem to hurt by
    assert set(plain.classes.index) == {"k0", "k1", "k2"}
    careless = (who == "dan") & (generator.random(300) < 0.6)
    wrong = frame.assign(label=[f"k{(k + c) % 3}" for k, c in zip(y, careless, strict=True)])
    found = engram.audit(wrong, group_by="who", epochs=8, progress=False)
    assert list(found.groups.index[found.groups["hurts"].astype(bool)]) == ["dan"]
