"""Leave-group-out against the dense reference: parameters, group and test set."""

import pytest
import torch

import engram
from cases import CASES, MLP
from dense_deviation import deviations, remove_group, variance
from fitted import assert_close, posterior, precision

INDICES = [1, 4, 5]
CALM_PRIOR = 40.0
"""Strong enough that no structure's S contradicts the group, so that no guard acts."""
NAMES = (
    "mlp",
    "mlp_poisson",
    "mlp_gaussian",
    "mlp_from_loss",
    "conv2d_groups",
    "embedding",
    "vision_transformer",
    "used_twice",
    "tied_embedding",
    "two_inputs",
    "named_inputs",
    "frozen_layer",
    "batch_norm2d",
    "lstm",
    "in_place_residual",
    "weight_norm",
)
STRUCTURES = ("diagonal", "kronecker", "full")


def remove(case, fitted, **settings):
    settings = {"indices": INDICES, "evaluate_on": case.test_data, "at": "displaced", **settings}
    return engram.remove(case.model, case.data, fitted, progress=False, **settings)


def check_effect(effect, dense, rows, moved, at):
    without = moved.outputs_without(dense, at)[rows]
    outputs, targets = dense.outputs[rows], dense.targets[rows]
    losses = dense.likelihood.losses(outputs, targets)
    losses_without = dense.likelihood.losses(without, targets)
    assert_close(effect.outputs, outputs)
    assert_close(effect.outputs_without, without)
    assert_close(effect.loss, losses)
    assert_close(effect.loss_without, losses_without)
    change = float((losses_without - losses).mean())
    assert float(effect.change) == pytest.approx(change, rel=1e-7, abs=1e-10)


def assert_agrees(case, removal, expected_precision, weights, estimator, at):
    moved = remove_group(case.dense, expected_precision, weights, estimator)
    parts = {name: torch.zeros_like(p) for name, p in case.dense.parameters.items()}
    parts.update(removal.delta)
    assert_close(case.dense.flatten(parts), moved.delta)
    check_effect(removal.group, case.dense, INDICES, moved, at)
    check_effect(removal.evaluation, case.dense_test, slice(None), moved, at)


def group_weights(values=1.0):
    weights = torch.zeros(7).double()
    weights[INDICES] = torch.as_tensor(values).double()
    return weights


@pytest.mark.parametrize(
    ("estimator", "at"), [("linear", "linearised"), ("corrected", "displaced")]
)
@pytest.mark.parametrize(
    ("name", "structure"), [(n, s) for n in NAMES for s in STRUCTURES if s in CASES[n].structures]
)
def test_against_the_dense_reference(name, structure, estimator, at):
    case = CASES[name]
    fitted = posterior(name, structure, prior_precision=CALM_PRIOR)
    expected = precision(name, structure, prior_precision=CALM_PRIOR)
    removal = remove(case, fitted, estimator=estimator, at=at)
    assert_agrees(case, removal, expected, group_weights(), estimator, at)
    assert list(removal.indices) == INDICES


@pytest.mark.parametrize("estimator", ["linear", "corrected"])
@pytest.mark.parametrize("structure", ["isotropic", "ekfac", "last_layer"])
def test_other_structures(structure, estimator):
    fitted = posterior("mlp", structure, prior_precision=CALM_PRIOR)
    expected = precision("mlp", structure, prior_precision=CALM_PRIOR)
    removal = remove(MLP, fitted, estimator=estimator)
    assert_agrees(MLP, removal, expected, group_weights(), estimator, "displaced")


@pytest.mark.parametrize("estimator", ["linear", "corrected"])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("values", [(0.5, 0.1, 1.0), (-1.0, 0.3, -0.2), (-2.0, -2.0, -2.0)])
def test_weights_perturb(values, structure, estimator):
    fitted = posterior("mlp", structure, prior_precision=CALM_PRIOR)
    expected = precision("mlp", structure, prior_precision=CALM_PRIOR)
    removal = remove(MLP, fitted, estimator=estimator, weights=torch.tensor(values))
    assert_agrees(MLP, removal, expected, group_weights(values), estimator, "displaced")


def test_a_small_weight_gives_the_influence():
    """delta(eps) / eps -> S^-1 grad, the derivative at zero, for both estimators."""
    fitted = posterior("mlp", "full")
    exact = precision("mlp", "full").covariance @ MLP.dense.gradients[2]
    removal = remove(MLP, fitted, indices=[2], weights=[1e-6], estimator="corrected")
    assert_close(MLP.dense.flatten(removal.delta) / 1e-6, exact, 1e-5)


def test_a_group_of_one_is_the_corrected_sensitivity():
    fitted = posterior("mlp", "full")
    expected = deviations(MLP.dense, precision("mlp", "full"), "corrected")
    removal = remove(MLP, fitted, indices=[3], at="linearised")
    moved = removal.group.outputs_without - removal.group.outputs
    assert_close(moved, expected.deviation[[3]])


@pytest.mark.parametrize("name", ["mlp_bernoulli", "mlp_gaussian_one"])
def test_paper_has_no_cross_terms(name):
    """With one output, d_i = V_ii e_i for the group's own examples."""
    case = CASES[name]
    removal = remove(case, posterior(name, "diagonal"), estimator="paper", evaluate_on=None)
    expected = deviations(case.dense, precision(name, "diagonal"), "paper").deviation[INDICES]
    assert_close(removal.group.outputs_without - removal.group.outputs, expected)
    assert removal.evaluation is None
    assert not removal.delta


def test_a_contradicted_group_is_guarded():
    """The whole data set under a diagonal S: S minus the group's GGN is not positive definite."""
    fitted = posterior("mlp_gaussian", "diagonal", prior_precision=1e-3)
    case = CASES["mlp_gaussian"]
    spread = variance(case.dense, precision("mlp_gaussian", "diagonal", prior_precision=1e-3))
    assert torch.linalg.eigvals(spread @ case.dense.output_hessian).real.max() > 1
    removal = remove(case, fitted, indices=list(range(7)), at="linearised", estimator="corrected")
    assert removal.flagged
    assert torch.isfinite(case.dense.flatten(removal.delta)).all()


def test_the_whole_data_set_leaves_the_prior():
    """With the full GGN, S without all data is delta I: the delta is grad / delta."""
    fitted = posterior("mlp", "full")
    removal = remove(MLP, fitted, indices=list(range(7)), weights=[0.9] * 7)
    gradient = 0.9 * MLP.dense.gradients.sum(0)
    without = precision("mlp", "full").matrix - 0.9 * MLP.dense.ggn()
    expected = torch.linalg.solve(without, gradient)
    assert_close(MLP.dense.flatten(removal.delta), expected)


@pytest.mark.parametrize("estimator", ["linear", "corrected"])
def test_each_class_is_a_group(estimator):
    fitted = posterior("mlp", "kronecker", prior_precision=CALM_PRIOR)
    expected = precision("mlp", "kronecker", prior_precision=CALM_PRIOR)
    classes = engram.remove_classes(
        MLP.model,
        MLP.data,
        fitted,
        evaluate_on=MLP.test_data,
        estimator=estimator,
        at="displaced",
    )
    present = MLP.dense.targets.unique().tolist()
    assert sorted(classes) == present
    assert len(classes.to_frame()) == len(present)
    for label in present:
        members = MLP.dense.targets == label
        moved = remove_group(MLP.dense, expected, members.double(), estimator)
        assert list(classes[label].indices) == members.nonzero()[:, 0].tolist()
        assert_close(MLP.dense.flatten(dict(classes[label].delta)), moved.delta)
        check_effect(classes[label].group, MLP.dense, members, moved, "displaced")
        check_effect(classes[label].evaluation, MLP.dense_test, slice(None), moved, "displaced")


@pytest.mark.parametrize("batch_size", [1, 2, 7])
def test_batches_do_not_matter(batch_size):
    fitted = posterior("mlp", "full")
    removal = remove(MLP, fitted, batch_size=batch_size)
    expected = precision("mlp", "full")
    assert_agrees(MLP, removal, expected, group_weights(), "corrected", "displaced")
