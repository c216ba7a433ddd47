"""What the script of a page reads: every column as it was, within what it has room for."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from browser import examples
from engram.errors import DataError
from engram.report.examples import Examples, Neighbours
from engram.report.payload import TEXT_BYTES, payload, readable, safe_json
from engram.report.shown import shown_positions
from engram.report.sprite import SPRITE_BYTES, picture_of, sprite


def unpacked(column: dict[str, str]) -> Any:
    return np.frombuffer(base64.b64decode(column["data"]), np.dtype(column["type"]))


def test_columns_come_back():
    found = examples(70)
    read = json.loads(safe_json(payload(found)))
    for name in ("loss", "loo_loss", "score", "prediction_error", "prediction_variance"):
        assert (unpacked(read["numbers"][name]) == np.float32(getattr(found, name))).all()
    assert (unpacked(read["labels"]["given"]) == found.given).all()
    assert (unpacked(read["trust"]) == found.trust).all()
    group = read["groups"]["source"]
    assert [group["names"][k] for k in unpacked(group["of"])] == found.groups["source"]
    assert list(read["flags"]) == ["likely wrong label"]  # the other has no example


def test_probabilities_of_the_likeliest_classes_and_the_given_one():
    found = examples(40)
    read = payload(found)["probabilities"]
    each = read["each"]
    classes, before, after = (
        unpacked(read[name]).reshape(-1, each) for name in ("classes", "before", "after")
    )
    for i in range(40):
        assert classes[i, 0] == found.loo_probabilities[i].argmax()
        assert classes[i, -1] == found.given[i]
        assert before[i] / 254 == pytest.approx(found.probabilities[i, classes[i]], abs=0.003)
        assert after[i] / 254 == pytest.approx(found.loo_probabilities[i, classes[i]], abs=0.003)


def test_what_is_not_known_is_no_probability():
    found = examples(5, loo_probabilities=np.full((5, 3), np.nan))
    assert (unpacked(payload(found)["probabilities"]["after"]) == 255).all()


def test_positions_are_no_ids():
    assert payload(Examples([0, 1], [1, 1], [1, 1]))["ids"] is None
    assert payload(Examples([1, 0], [1, 1], [1, 1]))["ids"] == ["1", "0"]


@pytest.mark.parametrize("text", ["</script>", "<!--", "]]>", "\u2028", "&lt;"])
def test_nothing_ends_the_script(text):
    made = safe_json({text: [text]})
    assert not set("<>&\u2028") & set(made)
    assert json.loads(made) == {text: [text]}


def test_text_keeps_its_lines_and_scripts():
    assert readable("a\r\nb\tc\u00a0d") == "a\nb c d"
    joined = "\u0645\u06cc\u200c\u062e \U0001f468\u200d\U0001f469"  # Persian, and a family
    assert readable(joined) == joined
    assert readable("x\u200fy\u2066z\x07") == r"x\u200fy\u2066z\x07"
    assert readable("x" * 500).endswith("x…")


def test_texts_take_no_more_than_their_room():
    found = Examples(list(range(9000)), np.ones(9000), np.ones(9000), texts=["é" * 400] * 9000)
    texts = payload(found)["texts"]
    assert 100 < len(texts) < 2000
    assert len(json.dumps(texts)) < 1.1 * TEXT_BYTES


def test_rows_are_cut_and_counted():
    frame = pd.DataFrame({f"c{k}": [k + 0.123456789, None] for k in range(15)})
    rows = payload(Examples(["a", "b"], [1, 1], [2, 1], rows=frame))["rows"]
    assert rows["more"] == 3
    assert rows["cells"]["0"][1] == "1.12346"
    assert rows["cells"]["1"][0] == ""


def test_who_is_shown_first():
    count = 5000
    found = examples(count)
    shown = shown_positions(found, 100)
    assert len(set(shown.tolist())) == 100
    flagged = np.flatnonzero(found.flags["likely wrong label"])
    worst = flagged[np.argsort(-found.loo_loss[flagged])][:50]
    assert shown[:50].tolist() == worst.tolist()
    assert found.score.argmax() in shown
    assert sorted(shown_positions(examples(30), 100)) == list(range(30))


def test_neighbours_of_the_shown_are_shown():
    found = examples(5000)
    first = int(shown_positions(found, 100)[0])
    near = Neighbours(np.array([first]), np.array([[4321, -1]]), np.array([[1234, 7]]))
    shown = shown_positions(examples(5000, neighbours=near), 100)
    assert {4321, 1234, 7} <= set(shown.tolist())
    assert -1 not in shown


def test_thumbnails_are_where_the_page_looks_for_them():
    colours = [(250, 0, 0), (0, 250, 0), (0, 0, 250), (250, 250, 250), (0, 0, 0)]
    pictures = [np.full((20, 20, 3), colour, np.uint8) for colour in colours]
    made = sprite(pictures, np.array([3, 0, 2, 1, 4]))
    whole = Image.open(io.BytesIO(base64.b64decode(made["data"])))
    for number, place in enumerate(made["positions"]):
        x, y = number % made["columns"], number // made["columns"]
        middle = whole.getpixel((int((x + 0.5) * made["size"]), int((y + 0.5) * made["size"])))
        assert np.allclose(middle, colours[place], atol=40)
    assert made["size"] == 20
    assert made["small"]


def test_many_pictures_of_noise_stay_small():
    noise = np.random.default_rng(0).integers(0, 255, (64, 128, 128, 3)).astype(np.uint8)
    made = sprite([noise[k % 64] for k in range(1500)], np.arange(1500))
    assert len(base64.b64decode(made["data"])) < 1.2 * SPRITE_BYTES
    assert not made["small"]


@pytest.mark.parametrize(
    "given",
    [
        np.zeros((4, 6)),
        np.zeros((4, 6, 1)),
        np.zeros((4, 6, 3)),
        np.zeros((4, 6, 4), np.uint8),
        np.zeros((3, 4, 6)),
        torch.zeros(1, 4, 6),
        Image.new("L", (6, 4)),
        Image.new("RGBA", (6, 4)),
    ],
)
def test_pictures_as_people_have_them(given):
    found = picture_of(given)
    assert (found.size, found.mode) == ((6, 4), "RGB")


def test_numbers_beyond_0_and_1_are_stretched():
    found = np.asarray(picture_of(np.array([[-1.0, 0.0], [1.0, np.nan]])))[:, :, 0]
    assert found.tolist() == [[0, 128], [255, 0]]


def test_what_is_no_picture():
    with pytest.raises(DataError, match=r"pictures \[H, W\].*got an array \[4, 4, 7\]"):
        picture_of(np.zeros((4, 4, 7)))
