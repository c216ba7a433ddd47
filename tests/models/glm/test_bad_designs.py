"""Designs that do not determine their coefficients, and groups that leave too little."""

import numpy as np
import pandas as pd
import pytest
import torch

from drawn_responses import BINARY, COUNTS, RANDOM, X, Y
from engram.errors import (
    ArgumentError,
    DataError,
    DesignError,
    PosteriorError,
)
from engram.models import (
    fit_glm,
    fit_linear,
    fit_multinomial,
    linear_measures,
    remove_group,
    sensitivities_of,
)


def dependent():
    frame = pd.DataFrame(X, columns=["age", "dose", "weight"])
    return frame.assign(sum=2 * frame["age"] - frame["dose"], one=1.0)


class TestRankDeficientDesign:
    @pytest.mark.parametrize("fit", [fit_linear, fit_glm, fit_multinomial])
    def test_columns_are_named(self, fit):
        targets = Y if fit is fit_linear else BINARY.astype(int)
        with pytest.raises(DesignError, match="6 columns of rank 4") as caught:
            fit(dependent(), targets)
        text = caught.value.got
        assert "intercept" in text or "one" in text
        assert {"age", "dose", "sum"} == {c for c in ("age", "dose", "sum", "weight") if c in text}

    def test_a_penalty_helps(self):
        assert fit_linear(dependent(), Y, penalty=0.1).converged
        assert fit_glm(dependent(), BINARY, penalty=0.1).converged

    def test_more_columns_than_rows(self):
        with pytest.raises(DesignError, match="rank 3"):
            fit_linear(X[:3], Y[:3])
        assert len(fit_linear(X[:3], Y[:3], penalty=1.0).targets) == 3

    def test_signs(self):
        column = np.r_[np.ones(25), np.zeros(15)]
        with pytest.raises(DesignError, match=r"intercept - x\d|x0 = intercept - x1") as caught:
            fit_linear(np.column_stack([column, 1 - column]), Y)
        assert "-1 " not in caught.value.got

    def test_a_column_of_zeros(self):
        with pytest.raises(DesignError, match="x3 = 0 everywhere"):
            fit_linear(np.column_stack([X, np.zeros(40)]), Y)


class TestSeparation:
    @pytest.mark.parametrize("link", ["logit", "probit", "cloglog"])
    def test_complete(self, link):
        targets = (X[:, 1] > 0.1).astype(float)
        with pytest.raises(DesignError, match=r"complete separation: a combination of .*x1") as e:
            fit_glm(X, targets, link=link)
        assert "penalty > 0" in e.value.remedy

    def test_quasi_complete(self):
        column = np.r_[np.zeros(20), np.ones(20)]
        targets = np.r_[BINARY[:20], np.ones(20)]
        with pytest.raises(DesignError, match=r"quasi-complete separation: .*x0"):
            fit_glm(np.column_stack([column, X[:, 0]]), targets)

    def test_multinomial(self):
        targets = np.digitize(X[:, 2], [-0.4, 0.4])
        with pytest.raises(DesignError, match=r"separation: .*x2"):
            fit_multinomial(X, targets)
        assert fit_multinomial(X, targets, penalty=0.1).converged

    def test_counts_of_zero(self):
        column = np.r_[np.zeros(20), np.ones(20)]
        targets = np.r_[COUNTS[:20], np.zeros(20)]
        with pytest.raises(DesignError, match=r"separation: .*x0"):
            fit_glm(np.column_stack([column, X[:, 0]]), targets, "poisson")

    def test_one_class(self):
        for penalty in (0.0, 1.0):  # which does not hold the intercept
            with pytest.raises(DesignError, match="at least two classes") as caught:
                fit_glm(X, np.ones(40), penalty=penalty)
            assert "penalise_intercept=True" in caught.value.remedy
        fit = fit_glm(X, np.ones(40), penalty=1.0, penalise_intercept=True)
        assert fit.converged
        assert (fit.means > 0.5).all()

    @pytest.mark.parametrize("response", ["poisson", "negative_binomial", "tweedie"])
    def test_counts_that_are_all_zero(self, response):
        with pytest.raises(DesignError, match="some target above 0"):
            fit_glm(X, np.zeros(40), response, penalty=1.0)
        fit = fit_glm(X, np.zeros(40), response, penalty=1.0, penalise_intercept=True)
        assert fit.converged
        assert (fit.means < 0.5).all()

    def test_few_columns_are_named(self):
        inputs = np.random.default_rng(5).normal(size=(200, 8))
        for targets in (
            inputs[:, 3] > 0,
            np.where(inputs[:, 3] > 1, 1.0, RANDOM.random(200) < 0.5),
        ):
            design = np.column_stack([inputs, inputs[:, 3] > 1])
            with pytest.raises(DesignError) as caught:
                fit_glm(design, targets)
            named = {f"x{k}" for k in range(9) if f"x{k}" in caught.value.got}
            assert len(named & {"x3", "x8"}) >= 1
            assert len(named) <= 3

    def test_overlap_far_out_is_fine(self):
        inputs = np.r_[X, [[60.0, 0, 0], [-60.0, 0, 0]]]
        fit = fit_glm(inputs, np.r_[X[:, 0] + 0.3 * RANDOM.normal(size=40) > 0, True, False])
        assert fit.outputs.abs().max() > 50


class TestRemovingTooMuch:
    def test_group_that_determines_a_column(self):
        inputs = np.column_stack([X, np.r_[1.0, 1.0, np.zeros(38)]])
        fit = fit_linear(inputs, Y)
        with pytest.raises(DesignError, match="x3 = 0 everywhere") as caught:
            remove_group(fit, [0, 1])
        assert "leave out fewer" in caught.value.remedy
        assert remove_group(fit, [0]).delta is not None

    def test_almost_everything(self):
        with pytest.raises(DesignError, match="rank 2"):
            remove_group(fit_linear(X, Y), range(38))
        with pytest.raises(PosteriorError, match="proper posterior"):
            remove_group(fit_linear(X, Y), range(40))
        assert remove_group(fit_linear(X, Y, penalty=1.0), range(38)).delta is not None

    def test_shares_that_leave_no_posterior(self):
        fit = fit_linear(X, Y)
        most = float(1 / fit.leverage.max())
        assert torch.isfinite(fit.parameter_deviation(0.99 * most)).all()
        for method in (fit.parameter_deviation, fit.parameter_derivative):
            with pytest.raises(PosteriorError, match="leaves a proper posterior"):
                method(1.01 * most)
        with pytest.raises(PosteriorError, match="take out fewer examples or smaller shares"):
            remove_group(fit, range(20), shares=3.0)
        with pytest.raises(PosteriorError, match="proper posterior"):
            fit.parameter_deviation(float("nan"))

    def test_example_of_leverage_one(self):
        inputs = np.column_stack([X, np.r_[1.0, np.zeros(39)]])
        for fit in (fit_linear(inputs, Y), fit_glm(inputs, COUNTS + 1, "poisson")):
            whole, rest = sensitivities_of(fit), sensitivities_of(fit.without([1]))
            assert whole.flagged.nonzero().tolist() == [[0]]
            assert whole.loo_loss[0].isnan()
            assert rest.loo_loss[0].isnan()
            for i in (1, 7, 39):  # the others stand
                output = fit.objective.design.rows(torch.tensor([i])).outputs(
                    fit.without([i]).coefficients
                )
                moved = (whole.outputs + whole.deviation)[i]
                assert torch.allclose(moved, output[0], rtol=1e-3)
            assert fit.parameter_deviation()[0].isnan().all()
            assert torch.isfinite(fit.parameter_deviation()[1:]).all()
            assert whole.verdict.levels[0] == 2
        measures = linear_measures(fit_linear(inputs, Y))
        assert measures.residual_without[0].isnan()
        assert torch.isfinite(measures.residual_without[1:]).all()
        assert torch.isfinite(measures.cooks_distance[1:]).all()
        assert not sensitivities_of(fit_linear(inputs, Y), share=0.5).flagged.any()
        assert not sensitivities_of(fit_linear(inputs, Y, penalty=0.1)).flagged.any()

    def test_group_arguments(self):
        fit = fit_linear(X, Y)
        wrong = ([], [40], [-1], [3, 3], ["a"], np.arange(40) < 3, [1.5])
        for indices in wrong:
            for method in (lambda i: remove_group(fit, i), fit.without):
                with pytest.raises(ArgumentError, match=r"index|indices"):
                    method(indices)
        with pytest.raises(ArgumentError, match="2 finite weights"):
            remove_group(fit, [1, 2], shares=[1.0])
        with pytest.raises(ArgumentError, match="nan for index 2"):
            remove_group(fit, [1, 2], shares=[1.0, np.nan])
        with pytest.raises(ArgumentError, match="list of weights"):
            remove_group(fit, [1, 2], shares="a")


class TestOtherData:
    def test_offset_is_not_forgotten(self):
        offset = np.linspace(0.0, 2.0, 40)
        fit = fit_glm(X, COUNTS, "poisson", offset=offset)
        for method in (
            fit.predictor,
            lambda inputs: remove_group(fit, [0], evaluate_on=(inputs, COUNTS)),
        ):
            with pytest.raises(ArgumentError, match="fitted with one"):
                method(X)
        assert torch.allclose(fit.predictor(X, offset), fit.outputs)
        removal = remove_group(fit, [0], evaluate_on=(X, COUNTS, offset))
        assert torch.allclose(removal.evaluation.outputs, fit.outputs)

    def test_columns_are_found_by_name(self):
        frame = pd.DataFrame(X, columns=["a", "b", "c"])
        fit = fit_linear(frame, Y)
        assert torch.allclose(fit.predictor(frame[["c", "a", "b"]]), fit.outputs)
        assert torch.allclose(fit.predictor(X), fit.outputs)
        with pytest.raises(DataError, match="differ in c, d"):
            fit.predictor(frame.rename(columns={"c": "d"}))

    def test_a_column_named_intercept(self):
        frame = pd.DataFrame(X, columns=["intercept", "b", "c"])
        fit = fit_linear(frame, Y, intercept=False)
        with pytest.raises(ArgumentError, match="3 columns"):
            fit.predictor(X[:, :2])
        both = fit_linear(frame, Y)
        assert both.names == ("(intercept)", "intercept", "b", "c")
        assert linear_measures(both).to_frame().filter(like="dfbetas").shape[1] == 4
        assert torch.allclose(both.predictor(frame[["c", "b", "intercept"]]), both.outputs)

    def test_form(self):
        fit = fit_linear(X, Y)
        for data in (X, (X,), (X, Y[:-1]), (X, None)):
            with pytest.raises(DataError):
                remove_group(fit, [0], evaluate_on=data)
