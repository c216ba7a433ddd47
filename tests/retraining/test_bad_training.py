"""Wrong choices and training functions that misbehave are errors that say what to do."""

import pytest
import torch
from torch import nn

import engram
from engram.errors import ArgumentError, EngineError, RunFolderError, TrainingError
from engram.retraining.recipes import SGD, Adam, Newton
from interrupting import condition, surroundings
from retraining_problems import RIDGE, classifier, ridge_problem


def run(train, indices=(0, 1, 2, 3), **settings):
    model, x, y = ridge_problem()
    return engram.retrain(
        model, (x, y), None if indices is None else list(indices),
        train=train, likelihood=RIDGE, progress=False, **settings,
    )  # fmt: skip


def nothing(model, data):
    return None


def another_kind(model, data):
    return {"loss": 0.3}


def another_model(model, data):
    return nn.Linear(7, 2).double()


def in_place_scaling(model, data):
    data[0].mul_(2.0)
    return model


def diverging(model, data):
    with torch.no_grad():
        model.weight.mul_(float("nan"))


def another_type(model, data):
    return model.float()


def without_weights(model, data):
    return model.to("meta")


def wrapped(model, data):
    return nn.Sequential(model)


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (another_type, "difference in 'weight'.*float32.*in place of.*float64"),
        (without_weights, "'weight' on the meta device"),
        (wrapped, "same parameters.*unwrap"),
        (nothing, "None, with all weights as before"),
        (another_kind, "got dict"),
        (another_model, "same parameters"),
        (in_place_scaling, "data that changed"),
        (diverging, "NaN or infinity in 'weight'"),
        (SGD(learning_rate=1e6, epochs=200), "stays finite.*learning rate"),
    ],
    ids=[
        "another type",
        "meta",
        "wrapped",
        "nothing",
        "a dict",
        "another model",
        "changed data",
        "NaN",
        "diverging recipe",
    ],
)
def test_unusable_training(train, words):
    with pytest.raises(TrainingError, match=words):
        run(train)


def test_a_dataset_changed_by_the_training_is_noticed():
    model, x, y = ridge_problem()
    data = torch.utils.data.TensorDataset(x.clone(), y)

    def fit(own, rest):
        rest.dataset.tensors[0].add_(1.0)
        return own

    with pytest.raises(TrainingError, match="data that changed"):
        engram.retrain(model, data, [0], train=fit, likelihood=RIDGE, progress=False)


def test_an_exception_of_the_training_leaves_everything_as_it_was():
    def fit(model, data):
        torch.randn(3)
        raise KeyError("their own")

    model, x, y = ridge_problem()
    state = torch.get_rng_state()
    with pytest.raises(KeyError, match="their own"):
        engram.retrain(model, (x, y), [0], train=fit, likelihood=RIDGE, progress=False)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_training_that_changes_the_process_changes_it_for_itself_only():
    seen = []

    def fit(own, data):
        seen.append((torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()))
        torch.set_default_dtype(torch.float16)
        torch.set_grad_enabled(False)
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(99)
        own.weight.mul_(0.9)
        own.register_forward_hook(lambda module, inputs, outputs: outputs)
        for parameter in own.parameters():
            parameter.requires_grad_(False)

    model, x, y = ridge_problem()
    before, weights = surroundings(), condition(model)
    with torch.no_grad():
        truth = engram.retrain(
            model, (x, y), [0, 1], train=fit, likelihood=RIDGE, keep_models=True, progress=False
        )
    assert surroundings() == before
    assert condition(model) == weights
    assert set(seen) == {(True, before[2], before[3])}
    assert truth.parameters["weight"].shape == (2, 2, 4)


def test_a_function_that_trains_the_callers_model_instead_of_its_copy():
    model, x, y = ridge_problem()
    weights = condition(model)

    def astray(own, data):
        model.weight.data.mul_(0.9)
        return model

    def interrupted(own, data):
        model.weight.data.mul_(0.9)
        raise KeyboardInterrupt

    settings = {"likelihood": RIDGE, "progress": False}
    with pytest.raises(TrainingError, match="'weight' changed in the model that the call"):
        engram.retrain(model, (x, y), [0], train=astray, **settings)
    with pytest.raises(TrainingError, match="first argument"):
        engram.tune(model, (x, y), astray, [1.0], **settings)
    with pytest.raises(KeyboardInterrupt):
        engram.retrain(model, (x, y), [0], train=interrupted, **settings)
    assert condition(model) == weights


def scaled_down(model, data):
    with torch.no_grad():
        model.weight.mul_(0.9)


@pytest.mark.parametrize("train", [scaled_down, "lbfgs"])
def test_a_model_that_keeps_its_last_results_is_copied(train):
    class Keeping(nn.Linear):
        def forward(self, x):
            self.last = super().forward(x)
            return self.last

    _, x, y = ridge_problem()
    model = Keeping(4, 2, bias=False).double()
    model(x)
    kept = model.last
    engram.retrain(model, (x, y), [0], train=train, likelihood=RIDGE, progress=False)
    assert model.last is kept


def test_a_model_that_cannot_be_copied():
    class Stubborn(nn.Linear):
        def __deepcopy__(self, memo):
            raise NotImplementedError("no copies")

    _, x, y = ridge_problem()
    with pytest.raises(TrainingError, match=r"deepcopy can copy.*no copies"):
        engram.retrain(
            Stubborn(4, 2).double(), (x, y), [0], train="lbfgs", likelihood=RIDGE, progress=False
        )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"indices": [0, 99]}, "0 to 13.*99, out of range"),
        ({"indices": [1, 1]}, "1 repeated"),
        ({"indices": []}, "at least one index"),
        ({"indices": [0.5]}, "integer indices"),
        ({"indices": [0], "groups": [[1]]}, "indices and groups"),
        ({"indices": None, "groups": [list(range(14))]}, "leave some examples"),
        ({"indices": None, "groups": []}, "at least one group"),
        ({"refits": 1}, "number of refits from 2"),
    ],
    ids=str,
)
def test_wrong_choices(settings, words):
    with pytest.raises(ArgumentError, match=words):
        run("newton", **settings)


def test_a_class_that_does_not_exist():
    model, x, y = classifier()
    with pytest.raises(ArgumentError, match="classes among 0, 1, 2; got 7"):
        engram.retrain(model, (x, y), classes=[7], progress=False)


@pytest.mark.parametrize("train", ["sdg", None, Adam, 3], ids=str)
def test_an_unknown_way_to_train(train):
    with pytest.raises(ArgumentError, match="sgd, adam, lbfgs, newton"):
        run(train)


def test_a_recipe_with_impossible_settings():
    with pytest.raises(ArgumentError, match="positive learning_rate"):
        Adam(learning_rate=-1.0)
    with pytest.raises(ArgumentError, match="positive relative_gradient"):
        Newton(relative_gradient=0.0)


def test_a_model_that_is_random_in_eval_mode():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2).double()

        def forward(self, x):
            return self.layer(x) + torch.randn(2).double()

    _, x, y = ridge_problem()
    with pytest.raises(EngineError, match=r"same outputs twice.*training function of your own"):
        engram.retrain(Noisy(), (x, y), [0], train="lbfgs", likelihood=RIDGE, progress=False)


def test_kinds_of_error_are_values_and_runtime_errors():
    assert issubclass(TrainingError, RuntimeError)
    assert issubclass(RunFolderError, ValueError)
