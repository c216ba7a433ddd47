"""What is printed of the classes that were left out: a line each, and every reason once."""

import torch

import engram


def test_a_line_a_class_and_every_reason_once():
    torch.manual_seed(0)
    x, y = torch.randn(60, 4), torch.arange(60) % 3
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    posterior = engram.laplace(model, (x, y), structure="full", prior_precision=1e-3)
    found = engram.remove_classes(model, (x, y), posterior, evaluate_on=(x[:9], y[:9]))
    lines = repr(found).splitlines()
    assert lines[1].split() == ["class", "examples", "its", "own", "evaluation", "verdict"]
    for label, line in enumerate(lines[2:5]):
        assert line.split()[:2] == [str(label), "20"]
        assert line.split()[-1] == found[label].verdict.level
    signals = {reason.signal for one in found.values() for reason in one.verdict.reasons}
    told = " ".join(" ".join(lines[5:]).split())
    assert signals
    assert all(told.count(f"({signal} ") == 1 for signal in signals)


def test_without_other_data_there_is_a_dash():
    x = torch.randn(20, 2)
    y = torch.arange(20) % 2
    model = torch.nn.Linear(2, 2)
    posterior = engram.laplace(model, (x, y), prior_precision=1.0)
    assert " - " in repr(engram.remove_classes(model, (x, y), posterior)).splitlines()[2]
