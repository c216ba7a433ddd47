"""Models that are refused, each by its true cause."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations

import engram
from engram import optimizers as own
from engram.errors import DataError, EngineError, NonFiniteError
from refusal import Refusal
from unusual_modules import Cube, DetachedCube, NumpyCube, WholeCube

X = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(7) % 3


class Model(nn.Module):
    """Two layers, with something between or behind them."""

    def __init__(self, between=torch.tanh, behind=lambda outputs: outputs):
        super().__init__()
        self.first, self.head = nn.Linear(4, 5), nn.Linear(5, 3)
        self.between, self.behind = between, behind

    def forward(self, x):
        return self.behind(self.head(self.between(self.first(x))))


class MixedPrecision(Model):
    def forward(self, x):
        torch.set_autocast_enabled("cpu", True)  # by hand, not by torch.autocast
        hidden = self.first(x)
        torch.set_autocast_enabled("cpu", False)
        return self.head(hidden.float().tanh())


class Graph(Model):
    """The rows are nodes of one graph: each takes the mean of all."""

    def forward(self, x):
        return self.head(self.first(x).mean(0).expand(len(x), 5) + self.first(x))


class Counts(Model):
    def __init__(self):
        super().__init__()
        self.register_buffer("level", torch.zeros(()))

    def forward(self, x):
        self.level += 1
        return super().forward(x) + self.level


def hooked():
    model = Model()
    model.first.weight.register_hook(lambda gradient: 2 * gradient)
    return model


def quantised():
    return torch.ao.quantization.quantize_dynamic(Model(), {nn.Linear})


REFUSED = {
    "mixed precision": (lambda: MixedPrecision(), ("mixed precision", "torch.autocast")),
    "nodes of a graph": (lambda: Graph(), ("independently", "pooled to graphs")),
    "counts": (lambda: Counts(), ("changes its buffer 'level'",)),
    "gradient hook": (hooked, ("other gradients of 'first.weight'", "hooks")),
    "script": (lambda: torch.jit.script(nn.Linear(4, 3)), ("torch.jit",)),
    "script inside": (lambda: nn.Sequential(torch.jit.trace(nn.Linear(4, 3), X)), ("torch.jit",)),
    "quantised": (quantised, ("quantised", "before it was quantised")),
    "detached": (lambda: Model(behind=torch.detach), ("no detach",)),
    "classes": (lambda: Model(behind=lambda f: f.argmax(1)), ("int64", "no argmax")),
    "complex": (lambda: Model(behind=lambda f: f.to(torch.complex64)), ("real outputs",)),
    "squeezed": (lambda: Model(behind=torch.squeeze), ("one row of outputs", "3 rows for 1")),
    "batch statistics": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False)),
        ("batch normalisation with the statistics of the batch",),
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_the_true_cause_is_named(name):
    make, words = REFUSED[name]
    torch.manual_seed(0)
    with Refusal((EngineError, DataError), *words):
        engram.laplace(make(), (X, Y), progress=False, prior_precision=1.0)


@pytest.mark.parametrize("function", [Cube, NumpyCube])
def test_a_function_without_a_second_derivative_has_no_hessian(function):
    """Its own derivative would be lost without a word."""
    torch.manual_seed(0)
    model = Model(function.apply)
    assert engram.laplace(model, (X, Y), progress=False, prior_precision=1.0).curvature == "ggn"
    with Refusal(EngineError, "can be differentiated", function.__name__.lower()):
        engram.laplace(
            model,
            (X, Y),
            structure="full",
            curvature="hessian",
            progress=False,
            prior_precision=1.0,
        )
    fitted = engram.laplace(
        model, (X, Y), structure="kronecker", progress=False, prior_precision=1.0
    )
    with Refusal(EngineError, "can be differentiated", function.__name__.lower()):
        engram.calibrate(model, (X, Y), fitted, progress=False)


def test_a_function_whose_backward_is_detached_has_no_hessian():
    """Its gradients and tangents are right, and the Hessian lacks a part without a word."""
    torch.manual_seed(0)
    model = Model(DetachedCube.apply)
    assert engram.laplace(model, (X, Y), progress=False, prior_precision=1.0).curvature == "ggn"
    with Refusal(EngineError, "can be differentiated", "detachedcube"):
        engram.laplace(
            model,
            (X, Y),
            structure="full",
            curvature="hessian",
            progress=False,
            prior_precision=1.0,
        )
    fitted = engram.laplace(
        model, (X, Y), structure="kronecker", progress=False, prior_precision=1.0
    )
    engram.calibrate(model, (X, Y), fitted, curvature="ggn", progress=False)


def test_a_function_with_a_whole_backward_has_its_hessian():
    torch.manual_seed(0)
    model, plain = Model(WholeCube.apply), Model(lambda h: h**3)
    plain.load_state_dict(model.state_dict())
    choice = {"structure": "full", "curvature": "hessian", "prior_precision": 300.0}
    found, expected = (engram.laplace(m, (X, Y), progress=False, **choice) for m in (model, plain))
    ones = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    for name, value in expected.multiply(ones).items():
        assert torch.allclose(found.multiply(ones)[name], value, rtol=1e-4)


def test_an_overflow_of_half_precision_names_the_precision():
    torch.manual_seed(0)
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(1)).half()
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).half()
    data = x, torch.arange(12) % 3
    fitted = engram.laplace(
        model, data, structure="full", curvature="ggn", progress=False, prior_precision=1.0
    )
    with Refusal(NonFiniteError, "float16", "single precision"):
        engram.remove(model, data, fitted, [0], weights=[1e6], estimator="linear", progress=False)


@pytest.mark.parametrize("normed", [parametrizations.weight_norm, nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weight_norm_of_torch_has_no_hessian(normed):
    """Its second derivative lacks a part: against differences it is off by tens of percent."""
    torch.manual_seed(0)
    model = Model().double()
    normed(model.first)
    data = X.double(), Y
    assert engram.laplace(model, data, progress=False, prior_precision=1.0).curvature == "ggn"
    with Refusal(EngineError, "can be differentiated", "weight_norm of torch"):
        engram.laplace(
            model, data, structure="full", curvature="hessian", progress=False, prior_precision=1.0
        )
    loss = nn.functional.cross_entropy
    for kind in (own.Newton, own.DiagonalOnlineNewton):
        optimizer = kind(model.parameters(), num_data=7, prior_precision=300.0)
        with Refusal(EngineError, "can be differentiated", "weight_norm of torch"):
            optimizer.step(lambda: loss(model(data[0]), Y))


@pytest.mark.parametrize("kind", [own.Newton, own.DiagonalOnlineNewton])
def test_an_operation_without_a_second_derivative_has_no_newton_step(kind):
    model = Model(nn.functional.hardsigmoid)
    optimizer = kind(model.parameters(), num_data=7, prior_precision=30.0)
    with Refusal(EngineError, "can be differentiated", "hardsigmoid_backward"):
        optimizer.step(lambda: nn.functional.cross_entropy(model(X), Y))


def test_weights_normed_by_plain_operations_have_their_hessian():
    torch.manual_seed(0)
    model = Model().double()
    parametrizations.weight_norm(model.first, dim=-1)  # PyTorch takes plain operations for it
    data, choice = (X.double(), Y), {"structure": "full", "curvature": "hessian"}
    fitted = engram.laplace(model, data, prior_precision=300.0, progress=False, **choice)
    names, values = zip(*model.named_parameters(), strict=True)

    def gradients(step):
        moved = {n: p.detach() + step for n, p in zip(names, values, strict=True)}
        leaves = {n: p.requires_grad_() for n, p in moved.items()}
        outputs = torch.func.functional_call(model, leaves, data[0])
        loss = nn.functional.cross_entropy(outputs, Y, reduction="sum")
        return torch.autograd.grad(loss, list(leaves.values()))

    found = fitted.multiply({n: torch.ones_like(p) for n, p in zip(names, values, strict=True)})
    for name, above, below in zip(names, gradients(1e-5), gradients(-1e-5), strict=True):
        assert torch.allclose(found[name], 300 + (above - below) / 2e-5, atol=1e-6)


@pytest.fixture
def one_process(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_sharded_parameters_are_refused():
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    model = fully_shard(Model(), mesh=init_device_mesh("cpu", (1,)))
    with Refusal(EngineError, "sharded", "full_state_dict"):
        engram.laplace(model, (X, Y), progress=False, prior_precision=1.0)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("wrap", [nn.parallel.DistributedDataParallel, nn.DataParallel])
def test_wrappers_of_parallel_training_give_the_model_s_own_answer(wrap):
    torch.manual_seed(0)
    model = Model()
    plain = engram.laplace(model, (X, Y), structure="diagonal", progress=False, prior_precision=1.0)
    expected = engram.sensitivities(model, (X, Y), plain, progress=False)
    wrapped = wrap(model)
    fitted = engram.laplace(
        wrapped, (X, Y), structure="diagonal", progress=False, prior_precision=1.0
    )
    found = engram.sensitivities(wrapped, (X, Y), fitted, progress=False)
    assert torch.equal(found.loo_loss, expected.loo_loss)
    asked = {"at": "displaced", "progress": False}
    moved = engram.remove(model, (X, Y), plain, [0, 1], **asked).group.loss_without
    assert torch.equal(
        engram.remove(wrapped, (X, Y), fitted, [0, 1], **asked).group.loss_without, moved
    )
    assessed = [
        engram.assess(m, (X, Y), result, of, sample=3, progress=False).signals
        for m, result, of in ((model, expected, plain), (wrapped, found, fitted))
    ]
    assert str(assessed[0]) == str(assessed[1])
    copies = [
        engram.retrain(m, (X, Y), [0], prior_precision=20.0, progress=False)
        for m in (model, wrapped)
    ]
    torch.testing.assert_close(copies[0].loo_loss, copies[1].loo_loss)


class MixedInName(Model):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)


def test_mixed_precision_that_changes_nothing_is_let_through():
    """It leaves double precision alone."""
    model = MixedInName().double()
    fitted = engram.laplace(
        model, (X.double(), Y), structure="diagonal", progress=False, prior_precision=1.0
    )
    assert fitted.num_params == sum(p.numel() for p in model.parameters())
