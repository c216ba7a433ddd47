"""assess: every signal against a dense answer, the verdict, and bad input."""

import pytest
import torch
from scipy.linalg import eigvalsh
from torch import nn

import engram
from engram.engine.session import session
from engram.errors import ArgumentError, ModelMismatchError, StorageError
from engram.evidence.assess import _spent
from engram.evidence.signals import Objective, displacement, second_steps, spectrum
from engram.likelihoods import Gaussian
from recorded_training import recorded
from retraining_problems import PRIOR_PRECISION, RIDGE, ridge_problem
from saved_folders import edit
from trust_problems import DELTA, dense_hessian, judged, saddle, trained, untrained


def assessed(model, data, result, posterior, **settings):
    return engram.assess(model, data, result, posterior, progress=False, **settings)


@pytest.mark.parametrize("structure", ["full", "kronecker", "diagonal"])
def test_spectrum_against_the_dense_one(structure):
    model, data = untrained()
    _, posterior = judged(model, data, structure, 1.0)
    with session(model, data, "categorical", progress=False) as opened:
        objective = Objective(opened, posterior)
        found = spectrum(objective, 60, 0, False)
        identity = torch.eye(objective.layout.num_params, dtype=torch.float64)
        precision = objective.multiply(identity)
        product = objective.hessian @ identity
    dense = dense_hessian(model, data, 1.0)
    torch.testing.assert_close(product, dense)
    values = eigvalsh(dense.numpy(), precision.numpy())
    assert found.smallest == pytest.approx(values[0], rel=1e-6)
    assert found.largest == pytest.approx(values[-1], rel=1e-6)


def test_second_steps_against_the_dense_solution():
    model, data = trained()
    _, posterior = judged(model, data, "kronecker", DELTA)
    chosen = torch.tensor([3, 17])
    with session(model, data, "categorical", progress=False) as opened:
        objective = Objective(opened, posterior)
        steps = second_steps(objective, chosen, 60, False)
        observed = opened.observe(opened.batches.take(chosen))
        gradients = observed.trace.own_gradient_rows(observed.residual, objective.layout)
        first = objective.solve(gradients)
    whole = dense_hessian(model, data, DELTA)
    torch.testing.assert_close(steps.first, first)
    without = [
        whole - dense_hessian(model, (data[0][i, None], data[1][i, None]), 0.0) for i in chosen
    ]
    exact = torch.linalg.solve(without[0], gradients[0])
    assert (steps.second[0] - exact).norm() < 5e-3 * exact.norm()
    indefinite = [bool(torch.linalg.eigvalsh(matrix)[0] < 0) for matrix in without]
    assert steps.negative.tolist() == indefinite == [False, True]


def test_displacement_is_what_the_model_says_there():
    model, data = trained()
    _, posterior = judged(model, data, "full", DELTA)
    with session(model, data, "categorical", progress=False) as opened:
        objective = Objective(opened, posterior)
        step = 0.1 * torch.randn(1, objective.layout.num_params, dtype=torch.float64)
        found = displacement(objective, torch.tensor([4]), step)
        tiny = displacement(objective, torch.tensor([4]), 1e-6 * step)
    before = model(data[0][4:5]).softmax(1)
    nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(model.parameters()) + step[0], model.parameters()
    )
    torch.testing.assert_close(found.displaced, (model(data[0][4:5]).softmax(1) - before).detach())
    assert float(tiny.error) < 1e-4 < float(found.error)


def test_ridge_is_good_and_exact():
    model, x, y = ridge_problem(60)
    result, posterior = judged(
        model, (x, y), "full", PRIOR_PRECISION, likelihood=RIDGE, estimator="corrected"
    )
    found = assessed(model, (x, y), result, posterior)
    assert found.level == "good"
    assert found.reasons == ()
    signals = found.signals
    torch.testing.assert_close(signals.second_score, signals.score)
    assert signals.smallest_curvature == pytest.approx(1.0)
    assert signals.largest_curvature == pytest.approx(1.0)
    assert signals.linearisation < 1e-10
    assert signals.residual < 1e-10


def test_a_saddle_is_found():
    model, data = saddle()
    likelihood = Gaussian()
    result, posterior = judged(model, data, "full", 0.5, likelihood=likelihood)
    assert result.diagnostics.gradient_norm == 0.0  # nothing else gives it away
    found = assessed(model, data, result, posterior)
    # H = delta I plus the off-diagonal sum of -2 x^2, and S = delta I
    expected = 1 - 2 * float((data[0] ** 2).sum()) / 0.5
    assert found.signals.smallest_curvature == pytest.approx(expected)
    assert found.level != "good"
    assert "indefinite" in {reason.signal for reason in found.reasons}


def test_an_unconverged_net_is_unreliable():
    model, data = untrained()
    result, posterior = judged(model, data, "kronecker", 1.0)
    found = assessed(model, data, result, posterior)
    assert found.level == "unreliable"
    assert found.signals.smallest_curvature < 0
    assert all(reason.remedy for reason in found.reasons)


def test_examples_saved_shown_and_model_unchanged(tmp_path):
    model, data = trained()
    result, posterior = judged(model, data, "diagonal", DELTA)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    grads = [p.grad.clone() for p in model.parameters()]
    state = torch.get_rng_state()
    found = assessed(model, data, result, posterior, sample=8, iterations=3)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    assert all(torch.equal(g, p.grad) for g, p in zip(grads, model.parameters(), strict=True))
    assert found.levels.shape == (36,)
    frame = found.to_frame()
    assert len(frame) == 8
    assert set(frame["level"]) <= {"good", "caution", "unreliable"}
    assert "second opinion" in repr(found)
    again = engram.load(found.save(tmp_path / "assessment"))
    assert repr(again) == repr(found)
    assert again.to_frame().equals(frame)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sample": 2}, "a whole sample from 3 to 36"),
        ({"sample": 37}, "a whole sample from 3 to 36"),
        ({"iterations": 0}, "a whole number of iterations from 1"),
        ({"budget": 9}, "a whole budget from 10"),
    ],
)
def test_bad_numbers(settings, message):
    model, data = trained()
    result, posterior = judged(model, data, "diagonal", DELTA)
    with pytest.raises(ArgumentError, match=message):
        assessed(model, data, result, posterior, **settings)


def test_what_does_not_belong_together():
    model, data = trained()
    result, posterior = judged(model, data, "diagonal", DELTA)
    _, other = judged(model, data, "full", DELTA)
    with pytest.raises(ModelMismatchError, match="the posterior that the result"):
        assessed(model, data, result, other)
    fewer = (data[0][:30], data[1][:30])
    with pytest.raises(ModelMismatchError, match="a result on these 30 examples"):
        assessed(model, fewer, result, posterior)
    swapped = (data[0].flip(0), data[1].flip(0))
    with pytest.raises(ModelMismatchError, match="other targets"):
        assessed(model, swapped, result, posterior)
    trained_on, _ = trained(1.0)
    with pytest.raises(ModelMismatchError, match="present weights"):
        assessed(trained_on, data, result, posterior)


CHANGES = [
    lambda content: content.pop("verdict"),
    lambda content: content["verdict"].update(level="splendid"),
    lambda content: content["verdict"].update(level="good"),
    lambda content: content["verdict"].update(reasons=None),
    lambda content: content["verdict"]["reasons"][0].update(level="good"),
    lambda content: content["verdict"]["reasons"][0].pop("remedy"),
    lambda content: content["verdict"]["reasons"][0].update(value="1"),
    lambda content: content["signals"].pop("spearman"),
    lambda content: content["signals"].update(spearman=None),
    lambda content: content["signals"].update(score=[1.0]),
    lambda content: content["signals"].update(more=1.0),
]
TENSORS = [
    lambda tensors: tensors["verdict/levels"].fill_(3),
    lambda tensors: tensors.update({"verdict/levels": torch.ones(36)}),
    lambda tensors: tensors.update({"verdict/levels": torch.ones(4, dtype=torch.int8)}),
    lambda tensors: tensors["signals/positions"].fill_(36),
    lambda tensors: tensors["signals/indices"].fill_(-1),
    lambda tensors: tensors["signals/second_score"].fill_(torch.nan),
    lambda tensors: tensors.update({"signals/score": torch.ones(2)}),
]


def test_damaged_assessments_are_refused(tmp_path):
    model, data = trained()
    result, posterior = judged(model, data, "diagonal", 100 * DELTA)
    found = assessed(model, data, result, posterior, sample=8, iterations=3)
    assert found.level != "good"
    for change in CHANGES:
        edit(found.save(tmp_path), "assessment", change)
        with pytest.raises(StorageError):
            engram.load(tmp_path)
    for change in TENSORS:
        edit(found.save(tmp_path), "assessment", change_tensors=change)
        with pytest.raises(StorageError):
            engram.load(tmp_path)
    (tmp_path / "assessment.json").write_text("{")
    with pytest.raises(StorageError, match="undamaged"):
        engram.load(tmp_path)
    (tmp_path / "file").write_text("{}")
    with pytest.raises(StorageError, match=r"has saved.*assessment\.json.*Not a directory"):
        engram.load(tmp_path / "file")


def test_a_budget_is_kept():
    for budget in (10, 20, 40, 100, 260, 1000):
        spent = _spent(budget, "auto", "auto")
        assert spent.iterations * (spent.sample + 2) <= budget
        assert spent.sample >= 3
    assert _spent("auto", "auto", "auto").sample == 24
    assert _spent(60, 10, "auto").iterations == 5
    assert _spent("auto", "auto", 5).sample == 50


def test_a_training_that_was_stopped_is_held_against_its_own_matrix():
    """Gauss-Newton and training time, as in the posterior: a full one is exact, and said to be."""
    model, data, training = recorded()
    posterior = engram.laplace(
        model, data, training=training, structure="full", curvature="ggn", progress=False
    )
    result = engram.sensitivities(model, data, posterior, progress=False)
    found = engram.assess(model, data, result, posterior, budget=100, progress=False)
    assert found.signals.smallest_curvature == pytest.approx(1, abs=0.05)
    assert found.signals.largest_curvature == pytest.approx(1, abs=0.05)
    assert found.signals.residual < 0.05
    assert not any("minimum" in reason.remedy for reason in found.reasons)
    assert len(found.signals.indices) == 14


def test_nothing_is_judged_by_a_second_opinion_of_the_end_where_the_estimate_went_along(tmp_path):
    model, data, training = recorded()
    posterior = engram.laplace(
        model, data, training=training, structure="kronecker", progress=False
    )
    result = engram.sensitivities(model, data, posterior, progress=False)
    assert result.basis.along
    found = engram.assess(model, data, result, posterior, budget=20, progress=False)
    assert "second opinion is of the end" in " ".join(repr(found).split())
    assert torch.equal(found.levels, result.verdict.levels)
    assert not {"rank_disagreement", "size_disagreement"} & {r.signal for r in found.reasons}
    assert engram.load(found.save(tmp_path)).notes == found.notes
    ended = engram.sensitivities(model, data, posterior, estimator="linear", progress=False)
    assert engram.assess(model, data, ended, posterior, budget=20, progress=False).notes == ()
