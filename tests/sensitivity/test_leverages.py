"""Leverages against the trace of V Lambda, what they cost, and results that have none."""

import math

import pytest
import torch
from torch import nn

import engram
from engram.errors import ArgumentError
from engram.sensitivity import leverages
from engram.sensitivity.leverages import Budget

OUTPUTS = 20


class Counting(nn.Module):
    """Counts the examples that pass through it."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, width), nn.Linear(width, outputs)
        self.rows = 0

    def forward(self, x):
        self.rows += len(x)
        return self.second(self.first(x).tanh())


def grouped_net(outputs=OUTPUTS):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(64, outputs)
    ).double()


def images(count, outputs):
    return torch.randn(count, 2, 4, 4).double(), torch.arange(count) % outputs


def linear(model, data, posterior, **settings):
    return engram.sensitivities(
        model, data, posterior, estimator="linear", progress=False, **settings
    )


def eigenvalues_of(model, data, posterior):
    """Of V Lambda for softmax, from matrices that are all built."""
    variance = engram.prediction_variance(model, data, posterior, progress=False)
    probability = model(data[0]).detach().softmax(1)
    curvature = torch.diag_embed(probability) - probability[:, :, None] * probability[:, None, :]
    return torch.linalg.eigvals(variance @ curvature).real


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "ekfac", "full", "isotropic"])
@pytest.mark.parametrize("batch_size", ["auto", 4, 1])
def test_few_outputs_have_the_exact_trace_and_eigenvalues(structure, batch_size):
    """A batch of one holds the vectors of an example one after the other."""
    model = grouped_net(5)
    data = images(6, 5)
    posterior = engram.laplace(
        model, data, structure=structure, prior_precision=0.05, progress=False
    )
    result = linear(model, data, posterior, batch_size=batch_size)
    expected = eigenvalues_of(model, data, posterior)
    torch.testing.assert_close(result.leverage, expected.sum(1), rtol=1e-9, atol=1e-12)
    found = result.diagnostics
    assert found.leverage_examples == 6
    assert found.effective_parameters_error == 0
    assert found.share_inconsistent == (expected.amax(1) > 1).double().mean()


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_draws_average_to_the_trace(structure):
    """Of 20 classes the two likeliest are taken exactly, the others by random signs."""
    model, data = grouped_net(), images(6, OUTPUTS)
    posterior = engram.laplace(
        model, data, structure=structure, prior_precision=1.0, progress=False
    )
    expected = eigenvalues_of(model, data, posterior).sum(1)
    results = [linear(model, data, posterior, seed=seed) for seed in range(100)]
    drawn = torch.stack([result.leverage for result in results])
    error = drawn.std(0) / math.sqrt(len(drawn))
    assert (error > 0).all()  # other draws each time
    assert ((drawn.mean(0) - expected).abs() < 4 * error).all()
    assert (error < 0.05 * expected).all()
    assert results[0].diagnostics.effective_parameters_error > 0


def test_probes_of_outputs_that_are_no_classes_average_to_the_trace():
    model, data = grouped_net(), (images(6, 2)[0], torch.randn(6, OUTPUTS).double())
    posterior = engram.laplace(
        model,
        data,
        likelihood="gaussian",
        structure="kronecker",
        prior_precision=1.0,
        progress=False,
    )
    variance = engram.prediction_variance(model, data[0], posterior, progress=False)
    expected = variance.diagonal(dim1=1, dim2=2).sum(1)
    results = [linear(model, data, posterior, seed=seed) for seed in range(100)]
    drawn = torch.stack([result.leverage for result in results])
    error = drawn.std(0) / math.sqrt(len(drawn))
    assert ((drawn.mean(0) - expected).abs() < 4 * error).all()
    assert math.isnan(results[0].diagnostics.share_inconsistent)


def test_weights_of_examples_multiply_the_curvature():
    model, (x, labels) = grouped_net(), images(6, OUTPUTS)
    weights = torch.tensor([0.0, 0.5, 1.0, 2.0, 3.0, 4.0]).double()
    data = x, torch.stack([labels.double(), weights], 1)
    posterior = engram.laplace(
        model,
        data,
        likelihood=engram.likelihoods.SampleWeighted(),
        structure="diagonal",
        prior_precision=1.0,
        progress=False,
    )
    expected = weights * eigenvalues_of(model, (x, labels), posterior).sum(1)
    drawn = torch.stack([linear(model, data, posterior, seed=s).leverage for s in range(60)])
    error = drawn.std(0) / math.sqrt(len(drawn))
    assert ((drawn.mean(0) - expected).abs() <= 4 * error).all()
    assert (error <= 0.02 * expected).all()


def test_eigenvalues_of_the_likeliest_classes_are_no_larger_than_those_of_all():
    torch.manual_seed(1)
    model, data = grouped_net(), images(300, OUTPUTS)
    with torch.no_grad():
        model[3].weight *= 4
    posterior = engram.laplace(
        model, data, structure="diagonal", prior_precision=0.5, progress=False
    )
    result = linear(model, data, posterior)
    known = ~result.leverage.isnan()
    assert 16 <= known.sum() < 300
    of_all = eigenvalues_of(model, data, posterior)[known].amax(1)
    share = result.diagnostics.share_inconsistent
    assert 0 < share <= (of_all > 1).double().mean()
    assert result.diagnostics.share_inconsistent_error == pytest.approx(
        math.sqrt(share * (1 - share) / int(known.sum()))
    )
    assert "+-" in str(result.diagnostics)


def test_the_error_of_the_effective_parameters_is_that_of_the_sample():
    model, data = grouped_net(5), images(400, 5)
    posterior = engram.laplace(
        model, data, structure="kronecker", prior_precision=1.0, progress=False
    )
    expected = float(eigenvalues_of(model, data, posterior).sum())
    found = [linear(model, data, posterior, seed=seed).diagnostics for seed in range(40)]
    totals = torch.tensor([each.effective_parameters for each in found])
    said = torch.tensor([each.effective_parameters_error for each in found]).mean()
    assert 0.6 < float(totals.std() / said) < 1.5
    assert abs(float(totals.mean()) - expected) < 4 * float(said) / math.sqrt(len(found))


@pytest.mark.parametrize("outputs", [1, 2, 10, 16, 17, 1000])
@pytest.mark.parametrize("passed", [1, 20, 300, 5000, 10**6])
def test_the_budget_is_an_eighth_or_one_example(passed, outputs):
    found = Budget.of(passed, outputs, 10**6)
    assert found.examples == 1 or found.examples * found.vectors * 8 <= passed
    assert found.exact == (found.vectors == outputs)
    assert found.examples <= leverages.LEVERAGE_SAMPLE


@pytest.mark.parametrize("outputs", [2, 10, 100])
@pytest.mark.parametrize("count", [300, 2000])
def test_an_eighth_of_the_examples_pass_again(outputs, count):
    """And as many as a batch for the opening, which costs more than that."""
    model = Counting(8, outputs)
    data = torch.randn(count, 4), torch.randint(0, outputs, (count,))
    posterior = engram.laplace(
        model, data, structure="diagonal", curvature="fisher", prior_precision=1.0, progress=False
    )
    passed = []
    for diagnostics in (False, True):
        model.rows = 0
        linear(model, data, posterior, diagnostics=diagnostics)
        passed.append(model.rows)
    assert 0 < passed[1] - passed[0] <= (count + 268) / 8


def test_one_example_of_many_says_nothing_about_all(monkeypatch):
    monkeypatch.setattr(leverages, "PER_VECTOR", 10**6)
    model, data = grouped_net(5), images(20, 5)
    posterior = engram.laplace(
        model, data, structure="diagonal", prior_precision=1.0, progress=False
    )
    result = linear(model, data, posterior)
    assert result.diagnostics.leverage_examples == 1
    assert math.isnan(result.diagnostics.effective_parameters_error)
    assert math.isnan(result.diagnostics.share_inconsistent)
    signals = {reason.signal for reason in result.verdict.reasons}
    assert not signals & {"mean_leverage", "share_inconsistent"}


@pytest.mark.parametrize("estimator", ["linear", "corrected", "iterated", "paper", "downdated"])
def test_diagnostics_can_be_switched_off(estimator, tmp_path):
    model, data = grouped_net(5), images(20, 5)
    posterior = engram.laplace(
        model, data, structure="kronecker", prior_precision=1.0, progress=False
    )
    given = {"estimator": estimator, "progress": False}
    whole = engram.sensitivities(model, data, posterior, **given)
    bare = engram.sensitivities(model, data, posterior, diagnostics=False, **given)
    for name in ("deviation", "score", "loss", "loo_loss", "flagged"):
        assert torch.equal(getattr(bare, name), getattr(whole, name)), name
    assert bare.leverage.isnan().all()
    assert whole.diagnostics.computed
    assert not bare.diagnostics.computed
    assert bare.diagnostics.parameters_exact == whole.diagnostics.parameters_exact
    assert "diagnostics           none" in repr(bare)
    assert "nan" not in repr(bare)
    assert bare.verdict.level == "caution"
    (reason,) = [r for r in bare.verdict.reasons if r.signal == "diagnostics"]
    assert "nothing is known to judge it by" in str(reason)
    assert "diagnostics=False" in reason.remedy
    assert bare.verdict.counts["good"] == 0
    again = engram.load(bare.save(tmp_path / "bare"))
    assert repr(again) == repr(bare)
    assert bare.report(tmp_path / "page.html").is_file()


def test_an_assessment_of_a_result_without_diagnostics_is_no_better():
    model, data = grouped_net(5), images(20, 5)
    posterior = engram.laplace(
        model, data, structure="kronecker", prior_precision=1.0, progress=False
    )
    bare = linear(model, data, posterior, diagnostics=False)
    found = engram.assess(model, data, bare, posterior, progress=False)
    assert "diagnostics" in {reason.signal for reason in found.verdict.reasons}
    assert found.level != "good"


def test_the_switch_is_a_bool():
    model, data = grouped_net(5), images(6, 5)
    posterior = engram.laplace(
        model, data, structure="diagonal", prior_precision=1.0, progress=False
    )
    with pytest.raises(ArgumentError, match="diagnostics"):
        linear(model, data, posterior, diagnostics="no")


def test_a_tracker_can_do_without():
    torch.manual_seed(0)
    model, data = nn.Linear(4, 3), (torch.randn(30, 4), torch.randint(0, 3, (30,)))
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=0.1)
    nn.functional.cross_entropy(model(data[0]), data[1]).backward()
    optimizer.step()
    tracker = engram.Tracker(model, optimizer, data)
    with_them, without = tracker.update(), tracker.update(diagnostics=False)
    assert torch.equal(with_them.loo_loss, without.loo_loss)
    assert len(tracker.history.records[0].leverage) == 5
    assert tracker.history.records[1].leverage == ()
    assert not without.diagnostics.computed
