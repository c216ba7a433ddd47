"""The exact curvature in some directions: closed forms, and equality where all are explored."""

import math

import pytest
import torch
from torch import nn

import engram
from cases import CASES, MLP
from engram.core.parameters import Layout
from engram.errors import ArgumentError, PosteriorError
from engram.linalg.low_rank import LowRankBlock
from engram.posteriors import laplace as affordable
from engram.posteriors import low_rank_fit
from engram.sensitivity.estimators import newton
from fitted import assert_close, posterior, precision, random_vectors, sensitivities
from minima import to_minimum

NAMES = ("mlp", "mlp_poisson", "one_output_vector", "conv2d_groups", "positions", "embedding")
DELTA = 2.0


def hessian_prior(name: str) -> float:
    return max(1.0, 1.0 - float(torch.linalg.eigvalsh(CASES[name].dense.hessian).min()))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
def test_with_every_direction_it_is_the_full_matrix(name, curvature):
    case, prior = CASES[name], hessian_prior(name)
    fitted = posterior(name, "low_rank", curvature, prior)
    expected = precision(name, "full", curvature, prior)
    vectors = random_vectors(case, 3)
    flat = case.dense.flatten(vectors)
    assert_close(case.dense.flatten(fitted.solve(vectors)), flat @ expected.covariance)
    assert_close(case.dense.flatten(fitted.multiply(vectors)), expected.multiply(flat))
    assert fitted.log_det() == pytest.approx(expected.log_det(), rel=1e-9)
    assert fitted.settings["low_rank"]["rank"] == case.dense.num_params


@pytest.mark.parametrize("estimator", ["linear", "corrected", "iterated", "paper", "newton"])
def test_every_rule_agrees_with_the_full_matrix(estimator):
    prior = hessian_prior("mlp") + 5.0
    ours = sensitivities(MLP, posterior("mlp", "low_rank", "hessian", prior), estimator=estimator)
    full = sensitivities(MLP, posterior("mlp", "full", "hessian", prior), estimator=estimator)
    assert_close(ours.deviation, full.deviation)
    assert_close(ours.loo_loss, full.loo_loss)


@pytest.mark.parametrize("estimator", ["linear", "corrected"])
def test_leaving_a_group_out_agrees_with_the_full_matrix(estimator):
    ours, full = (
        engram.remove(
            MLP.model,
            MLP.data,
            posterior("mlp", structure),
            [0, 2],
            estimator=estimator,
            progress=False,
        )
        for structure in ("low_rank", "full")
    )
    for name, change in full.delta.items():
        assert_close(ours.delta[name], change)


def cut_block(size=12, rank=5, rest=1.5):
    """A block of a random precision, and what it stands for, built as a matrix."""
    torch.manual_seed(0)
    root = torch.randn(size, size).double()
    exact = root @ root.mT + torch.eye(size).double()
    basis = torch.linalg.qr(torch.randn(size, rank).double())[0]
    inside, turn = torch.linalg.eigh(basis.mT @ exact @ basis)
    basis = basis @ turn
    image = exact @ basis
    beyond = torch.eye(size).double() - basis @ basis.mT
    layout = Layout(("weight",), (torch.Size([size]),))
    block = LowRankBlock(layout, basis, inside, beyond @ image, rest)
    return block, image @ torch.diag(1 / inside) @ image.mT + rest * beyond


def test_a_cut_block_is_its_matrix():
    block, dense = cut_block()
    rows = torch.randn(4, 12).double()
    named = {"weight": rows}
    assert_close(block.multiply(named)["weight"], rows @ dense)
    assert_close(block.solve(named)["weight"], torch.linalg.solve(dense, rows.mT).mT)
    assert_close(block.inner_products(named), rows @ torch.linalg.solve(dense, rows.mT))
    assert block.log_det() == pytest.approx(float(torch.logdet(dense)), rel=1e-10)
    root = block.root_solve({"weight": torch.eye(12).double()})["weight"]
    assert_close(root.mT @ root, torch.linalg.inv(dense))
    assert_close(block.scaled(3.0).multiply(named)["weight"], 3 * rows @ dense)
    within = block.only_kept().inner_products(named)
    assert_close(within, rows @ block.basis / block.inside @ (rows @ block.basis).mT)


def trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x = torch.randn(60, 6).double()
    data = (x, (x[:, :3] + 0.7 * torch.randn(60, 3).double()).argmax(1))
    to_minimum(model, data, DELTA)
    return model, data


@pytest.fixture
def few_directions(monkeypatch):
    monkeypatch.setattr(low_rank_fit, "WHOLE", 10)
    monkeypatch.setattr(low_rank_fit, "LEADING", 20)
    monkeypatch.setattr(low_rank_fit, "SMALLEST_OWN", 0.02)
    monkeypatch.setattr(low_rank_fit, "PROBES", 4)


def test_a_cut_fit_agrees_with_the_hessian_on_its_directions(few_directions):
    model, data = trained()
    fitted = engram.laplace(
        model, data, structure="low_rank", curvature="hessian", prior_precision=DELTA
    )
    exact = engram.laplace(
        model, data, structure="full", curvature="hessian", prior_precision=DELTA
    )
    block = fitted.blocks[0]
    assert 20 < block.rank < 83
    columns = block.layout.unflatten(block.basis.mT.double())
    ours, dense = (block.layout.flatten(p.multiply(columns)) for p in (fitted, exact))
    assert float((ours - dense).norm() / dense.norm()) < 1e-4  # products in single precision
    record = fitted.settings["low_rank"]
    whole = exact.blocks[0].cholesky.square().sum() - 83 * DELTA  # the trace of the Hessian
    assert record["kept_trace"] + record["remaining_trace"] == pytest.approx(float(whole), rel=0.05)
    assert record["rest"] >= DELTA


def test_a_cut_fit_is_near_the_exact_newton_steps(few_directions):
    model, data = trained()
    fitted = engram.laplace(
        model, data, structure="low_rank", curvature="hessian", prior_precision=DELTA
    )
    exact = engram.laplace(model, data, curvature="hessian", prior_precision=DELTA)
    ours, dense = (engram.sensitivities(model, data, p, progress=False) for p in (fitted, exact))
    assert ours.provenance["settings"]["estimator"] == "newton"
    joint = torch.stack([ours.score, dense.score])
    assert float(torch.corrcoef(joint)[0, 1]) > 0.995
    assert float(ours.score.mean() / dense.score.mean()) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
def test_a_group_is_completed_by_exact_products(curvature, few_directions):
    model, data = trained()
    fits = [
        engram.laplace(model, data, structure=structure, curvature=curvature, prior_precision=DELTA)
        for structure in ("low_rank", "full")
    ]
    ours, dense = (
        engram.remove(model, data, fit, range(10), estimator="corrected", progress=False)
        for fit in fits
    )
    assert ours.matrix == "exact Gauss-Newton matrix of the remaining data"
    for name, change in dense.delta.items():
        torch.testing.assert_close(ours.delta[name], change, rtol=1e-3, atol=1e-5)


def test_long_steps_are_shortened_where_the_curvature_is_the_examples_own(
    few_directions, monkeypatch
):
    model, data = trained()
    fitted = engram.laplace(
        model, data, structure="low_rank", curvature="hessian", prior_precision=DELTA
    )
    monkeypatch.setattr(newton, "LARGEST_GAIN", 1e9)
    free = engram.sensitivities(model, data, fitted, progress=False)
    monkeypatch.setattr(newton, "LARGEST_GAIN", 0.2)
    cautious = engram.sensitivities(model, data, fitted, progress=False)
    monkeypatch.setattr(newton, "MOSTLY_OWN", 0.0)
    short = engram.sensitivities(model, data, fitted, progress=False)
    residual = free.outputs.softmax(1) - torch.nn.functional.one_hot(data[1], 3)
    gain, floor = ((residual * r.deviation).sum(1) for r in (short, cautious))
    along = torch.nn.CosineSimilarity()(short.deviation, free.deviation)
    definite = ~torch.isclose(gain, floor)
    assert definite.double().mean() > 0.5
    assert torch.allclose(gain[definite], 0.2 * floor[definite], rtol=1e-6)
    assert torch.allclose(along[definite], torch.ones_like(along[definite]))


def test_samples_of_a_cut_fit_have_its_covariance(few_directions):
    model, data = trained()
    fitted = engram.laplace(model, data, structure="low_rank", prior_precision=DELTA)
    draws = fitted.sample(4000, torch.Generator().manual_seed(0))
    centred = {name: value - fitted.mean[name] for name, value in draws.items()}
    layout = fitted.blocks[0].layout
    lengths = (layout.flatten(centred) * layout.flatten(fitted.multiply(centred))).sum(1)
    assert abs(lengths.mean() - 83) < 5 * math.sqrt(2 * 83 / 4000)


def test_refining_by_retraining_starts_from_it(few_directions):
    model, data = trained()
    fitted = engram.laplace(
        model, data, structure="low_rank", curvature="hessian", prior_precision=DELTA
    )
    result = engram.sensitivities(model, data, fitted, progress=False)
    refined = engram.refine(
        model, data, result, fitted, indices=[0, 5], method="retrain", progress=False
    )
    truth = engram.retrain(model, data, [0, 5], prior_precision=DELTA, progress=False)
    assert_close(refined.deviation[[0, 5]], truth.deviation, 0.02)


def test_it_is_the_default_above_the_full_matrix_and_says_what_it_takes(monkeypatch, capsys):
    monkeypatch.setattr(affordable, "FULL_PARAMETERS", 10)
    model, data = trained()
    fitted = engram.laplace(model, data, prior_precision=DELTA)
    assert fitted.structure == "low_rank"
    assert fitted.curvature == "hessian"
    assert f"directions, a pass over {len(data[0]):,} examples each" in capsys.readouterr().err
    engram.laplace(model, data, prior_precision=DELTA, progress=False)
    engram.laplace(model, data, prior_precision=DELTA, structure="low_rank", curvature="hessian")
    assert capsys.readouterr().err == ""


def test_other_layers_than_linear_ones_and_convolutions_keep_kronecker_factors(monkeypatch):
    monkeypatch.setattr(affordable, "FULL_PARAMETERS", 10)
    _, data = trained()
    model = nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.Linear(8, 3)).double()
    assert engram.laplace(model, data, prior_precision=DELTA).structure == "kronecker"


@pytest.mark.parametrize("curvature", ["ggn", "fisher", "empirical"])
def test_another_curvature_keeps_kronecker_factors(curvature, monkeypatch):
    monkeypatch.setattr(affordable, "FULL_PARAMETERS", 10)
    model, data = trained()
    fitted = engram.laplace(model, data, curvature=curvature, prior_precision=DELTA)
    assert fitted.structure == "kronecker"


def test_where_the_hessian_is_not_definite_kronecker_factors_are_the_default(monkeypatch):
    monkeypatch.setattr(affordable, "FULL_PARAMETERS", 10)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    data = (4 * torch.randn(60, 4), torch.randint(0, 3, (60,)))
    assert engram.laplace(model, data, prior_precision=1e-3).structure == "kronecker"
    with pytest.raises(PosteriorError, match="positive-definite"):
        engram.laplace(model, data, structure="low_rank", curvature="hessian", prior_precision=1e-3)


@pytest.mark.parametrize("curvature", ["fisher", "empirical"])
def test_it_has_exact_products_only(curvature):
    model, data = trained()
    with pytest.raises(ArgumentError, match="low_rank"):
        engram.laplace(model, data, structure="low_rank", curvature=curvature, prior_precision=1.0)
