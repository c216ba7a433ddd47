"""Sequences of tokens against autograd of torch's own cross entropy, one sequence at a time."""

import math

import pytest
import torch
from torch.func import grad, hessian
from torch.nn import functional as F

from engram.errors import DataError, LikelihoodError, MemoryLimitError, TargetError
from engram.likelihoods import Tokens, resolve
from engram.likelihoods.draws import Draws

N, T, V = 3, 4, 5
LOGITS = torch.randn(N, T, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.tensor([[1, 2, 0, 4], [3, -100, 1, 1], [0, 4, -100, -100]])
SETTINGS = [(shift, reduction) for shift in (True, False) for reduction in ("sum", "mean")]


def plain_loss(logits, labels, shift, reduction):
    """Of one sequence, [T, V]."""
    if shift:
        logits, labels = logits[:-1], labels[1:]
    return F.cross_entropy(logits, labels, ignore_index=-100, reduction=reduction)


def made(shift=True, reduction="sum"):
    return Tokens(shift=shift, reduction=reduction).for_outputs(torch.Size((T, V)))


@pytest.mark.parametrize(("shift", "reduction"), SETTINGS)
def test_loss_and_derivatives_are_those_of_cross_entropy(shift, reduction):
    likelihood, flat = made(shift, reduction), LOGITS.flatten(1)
    targets = likelihood.prepare(flat, LABELS)
    vector = torch.randn(N, T * V, dtype=torch.float64)
    loss, residual = likelihood.loss(flat, targets), likelihood.residual(flat, targets)
    product = likelihood.hessian_times(flat, targets, vector)
    factor = likelihood.hessian_factor(flat, targets)
    for i in range(N):

        def own(f, i=i):
            return plain_loss(f.reshape(T, V), LABELS[i], shift, reduction)

        torch.testing.assert_close(loss[i], own(flat[i]))
        torch.testing.assert_close(residual[i], grad(own)(flat[i]))
        curvature = hessian(own)(flat[i])
        torch.testing.assert_close(product[i], curvature @ vector[i])
        torch.testing.assert_close(factor[i] @ factor[i].mT, curvature)
    assert factor.shape[2] == likelihood.hessian_rank(T * V)


@pytest.mark.parametrize(("shift", "reduction"), SETTINGS)
def test_sampled_residuals_have_mean_zero_and_the_curvature_as_covariance(shift, reduction):
    likelihood, flat = made(shift, reduction), LOGITS[:1].flatten(1)
    targets = likelihood.prepare(flat, LABELS[:1])
    count = 40_000
    rows = flat.expand(count, -1)
    found = likelihood.sampled_residual(
        rows, targets.expand(count, -1, -1), Draws(0, torch.arange(count))
    )
    factor = likelihood.hessian_factor(flat, targets)[0]
    assert float(found.mean(0).abs().max()) < 0.01
    assert float((found.mT @ found / count - factor @ factor.mT).abs().max()) < 0.01


def test_targets_stay_as_they_are_once_prepared():
    likelihood, flat = made(), LOGITS.flatten(1)
    once = likelihood.prepare(flat, LABELS)
    assert torch.equal(likelihood.prepare(flat, once), once)
    assert torch.equal(likelihood.form(flat, once), once)


def test_what_is_kept_are_the_log_probabilities_of_the_labels():
    likelihood, flat = made(), LOGITS.flatten(1)
    kept = likelihood.kept(flat, LABELS)
    expected = LOGITS.log_softmax(2)[0, :-1].gather(1, LABELS[0, 1:, None])[:, 0]
    torch.testing.assert_close(kept[0, :-1], expected)
    assert float(kept[0, -1]) == 0 == float(kept[1, 0])
    torch.testing.assert_close(-kept.sum(1), likelihood.loss(flat, LABELS))


def test_the_name_gives_the_usual_settings():
    found = resolve("tokens")
    assert (found.ignore_index, found.shift, found.reduction) == (-100, True, "sum")
    assert found.identity == made().identity != made(shift=False).identity


def test_labels_that_do_not_fit():
    likelihood, flat = made(), LOGITS.flatten(1)
    with pytest.raises(TargetError, match="one integer label per token"):
        likelihood.prepare(flat, LABELS[:, :2])
    with pytest.raises(TargetError, match=r"labels from 0 to 4.*5 at token 3 of row 0"):
        likelihood.prepare(flat, LABELS.clone().index_fill_(1, torch.tensor([3]), 5))
    with pytest.raises(TargetError, match=r"a labelled token.*row 1 of the batch, after the shift"):
        likelihood.prepare(flat, torch.tensor([[1, 1, 1, 1], [2, -100, -100, -100], [1] * 4]))


def test_outputs_that_do_not_fit():
    with pytest.raises(DataError, match=r"\[N, T, V\].*shape \(N, 5\)"):
        Tokens().for_outputs(torch.Size((5,)))
    with pytest.raises(DataError, match=r"logits for the 7 tokens.*got 5"):
        Tokens(vocabulary=7).for_outputs(torch.Size((4, 5)))
    with pytest.raises(LikelihoodError, match="knows its vocabulary"):
        Tokens().mean(LOGITS.flatten(1))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ignore_index": "pad"}, "whole number as ignore_index"),
        ({"vocabulary": 1}, "at least 2 tokens"),
    ],
)
def test_settings_that_are_none(given, words):
    with pytest.raises(LikelihoodError, match=words):
        Tokens(**given)


def test_the_root_of_a_large_vocabulary_is_refused_before_it_is_built():
    likelihood = Tokens().for_outputs(torch.Size((64, 50_000)))
    outputs, labels = torch.zeros(1, 64 * 50_000), torch.zeros(1, 64, dtype=torch.long)
    with pytest.raises(MemoryLimitError, match="samples a token for every position"):
        likelihood.hessian_factor(outputs, labels)
    assert math.isclose(
        float(likelihood.loss(outputs, labels)), 63 * math.log(50_000), rel_tol=1e-4
    )
