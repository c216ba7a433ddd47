"""The variational mixture: an optimum, and removing from it against fitting again."""

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.mixture import BayesianGaussianMixture

from engram.errors import ArgumentError, DataError, PosteriorError
from engram.families import GaussianMixture, NormalInverseWishart, VariationalGaussianMixture

CENTRES = np.array([[-2.5, 0.0], [2.0, 1.5], [1.0, -3.0]])
MIXTURE = GaussianMixture([1.0, 1.0, 1.0], NormalInverseWishart([0.0, 0.0], 0.1, 3.0, 1.0))


@pytest.fixture(scope="module")
def points():
    random = np.random.default_rng(0)
    return CENTRES[random.integers(0, 3, 120)] + random.normal(size=(120, 2))


@pytest.fixture(scope="module")
def fitted(points):
    return VariationalGaussianMixture(MIXTURE).fit(points)


def test_equals_scikit_learn_at_its_optimum(points, fitted):
    """Its coordinate ascent, started from our responsibilities, stays where it is."""
    alpha, mean, kappa, dof, scale = (v.numpy() for v in fitted.standard().values())
    peer = BayesianGaussianMixture(
        n_components=3,
        weight_concentration_prior_type="dirichlet_distribution",
        weight_concentration_prior=1.0,
        mean_precision_prior=0.1,
        mean_prior=np.zeros(2),
        degrees_of_freedom_prior=3.0,
        covariance_prior=np.eye(2),
        reg_covar=0.0,
        tol=1e-12,
        max_iter=5000,
        random_state=0,
    ).fit(points)
    order = np.argsort(mean[:, 0])
    theirs = np.argsort(peer.means_[:, 0])
    assert np.allclose(mean[order], peer.means_[theirs], atol=1e-4)
    assert np.allclose(alpha[order], peer.weight_concentration_[theirs], atol=1e-3)
    assert np.allclose((scale / dof[:, None, None])[order], peer.covariances_[theirs], atol=1e-4)
    assert np.allclose(kappa[order], peer.mean_precision_[theirs], atol=1e-3)


def test_is_a_fixed_point(fitted):
    """Its responsibilities are those that the expected log densities give."""
    alpha, mean, kappa, dof, scale = (v.numpy() for v in fitted.standard().values())
    points, responsibilities = (v.numpy() for v in fitted.observations)
    logs = np.empty_like(responsibilities)
    random = np.random.default_rng(0)
    for k in range(3):
        sigmas = stats.invwishart(dof[k], scale[k]).rvs(3000, random_state=random)
        noise = random.normal(size=(3000, 2))
        mus = mean[k] + np.einsum("nab,nb->na", np.linalg.cholesky(sigmas), noise) / kappa[k] ** 0.5
        gaps = points[:, None] - mus
        square = np.einsum("nsa,sab,nsb->ns", gaps, np.linalg.inv(sigmas), gaps).mean(1)
        logs[:, k] = -0.5 * (square + np.linalg.slogdet(sigmas)[1].mean())
        logs[:, k] += np.log(stats.dirichlet(alpha).rvs(20_000, random_state=random)[:, k]).mean()
    expected = np.exp(logs - logs.max(1, keepdims=True))
    expected /= expected.sum(1, keepdims=True)
    assert abs(expected - responsibilities).max() < 0.02


def test_removing_one_estimates_refitting(fitted):
    """An estimate: the others' responsibilities stay, so it falls a little short."""
    loo = fitted.loo_log_predictive()
    inside = fitted.log_predictive(fitted.observations[0])
    true, cosines = [], []
    for i in range(25):
        refitted = fitted.family.refit(fitted, [i])
        own = fitted.observations[0][i : i + 1]
        true.append(float(refitted.log_predictive(own)))
        moves = [
            torch.cat([(s.natural[n] - fitted.natural[n]).ravel() for n in fitted.natural])
            for s in (refitted, fitted.remove([i]))
        ]
        cosines.append(float(torch.nn.functional.cosine_similarity(*moves, 0)))
    estimated, true = (loo - inside)[:25].numpy(), np.array(true) - inside[:25].numpy()
    assert stats.pearsonr(estimated, true).statistic > 0.9
    assert stats.spearmanr(estimated, true).statistic > 0.9
    assert 0.7 < estimated.sum() / true.sum() < 1
    assert np.median(cosines) > 0.95


def test_the_estimate_is_exact_where_components_do_not_overlap():
    random = np.random.default_rng(1)
    points = 40 * CENTRES[random.integers(0, 3, 60)] + random.normal(size=(60, 2))
    fitted = VariationalGaussianMixture(MIXTURE).fit(points)
    refitted, removed = fitted.family.refit(fitted, [1, 5, 8]), fitted.remove([1, 5, 8])
    for name, value in removed.natural.items():
        assert torch.allclose(value, refitted.natural[name], rtol=1e-9, atol=1e-9)


def test_weights_count_as_copies(points):
    family = VariationalGaussianMixture(MIXTURE)
    copies = family.fit(np.concatenate([points, points]))
    weighted = family.refit(family.fit(points), weights=-np.ones(120))
    first = weighted.log_predictive(points)
    assert torch.allclose(first, copies.log_predictive(points), atol=1e-6)


def test_the_global_random_state_is_untouched(points):
    before = torch.get_rng_state()
    VariationalGaussianMixture(MIXTURE, seed=3).fit(points[:20])
    assert torch.equal(before, torch.get_rng_state())


def test_bad_input(points, fitted):
    family = VariationalGaussianMixture(MIXTURE, max_rounds=2)
    with pytest.raises(PosteriorError, match="convergence within 2 rounds"):
        family.fit(points)
    with pytest.raises(DataError, match="not negative"):
        family.fit(points, -np.ones(120))
    with pytest.raises(PosteriorError, match="more taken out than was in"):
        fitted.family.refit(fitted, [0], weights=[1.5])
    with pytest.raises(PosteriorError, match="an overflow"):
        family.fit(points, np.full(120, 1e308))
    with pytest.raises(ArgumentError, match="out of range"):
        fitted.family.refit(fitted, [120])
