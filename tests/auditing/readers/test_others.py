"""Arrays, folders of images, plain text, JSON lines and Arrow folders."""

import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from PIL import Image

from engram.auditing.columns import Wanted
from engram.auditing.readers import read_examples
from engram.errors import DataError


def test_npz_of_rows_images_and_texts(tmp_path):
    labels = np.array([0, 1, 0, 1])
    for inputs, kind in (
        (np.eye(4), "tabular"),
        (np.zeros((4, 8, 8), np.uint8), "image"),
        (np.zeros((4, 3, 8, 8)), "image"),
        (np.array(["a b", "c", "d", "e"]), "text"),
    ):
        np.savez(tmp_path / "data.npz", x=inputs, y=labels)
        examples = read_examples(tmp_path / "data.npz", Wanted())
        assert examples.inputs.kind == kind
        assert examples.targets.tolist() == [0, 1, 0, 1]
    assert read_examples((np.zeros((4, 3, 8, 8)), labels), Wanted()).inputs.pixels.shape[3] == 3


def test_npz_that_says_too_little_is_refused(tmp_path):
    np.savez(tmp_path / "data.npz", things=np.eye(4))
    with pytest.raises(DataError, match=r"inputs under one of the names.*arrays named things"):
        read_examples(tmp_path / "data.npz", Wanted())
    np.savez(tmp_path / "data.npz", x=np.eye(4), y=np.zeros(3))
    with pytest.raises(DataError, match="a label for each of the 4 inputs"):
        read_examples(tmp_path / "data.npz", Wanted())
    np.savez(tmp_path / "data.npz", x=np.array([{"a": 1}], dtype=object), y=np.zeros(1))
    with pytest.raises(DataError, match="save plain arrays"):
        read_examples(tmp_path / "data.npz", Wanted())


@pytest.fixture
def folder(tmp_path):
    generator = np.random.default_rng(0)
    for name, level in (("cats", 40), ("dogs", 200)):
        (tmp_path / name).mkdir()
        for number in range(4):
            pixels = generator.integers(level - 20, level + 20, (10, 12, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    return tmp_path


def test_a_folder_of_images_by_class(folder):
    (folder / "cats" / "broken.png").write_bytes(b"no image")
    Image.new("L", (200, 100), 90).save(folder / "dogs" / "large.jpg")
    examples = read_examples(folder, Wanted())
    assert examples.task.classes == ("cats", "dogs")
    assert len(examples) == 9
    assert examples.inputs.pixels.shape == (9, 10, 12, 3)
    assert examples.ids[0] == "cats/0.png"
    assert len(examples.skipped) == 1
    assert examples.skipped[0].startswith("cats/broken.png: UnidentifiedImageError")


def test_a_table_that_names_images(folder):
    frame = pd.DataFrame({"file": [f"cats/{i}.png" for i in range(4)] + ["cats/none.png"] * 1})
    frame["label"] = ["a", "b", "a", "b", "a"]
    frame.to_csv(folder / "data.csv", index=False)
    examples = read_examples(folder / "data.csv", Wanted(image="file"))
    assert len(examples) == 4
    assert examples.targets.tolist() == [0, 1, 0, 1]
    assert "cats/none.png: FileNotFoundError" in examples.skipped[0]


def test_a_folder_without_images_is_refused(tmp_path):
    with pytest.raises(DataError, match="a folder for each class"):
        read_examples(tmp_path, Wanted())


def test_lines_of_label_and_text(tmp_path):
    (tmp_path / "a.txt").write_text("ham\thello you\nspam\twin now\nham\tok then\n")
    (tmp_path / "b.label").write_bytes(
        "DESC:x How is caf\xe9 ?\nNUM:y How many ?\n".encode("latin-1")
    )
    (tmp_path / "c.txt").write_text("__label__good fine words\n__label__bad poor words\n")
    first, second, third = (
        read_examples(tmp_path / name, Wanted()) for name in ("a.txt", "b.label", "c.txt")
    )
    assert first.inputs.lines == ("hello you", "win now", "ok then")
    assert first.targets.tolist() == [0, 1, 0]
    assert second.inputs.lines[0] == "How is caf\xe9 ?"
    assert third.task.classes == ("bad", "good")
    (tmp_path / "d.txt").write_bytes(b"\0\1\2")
    with pytest.raises(DataError, match="which is no text"):
        read_examples(tmp_path / "d.txt", Wanted())


def test_json_lines_with_lists_of_labels(tmp_path):
    rows = [{"t": "a b", "tags": ["x"]}, {"t": "c", "tags": ["x", "y"]}, {"t": "d", "tags": []}]
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    examples = read_examples(tmp_path / "data.jsonl", Wanted(label="tags", text="t"))
    assert examples.task.name == "multi-label"
    assert examples.targets.tolist() == [[1, 0], [1, 1], [0, 0]]


def arrow(path, columns):
    table = pa.table(columns)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def test_a_data_set_in_arrow_files(tmp_path):
    (tmp_path / "train").mkdir()
    for part in range(2):
        arrow(
            tmp_path / "train" / f"data-{part}.arrow",
            {"text": ["one", "two", "three"], "label": [0, 1, 0]},
        )
    features = {"label": {"names": ["neg", "pos"], "_type": "ClassLabel"}}
    (tmp_path / "train" / "dataset_info.json").write_text(json.dumps({"features": features}))
    examples = read_examples(tmp_path, Wanted())
    assert examples.inputs.kind == "text"
    assert examples.task.classes == ("neg", "pos")
    assert len(examples) == 6


def test_images_in_arrow_files(tmp_path, folder):
    cells = [
        {"bytes": (folder / name / f"{i}.png").read_bytes(), "path": None}
        for name in ("cats", "dogs")
        for i in range(3)
    ]
    cells[4] = {"bytes": b"broken", "path": None}
    (tmp_path / "set").mkdir()
    arrow(tmp_path / "set" / "data.arrow", {"image": cells, "label": [0, 0, 0, 1, 1, 1]})
    examples = read_examples(tmp_path / "set", Wanted())
    assert examples.inputs.kind == "image"
    assert len(examples) == 5
    assert examples.skipped[0].startswith("image 4: UnidentifiedImageError")
