"""What half of the data says of the other half is carried over to all labels."""

import torch

import engram
from engram.auditing.second_training import SecondOpinion, carried_over


def test_chances_follow_the_ranking_and_the_half_that_was_judged():
    generator = torch.Generator().manual_seed(0)
    right = torch.randint(0, 3, (3000,), generator=generator)
    p = torch.full((3000, 3), 0.02).double()
    p[torch.arange(3000), right] = 0.96
    p = p + 0.01 * torch.rand(3000, 3, generator=generator)
    p = p / p.sum(1, keepdim=True)
    wrong = torch.rand(3000, generator=generator) < 0.1
    given = torch.where(wrong, (right + 1) % 3, right)
    losses = -p.gather(1, given[:, None])[:, 0].log()
    half = torch.arange(0, 3000, 2)
    found = carried_over(SecondOpinion(half, p[half], 0.0), losses, p, given)
    assert torch.equal(found.is_issue, wrong)
    assert found.called.share > 0.95
    assert abs(found.rate - 0.1) < 0.03
    assert bool((found.chance[losses.argsort()].diff() >= -1e-12).all())


def test_an_audit_has_a_second_training_unless_it_is_minimal():
    import numpy as np

    generator = np.random.default_rng(0)
    x = np.concatenate([generator.normal(m, 1, (100, 2)) for m in (-3, 3)])
    y = np.repeat([0, 1], 100)
    whole = engram.audit((x, y), epochs=3, progress=False)
    assert whole.facts["held_out_loss"] > 0
    assert (
        engram.audit((x, y), epochs=3, minimal=True, progress=False).facts["held_out_loss"] is None
    )
