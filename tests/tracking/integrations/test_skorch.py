"""The tracker inside skorch, and its estimate as what early stopping follows."""

import numpy as np
import pytest
import torch
from torch import nn

import engram
from engram.errors import ArgumentError

skorch = pytest.importorskip("skorch")


def arrays():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(40, 4)).astype(np.float32)
    return x, (x[:, 0] + generator.normal(size=40) > 0).astype(np.int64)


def net(callbacks, **more):
    from skorch import NeuralNetClassifier

    torch.manual_seed(0)
    settings = {
        "criterion": nn.CrossEntropyLoss,
        "optimizer": torch.optim.Adam,
        "optimizer__weight_decay": 0.01,
        "lr": 0.05,
        "train_split": None,
        "batch_size": 10,
        "verbose": 0,
    }
    module = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    return NeuralNetClassifier(module, callbacks=callbacks, **(settings | more))


def callback(**more):
    from engram.tracking.integrations.skorch import TrackerCallback

    return TrackerCallback(**more)


def test_estimates_stand_in_the_history():
    tracking = callback(settings={"posterior": "optimizer"})
    fitted = net([("tracker", tracking)], max_epochs=3).fit(*arrays())
    estimates = fitted.history[:, "loo_nll"]
    tracker = dict(fitted.callbacks_)["tracker"].tracker_
    assert estimates == [record.estimate for record in tracker.history.records]
    assert len(estimates) == 3
    x, y = arrays()
    data = (torch.from_numpy(x), torch.from_numpy(y))
    posterior = engram.posterior_of(fitted.optimizer_, fitted.module_, num_data=40)
    again = engram.sensitivities(fitted.module_, data, posterior, progress=False)
    assert estimates[-1] == pytest.approx(again.loo_nll, rel=1e-4)


def test_early_stopping_follows_the_estimate():
    from skorch.callbacks import EarlyStopping

    stopping = EarlyStopping(monitor="loo_nll", patience=3)
    callbacks = [("tracker", callback()), ("stopping", stopping)]
    fitted = net(callbacks, max_epochs=200, lr=0.2).fit(*arrays())
    estimates = fitted.history[:, "loo_nll"]
    assert 3 < len(estimates) < 200
    assert min(estimates) < estimates[-1]


def test_the_tracker_stops_by_itself_and_nets_can_be_fitted_again():
    fitted = net(
        [("tracker", callback(stop=True, settings={"patience": 2}))], max_epochs=200, lr=0.2
    )
    fitted.fit(*arrays())
    first = len(fitted.history)
    assert first < 200
    fitted.fit(*arrays())
    assert len(fitted.history) < 200


def test_every_few_epochs_the_last_estimate_is_repeated():
    fitted = net([("tracker", callback(every=2))], max_epochs=4).fit(*arrays())
    estimates = fitted.history[:, "loo_nll"]
    assert estimates[0] == estimates[1] != estimates[2] == estimates[3]


def test_probabilities_are_refused():
    with pytest.raises(ArgumentError, match="a module that gives logits"):
        net([callback()], criterion=nn.NLLLoss, max_epochs=1).fit(*arrays())
