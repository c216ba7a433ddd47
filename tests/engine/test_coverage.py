"""Which way each parameter went: all are accounted for, and none changes the answer."""

import copy

import pytest
import torch
from torch.func import functional_call, grad, jvp

import engram
from cases import ARCHITECTURES, CASES, MLP
from dense_deviation import deviations
from fitted import assert_close, posterior, precision, sensitivities
from reference import Dense
from single_examples import one_example, raw_outputs

NAMES = [case.name for case in ARCHITECTURES]
WITHOUT_JVP = ("lstm", "weight_norm", "checkpointed")
"""torch.func has no derivative of fused kernels and of checkpoints."""


def tangent_of_each_example(case, fitted):
    """J S^-1 J' e by torch.func: the derivative of f along S^-1 grad loss_i."""
    model = copy.deepcopy(case.model)
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    inputs, targets = case.dense.inputs, case.dense.targets
    rows = []
    for n in range(len(targets)):

        def outputs(values, n=n):
            bound = Substituted(model, values)
            return raw_outputs(bound, one_example(inputs, n)).reshape(-1)

        def loss(values, n=n, outputs=outputs):
            return case.likelihood.dense.loss(outputs(values), targets[n])

        step = fitted.solve(grad(loss)(trained))
        rows.append(jvp(outputs, (trained,), (dict(step),))[1])
    return torch.stack(rows)


class Substituted(torch.nn.Module):
    """A model at other parameters, called as the model is."""

    def __init__(self, model, values):
        super().__init__()
        self.model, self.values = [model], values

    def forward(self, *args, **kwargs):
        return functional_call(self.model[0], self.values, args, kwargs)


@pytest.fixture
def plain_attention():
    """Neither attention's fast path nor its fused kernels have a forward derivative."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        yield
    torch.backends.mha.set_fastpath_enabled(enabled)


@pytest.mark.usefixtures("plain_attention")
@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT_JVP])
def test_the_tangent_pass_is_torch_func(name):
    """The same posterior on both sides, so that only the pass is judged."""
    case = CASES[name]
    fitted = posterior(name, "kronecker" if "kronecker" in case.structures else "full")
    result = sensitivities(case, fitted, estimator="linear")
    assert_close(result.deviation, tangent_of_each_example(case, fitted))


@pytest.mark.parametrize("name", NAMES)
def test_every_trained_parameter_is_accounted_for(name):
    case = CASES[name]
    result = sensitivities(case, posterior(name, "diagonal"))
    described = str(result.coverage)
    missing = [parameter for parameter in case.dense.parameters if parameter not in described]
    assert not missing, f"expected every trained parameter in {described}, missing {missing}"


@pytest.mark.parametrize("name", ["encoder_layer_dropout", "attention_batch_first", "mlp"])
def test_training_mode_gives_the_answer_of_evaluation_mode(name):
    """Dropout is off during the pass, whatever mode the model came in."""
    case = CASES[name]
    expected = sensitivities(case, posterior(name, "kronecker")).deviation
    model = copy.deepcopy(case.model).train()
    fitted = engram.laplace(
        model,
        case.data,
        structure="kronecker",
        prior_precision=case.prior_precision,
        progress=False,
    )
    result = engram.sensitivities(model, case.data, fitted, progress=False)
    assert_close(result.deviation, expected, 1e-12)
    assert all(module.training for module in model.modules())


def test_inference_and_no_grad_of_the_caller_do_not_matter():
    fitted = posterior("mlp", "kronecker")
    expected = sensitivities(MLP, fitted).deviation
    with torch.no_grad():
        assert_close(sensitivities(MLP, fitted).deviation, expected, 1e-13)


def test_a_sequence_longer_than_the_rest_has_its_own_positions():
    """Two data sets of different lengths through the same layers."""
    case = CASES["attention_fused"]
    longer = torch.randn(7, 6, 4, dtype=torch.float64)
    fitted = posterior("attention_fused", "diagonal")
    data = (longer, case.data[1])
    result = engram.sensitivities(case.model, data, fitted, estimator="linear", progress=False)
    dense = Dense(case.model, *data, case.likelihood.dense)
    expected = deviations(dense, precision("attention_fused", "diagonal"), "linear")
    assert_close(result.deviation, expected.deviation)


class CachesOnFirstUse(torch.nn.Module):
    """Runs more operations the first time than later, as lazily built tables do."""

    def __init__(self):
        super().__init__()
        self.first, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 3)
        self.table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.linspace(0.5, 1.5, 4, dtype=x.dtype).square().sqrt().reshape(1, 4)
        return self.head(torch.tanh(self.first(x) * self.table))


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
def test_the_first_call_may_differ_from_the_next(structure):
    torch.manual_seed(0)
    model = CachesOnFirstUse().double()
    dense = Dense(model, *MLP.data, MLP.likelihood.dense)
    fitted = engram.laplace(
        model, MLP.data, structure=structure, progress=False, prior_precision=1.0
    )
    model.table = None
    result = engram.sensitivities(model, MLP.data, fitted, estimator="linear", progress=False)
    expected = deviations(dense, dense.precision(structure, 1.0), "linear")
    assert_close(result.deviation, expected.deviation)


@pytest.mark.parametrize("name", ["lstm", "weight_norm", "attention_batch_first", "mlp"])
def test_calls_follow_each_other(name):
    """Evaluating at displaced parameters leaves nothing behind that changes the next call."""
    case, fitted = CASES[name], posterior(name, "diagonal")
    for _ in range(2):
        engram.remove(case.model, case.data, fitted, [0], at="displaced", progress=False)
    result = sensitivities(case, fitted, estimator="linear")
    expected = deviations(case.dense, precision(name, "diagonal"), "linear")
    assert_close(result.deviation, expected.deviation)
