"""Linear models: equal to statsmodels where it has the measure, to fitting again everywhere."""

import numpy as np
import pytest
import statsmodels.api as sm
import torch

from engram.models import fit_linear, linear_measures, remove_group, sensitivities_of

NUM_DATA, WIDTH = 30, 4
GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(NUM_DATA, WIDTH)) * [1.0, 10.0, 0.1, 1.0] + [0.0, 5.0, 1.0, 0.0]
Y = X @ [1.0, 0.2, 3.0, -1.0] + GENERATOR.normal(size=NUM_DATA) + 2.0
WEIGHTS = GENERATOR.uniform(0.3, 3.0, NUM_DATA)

SETTINGS = {
    "least squares": {},
    "no intercept": {"intercept": False},
    "weighted": {"weights": WEIGHTS},
    "ridge": {"penalty": 3.0},
    "weighted ridge": {"penalty": [0.5, 3.0, 0.0, 1.0], "weights": WEIGHTS, "offset": X[:, 0]},
}


def without(settings, kept):
    """The settings of some of the examples."""
    of_rows = ("weights", "offset")
    return {k: np.asarray(v)[kept] if k in of_rows else v for k, v in settings.items()}


def refit(settings, left_out, **more):
    kept = np.setdiff1d(np.arange(NUM_DATA), left_out)
    return fit_linear(X[kept], Y[kept], **without(settings, kept), **more)


def assert_close(left, right, tolerance=1e-10):
    left, right = np.asarray(left), np.asarray(right)
    np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
class TestAgainstRefitting:
    def test_parameters_and_dispersion(self, settings):
        fit = fit_linear(X, Y, **settings)
        deviation, measures = fit.parameter_deviation(), linear_measures(fit)
        for i in range(NUM_DATA):
            again = refit(settings, i)
            assert_close(fit.coefficients + deviation[i], again.coefficients)
            assert_close(-deviation[i, 0], measures.dfbeta[i])
            assert_close(measures.dispersion_without[i], again.dispersion)
            ratio = torch.linalg.det(again.covariance) / torch.linalg.det(fit.covariance)
            assert_close(measures.covariance_ratio[i], ratio, 1e-9)

    def test_predictions_in_the_result(self, settings):
        result = sensitivities_of(fit := fit_linear(X, Y, **settings), estimator="corrected")
        press = linear_measures(fit).residual_without
        for i in range(NUM_DATA):
            again = refit(settings, i, dispersion=fit.dispersion)
            offset = settings["offset"][i : i + 1] if "offset" in settings else None
            outputs = again.predictor(X[i : i + 1], offset)
            assert_close(result.outputs[i] + result.deviation[i], outputs[0])
            assert_close(press[i], Y[i] - outputs[0, 0])
            variance = fit.dispersion / settings.get("weights", np.ones(NUM_DATA))[i]
            square = (Y[i] - float(outputs)) ** 2
            assert_close(
                result.loo_loss[i], 0.5 * (square / variance + np.log(2 * np.pi * variance))
            )
        assert not result.flagged.any()

    @pytest.mark.parametrize("share", [-1.0, 0.25, 1.0])
    def test_any_share(self, settings, share):
        fit = fit_linear(X, Y, **settings)
        deviation = fit.parameter_deviation(share)
        weights = np.asarray(settings.get("weights", np.ones(NUM_DATA)))
        for i in (0, 7):
            reweighted = weights.copy()
            reweighted[i] *= 1 - share
            again = fit_linear(X, Y, **{**settings, "weights": reweighted})
            assert_close(fit.coefficients + deviation[i], again.coefficients)

    @pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
    def test_infinitesimal_form(self, settings, share):
        fit = fit_linear(X, Y, **settings)
        step = 1e-5
        upper, lower = (fit.parameter_deviation(share + sign * step) for sign in (1, -1))
        assert_close(fit.parameter_derivative(share), (upper - lower) / (2 * step), 1e-6)

    @pytest.mark.parametrize("group", [[3], [0, 5, 9], list(range(12))], ids=len)
    def test_groups(self, settings, group):
        fit = fit_linear(X, Y, **settings)
        offset = settings.get("offset", np.zeros(NUM_DATA))
        removal = remove_group(fit, group, evaluate_on=(X, Y, offset))
        again = refit(settings, group, dispersion=fit.dispersion)
        assert_close(fit.coefficients + removal.delta["coefficients"], again.coefficients)
        assert_close(removal.evaluation.outputs_without, again.predictor(X, offset))

    def test_reweighted_groups(self, settings):
        fit = fit_linear(X, Y, **settings)
        weights = np.asarray(settings.get("weights", np.ones(NUM_DATA))).copy()
        group, shares = [2, 4, 8], [0.5, -1.0, 1.0]
        weights[group] *= 1 - np.array(shares)
        again = fit_linear(X, Y, **{**settings, "weights": weights})
        removal = remove_group(fit, group, shares=shares)
        assert_close(fit.coefficients + removal.delta["coefficients"], again.coefficients)


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["OLS", "WLS"])
def test_statsmodels(weights):
    unit = np.ones(NUM_DATA) if weights is None else np.sqrt(weights)
    # statsmodels has no influence of WLS; it is that of OLS on rows times the root of the weight
    theirs = sm.OLS(Y * unit, sm.add_constant(X) * unit[:, None]).fit()
    if weights is not None:
        assert_close(theirs.params, sm.WLS(Y, sm.add_constant(X), weights=weights).fit().params)
    influence = theirs.get_influence()
    fit = fit_linear(X, Y, weights=weights)
    ours = linear_measures(fit)
    assert_close(fit.coefficients[0], theirs.params)
    assert_close(fit.standard_errors[0], theirs.bse)
    assert_close(fit.dispersion, theirs.scale)
    assert_close(ours.leverage, influence.hat_matrix_diag)
    assert_close(ours.cooks_distance, influence.cooks_distance[0])
    assert_close(ours.dffits, influence.dffits[0])
    assert_close(ours.dffits_internal, influence.dffits_internal[0])
    assert_close(ours.dfbeta, influence.dfbeta)
    assert_close(ours.dfbetas, influence.dfbetas)
    assert_close(ours.studentised_internal, influence.resid_studentized_internal)
    assert_close(ours.studentised_external, influence.resid_studentized_external)
    press = ours.residual_without.numpy() * unit  # theirs is in weighted units
    assert_close(press, influence.resid_press)
    assert_close((press**2).sum(), influence.ess_press)
    assert_close(ours.covariance_ratio, influence.cov_ratio)
    assert_close(ours.dispersion_without, influence.sigma2_not_obsi)


def test_digits_kept_on_an_ill_conditioned_design():
    data = sm.datasets.longley.load_pandas()
    theirs = sm.OLS(data.endog, sm.add_constant(data.exog)).fit()
    fit = fit_linear(data.exog, data.endog)
    assert_close(fit.coefficients[0], theirs.params, 1e-7)
    assert_close(linear_measures(fit).leverage, theirs.get_influence().hat_matrix_diag, 1e-9)
    assert fit.names[1:] == tuple(data.exog.columns)


def test_frame_and_press():
    measures = linear_measures(fit_linear(X, Y))
    frame = measures.to_frame()
    assert list(frame.columns[:2]) == ["leverage", "residual"]
    assert {"dfbetas_intercept", "dfbetas_x3"} <= set(frame.columns)
    assert_close(measures.press, (frame["residual_without"] ** 2).sum())


def test_estimators_of_the_result_agree_in_the_limit():
    fit = fit_linear(X, Y, penalty=5.0)
    corrected = sensitivities_of(fit)
    assert_close(
        sensitivities_of(fit, estimator="iterated", rounds=400).deviation, corrected.deviation
    )
    linear = sensitivities_of(fit, estimator="linear").deviation
    assert_close(linear[:, 0] / (1 - fit.leverage), corrected.deviation[:, 0])


def test_result_is_complete(tmp_path):
    import engram

    result = sensitivities_of(fit_linear(X, Y))
    assert_close(result.diagnostics.effective_parameters, WIDTH + 1)
    assert result.diagnostics.relative_gradient < 1e-12
    assert engram.load(result.save(tmp_path)).loo_nll == result.loo_nll
    assert "closed form" in result.coverage.values()
    assert "leave-one-out loss" in repr(result)
