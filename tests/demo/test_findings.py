"""The demonstration compares like with like."""

from collections import deque

import torch
from torch.nn import functional

import engram
from engram.demo.digits import Settings, digits, flipped, network, train
from engram.demo.findings import check_classes, estimate_classes, flips_found, loss_with_flips

SETTINGS = Settings(num_train=300, hidden=8, prior_precision=3.0, epochs=300, refit_epochs=100)


def trained():
    data, model = digits(SETTINGS), network(SETTINGS)
    deque(train(model, *data.train, SETTINGS, SETTINGS.epochs), maxlen=0)
    return data, model


def test_every_flipped_label_is_wrong():
    data = digits(SETTINGS)
    assert int(data.flipped.sum()) == 15
    assert len(data.labels) + len(data.test_labels) == 1797


def test_loss_with_flips_is_the_mean_over_flips():
    """Against drawing the flips many times."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(400, 10, generator=generator)
    labels = torch.randint(0, 10, (400,), generator=generator)
    drawn = torch.stack(
        [functional.cross_entropy(logits, flipped(labels, 0.25, generator)) for _ in range(400)]
    )
    error = float(drawn.std()) / 20
    assert abs(loss_with_flips(logits, labels, 0.25) - float(drawn.mean())) < 4 * error


def test_training_ends_at_a_minimum_of_the_objective_that_engram_is_told():
    """Weight decay delta/N on the mean loss is prior precision delta on the sum."""
    data, model = trained()
    posterior = engram.laplace(model, data.train, prior_precision=3.0, progress=False)
    result = engram.sensitivities(model, data.train, posterior, progress=False)
    assert result.diagnostics.relative_gradient < 0.1


def test_flipped_labels_are_found():
    data, model = trained()
    posterior = engram.laplace(model, data.train, prior_precision=3.0, progress=False)
    result = engram.sensitivities(model, data.train, posterior, progress=False)
    found = flips_found(data, result)
    assert found["leave-one-out loss"] > 8 * found["chance"]


def test_classes_are_missed():
    """Estimate and retraining agree in sign and order of magnitude."""
    data, model = trained()
    removals = estimate_classes(model, data, SETTINGS)
    effects = list(check_classes(model, data, SETTINGS, removals))
    assert [effect.label for effect in effects] == list(range(10))
    assert sum(effect.examples for effect in effects) == 300
    for effect in effects:
        assert effect.own_retrained > 0
        assert 0.2 < effect.own_estimated / effect.own_retrained < 5
