"""The frozen settings of the panels against the paper's tables 2 to 8, typed from its appendix."""

import pytest
from experiments.figures import PANELS

# table 2: B, delta, E*, LR*, LR*min, E\i, LR\i, LR\i min, examples left out
SINGLE = {
    "fig2a": (256, 100, 500, 1e-2, 1e-3, 300, 1e-3, 1e-4, 1000),
    "fig2b": (256, 100, 300, 1e-1, 1e-3, 200, 1e-3, 1e-4, 1000),
    "fig2c": (512, 250, 500, 1e-2, 1e-4, 300, 1e-4, 1e-6, 100),
}
# table 3: E, LR*, LR*min, LR\C, LR\C min; delta 100, B 256, 1000 epochs of training again
CLASSES = {
    ("fig11d", "mnist", "mlp_500_300"): (1e-2, 1e-3, 1e-4, 1e-5),
    ("fig11d", "mnist", "lenet5"): (1e-1, 1e-3, 1e-5, 1e-6),
    ("fig3a", "fmnist", "mlp_32_16"): (1e-2, 1e-3, 1e-5, 1e-6),
    ("fig3a", "fmnist", "lenet5"): (1e-1, 1e-3, 1e-4, 1e-5),
}
# table 4: number of deltas, range, smoothing window; the optimizers are named in the text
CURVES = {
    "fig4a": ("sgd", 96, (1, 1000), 3, 500),
    "fig4b": ("adam", 96, (10, 1000), 5, 300),
    "fig4c": ("adamw", 30, (10, 1000), 3, 150),
}
# table 5 and h_0 of iBLR: optimizer, LR, LRmin, B, delta, h_0
DURING = {
    "fig8-mnist-mlp-a": ("iblr", 1e-2, 1e-4, 256, 80, 0.1),
    "fig8-mnist-mlp-b": ("sgd", 1e-3, 1e-4, 256, 80, None),
    "fig8-mnist-mlp-c": ("sgd", 1e-3, 1e-4, 256, 80, None),
    "fig8-mnist-lenet5-a": ("iblr", 1e-2, 1e-4, 256, 60, 0.1),
    "fig8-mnist-lenet5-b": ("sgd", 1e-3, 1e-4, 256, 60, None),
    "fig8-mnist-lenet5-c": ("sgd", 1e-3, 1e-4, 256, 60, None),
    "fig5a": ("iblr", 1e-1, 0, 256, 60, 0.1),
    "fig5b": ("adamw", 1e-2, 1e-4, 256, 60, None),
    "fig5c": ("adamw", 1e-2, 1e-4, 256, 60, None),
    "fig8-cifar-cnn-a": ("iblr", 1e-1, 1e-4, 512, 250, 0.05),
    "fig8-cifar-cnn-b": ("sgd", 1e-1, 0, 512, 250, None),
    "fig8-cifar-cnn-c": ("sgd", 1e-1, 0, 512, 250, None),
    "fig1b": ("iblr", 2e-1, 0, 50, 10, 0.01),
    "fig9a": ("adamw", 1e-3, 1e-3, 256, 60, None),  # table 6
    "fig9b": ("adamw", 1e-3, 1e-3, 256, 60, None),
} | {
    f"fig10-{name}-{batch}": ("adam", 1e-3, 0, batch, delta, None)  # table 7
    for batch in (8, 32)
    for name, delta in {
        "mnist-mlp": 80,
        "mnist-lenet5": 60,
        "fmnist-lenet5": 60,
        "cifar-cnn": 50,
    }.items()
}
# table 8 and its text: rates from 0.1 to 0, 150 samples
EVOLUTION = {
    "fig11b": ("mlp_500_300", 256, 30, 100),
    "fig3b": ("lenet5", 256, 60, 100),
    "fig11c": ("resnet20", 512, 35, 300),
}


@pytest.mark.parametrize("name", SINGLE)
def test_single_examples(name):
    net, paper = PANELS[name].settings, PANELS[name].scales["paper"]
    training = net.training
    assert (
        training.batch_size,
        training.prior_precision,
        paper.epochs,
        *training.rates,
        paper.again,
        *net.rates_again,
        paper.count,
    ) == SINGLE[name]
    assert net.epochs_again == paper.again


@pytest.mark.parametrize("name", ["fig3a", "fig11d"])
def test_classes(name):
    panel = PANELS[name]
    found = {
        (name, net.data, net.model): (*net.training.rates, *net.rates_again)
        for net in panel.settings.nets
    }
    assert found == {key: value for key, value in CLASSES.items() if key[0] == name}
    for net in panel.settings.nets:
        assert (net.training.batch_size, net.training.prior_precision) == (256, 100)
        assert net.epochs_again == panel.scales["paper"].again == 1000


@pytest.mark.parametrize("name", CURVES)
def test_curves(name):
    settings, paper = PANELS[name].settings, PANELS[name].scales["paper"]
    found = (
        settings.training.optimizer,
        paper.count,
        settings.strengths,
        settings.window,
        paper.epochs,
    )
    assert found == CURVES[name]


@pytest.mark.parametrize("name", DURING)
def test_during_training(name):
    training = PANELS[name].settings.training
    *wanted, start = DURING[name]
    found = [
        training.optimizer,
        *training.rates,
        training.batch_size,
        training.prior_precision,
    ]
    assert found == wanted
    assert start is None or training.hessian_start == start


@pytest.mark.parametrize("name", EVOLUTION)
def test_evolution(name):
    settings, paper = PANELS[name].settings, PANELS[name].scales["paper"]
    training = settings.training
    found = (settings.model, training.batch_size, training.prior_precision, paper.epochs)
    assert found == EVOLUTION[name]
    assert (training.optimizer, training.rates, paper.count) == ("iblr", (0.1, 0.0), 150)


def test_groups_and_the_rest_of_the_text():
    usps, mnist = (PANELS[name] for name in ("fig6a", "fig6b"))
    net, paper = usps.settings.net, usps.scales["paper"]
    assert (usps.settings.size, net.training.batch_size, net.training.prior_precision) == (
        16,
        32,
        5,
    )
    assert (paper.epochs, paper.again, *net.training.rates) == (500, 1000, 1e-3, 1e-3)
    assert (mnist.settings.size, *mnist.settings.net.rates_again) == (64, 1e-4, 1e-5)
    assert mnist.scales["paper"].again == 500
    assert PANELS["h0"].settings.starts == (0.01, 0.05, 0.1, 0.5)
    logistic = PANELS["fig11a"].settings
    assert (logistic.batch_size, logistic.rates, logistic.precision_rate) == (
        200,
        (5e-3, 1e-3),
        1e-5,
    )
    assert (logistic.samples, logistic.samples_at_looks, logistic.looks) == (
        3,
        150,
        (5, 10, 25, 125),
    )
    assert logistic.prior_precision == 0.1
