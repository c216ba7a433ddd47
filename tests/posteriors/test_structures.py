"""S v, S^-1 v and log det S of every structure against dense matrices."""

import math

import pytest
import torch

import engram
from cases import BY_LIKELIHOOD, CASES, MLP
from engram.linalg import kronecker_factors
from fitted import PARAMETERS, assert_close, posterior, precision, random_vectors

WITH_LAST_LAYER = (
    "mlp",
    "mlp_without_bias",
    "positions",
    "conv2d_groups",
    "frozen_layer",
    "attention_fused",
    "two_inputs",
    "one_output_vector",
)
CURVATURES = [
    (name, structure, "empirical")
    for name in ("mlp", "mlp_without_bias", "conv2d_groups", "positions", "embedding")
    for structure in ("isotropic", "diagonal", "kronecker", "ekfac", "full", "last_layer")
]
BY_STRUCTURE = (
    PARAMETERS
    + [(name, "last_layer") for name in WITH_LAST_LAYER]
    + [(case.name, "last_layer") for case in BY_LIKELIHOOD]
)
ALL = [(name, structure, "ggn") for name, structure in BY_STRUCTURE] + CURVATURES


def hessian_prior(name: str) -> float:
    """Enough to make the Hessian positive definite, whatever the network."""
    lowest = float(torch.linalg.eigvalsh(CASES[name].dense.hessian).min())
    return max(1.0, 1.0 - lowest)


@pytest.mark.parametrize(("name", "structure", "curvature"), ALL)
def test_solve_multiply_and_log_determinant(name, structure, curvature):
    case = CASES[name]
    fitted, expected = posterior(name, structure, curvature), precision(name, structure, curvature)
    vectors = random_vectors(case, 3)
    flat = case.dense.flatten(vectors)
    assert_close(case.dense.flatten(fitted.solve(vectors)), flat @ expected.covariance)
    assert_close(case.dense.flatten(fitted.multiply(vectors)), expected.multiply(flat))
    assert fitted.log_det() == pytest.approx(expected.log_det(), rel=1e-9)


@pytest.mark.parametrize("name", ["mlp", "mlp_poisson", "mlp_from_loss", "conv1d", "layer_norm"])
@pytest.mark.parametrize("structure", ["full", "last_layer"])
def test_exact_hessian(name, structure):
    case, prior = CASES[name], hessian_prior(name)
    fitted = posterior(name, structure, "hessian", prior)
    expected = precision(name, structure, "hessian", prior)
    vectors = random_vectors(case, 2)
    flat = case.dense.flatten(vectors)
    assert_close(case.dense.flatten(fitted.solve(vectors)), flat @ expected.covariance)
    assert fitted.log_det() == pytest.approx(expected.log_det(), rel=1e-9)


@pytest.mark.parametrize("structure", ["isotropic", "diagonal", "full"])
def test_sampled_fisher_averages_to_the_ggn(structure):
    """The mean curvature over seeds, by the trace of S, within five standard errors."""
    traces = []
    for seed in range(60):
        fitted = engram.laplace(
            MLP.model,
            MLP.data,
            structure=structure,
            curvature="fisher",
            seed=seed,
            progress=False,
            prior_precision=1.0,
        )
        eye = torch.eye(MLP.dense.num_params).double()
        product = MLP.dense.flatten(fitted.multiply(MLP.dense.unflatten(eye)))
        traces.append(product.trace() - MLP.dense.num_params)
    sampled = torch.stack(traces)
    exact = MLP.dense.ggn().trace()
    assert abs(sampled.mean() - exact) < 5 * sampled.std() / math.sqrt(len(traces))


def test_sampled_fisher_repeats_with_the_seed():
    first, second, other = (
        engram.laplace(
            MLP.model, MLP.data, curvature="fisher", seed=seed, progress=False, prior_precision=1.0
        )
        for seed in (1, 1, 2)
    )
    assert first.log_det() == second.log_det()
    assert first.log_det() != other.log_det()


@pytest.mark.parametrize("name", ["conv1d", "conv_transpose2d", "embedding"])
@pytest.mark.parametrize("structure", ["isotropic", "diagonal", "kronecker", "ekfac", "full"])
def test_batches_do_not_matter(structure, name):
    expected = posterior(name, structure)
    case = CASES[name]
    fitted = engram.laplace(
        case.model,
        case.data,
        likelihood=case.public_likelihood,
        structure=structure,
        prior_precision=case.prior_precision,
        batch_size=2,
        progress=False,
    )
    vectors = random_vectors(case, 2)
    assert_close(
        case.dense.flatten(fitted.solve(vectors)),
        case.dense.flatten(expected.solve(vectors)),
        1e-11,
    )


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "ekfac", "full", "last_layer"])
def test_leading_dimensions_are_kept(structure):
    fitted = posterior("mlp", structure)
    vectors = random_vectors(MLP, 6)
    solved = fitted.solve(vectors)
    reshaped = {name: v.reshape(2, 3, *v.shape[1:]) for name, v in vectors.items()}
    alone = {name: v[0] for name, v in vectors.items()}
    for name, value in fitted.solve(reshaped).items():
        assert_close(value.reshape(solved[name].shape), solved[name], 1e-12)
    for name, value in fitted.solve(alone).items():
        assert_close(value, solved[name][0], 1e-12)


def test_parameters_not_covered_come_back_as_zeros():
    fitted = posterior("mlp", "last_layer")
    assert set(fitted.names) == {"head.weight", "head.bias"}
    solved = fitted.solve(random_vectors(MLP, 2))
    assert not solved["body.0.weight"].any()
    assert solved["head.weight"].any()


@pytest.mark.parametrize("structure", ["isotropic", "diagonal", "kronecker", "ekfac", "full"])
def test_samples_have_the_posterior_mean_and_covariance(structure):
    """Each sample standardised by S has expected squared length P."""
    fitted, draws = posterior("mlp", structure), 4000
    samples = fitted.sample(draws, torch.Generator().manual_seed(0))
    centred = {name: value - fitted.mean[name] for name, value in samples.items()}
    flat = MLP.dense.flatten(centred)
    exact = precision("mlp", structure)
    lengths = torch.einsum("np,pq,nq->n", flat, exact.matrix, flat)
    num_params = MLP.dense.num_params
    assert abs(lengths.mean() - num_params) < 5 * math.sqrt(2 * num_params / draws)
    deviations = exact.covariance.diagonal().sqrt()
    assert (flat.mean(0).abs() < 5 * deviations / math.sqrt(draws)).all()


def test_a_posterior_describes_itself():
    fitted = posterior("frozen_layer", "kronecker")
    model = CASES["frozen_layer"].model
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert isinstance(fitted, engram.Posterior)
    assert (fitted.structure, fitted.num_data) == ("kronecker", 7)
    assert fitted.prior_precision == CASES["frozen_layer"].prior_precision
    assert set(fitted.names) == trained
    for name in trained:
        assert torch.equal(fitted.mean[name], model.get_parameter(name))


def test_a_posterior_is_frozen():
    with pytest.raises(AttributeError):
        posterior("mlp", "diagonal").prior_precision = 2.0


def test_wide_factors_say_that_they_take_long(monkeypatch):
    monkeypatch.setattr(kronecker_factors, "SLOW_EIGENVECTORS", 5)
    with pytest.warns(UserWarning, match="eigenvectors of a Kronecker factor with 5 rows"):
        engram.laplace(
            MLP.model, MLP.data, structure="kronecker", progress=False, prior_precision=1.0
        )
