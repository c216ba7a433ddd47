"""Tables are read as they are, and what cannot be is said."""

import numpy as np
import pandas as pd
import pytest

from auditing_tables import blobs
from engram.auditing.columns import Wanted
from engram.auditing.readers import read_examples
from engram.auditing.readers import tables as reader
from engram.auditing.stock.rows import RowEncoder
from engram.errors import ArgumentError, DataError


def saved(frame, path):
    frame.to_csv(path, index=False, sep="\t" if path.suffix == ".tsv" else ",")
    return path


def test_csv_tsv_and_parquet_are_the_same(tmp_path):
    frame, _ = blobs(30)
    frame.to_parquet(tmp_path / "data.parquet")
    found = [
        read_examples(path, Wanted())
        for path in (
            saved(frame, tmp_path / "data.csv"),
            saved(frame, tmp_path / "data.tsv"),
            tmp_path / "data.parquet",
        )
    ]
    for examples in found:
        assert examples.task.classes == ("no", "yes")
        assert examples.targets.tolist() == [int(v == "yes") for v in frame["label"]]
        assert np.allclose(examples.inputs.frame.to_numpy(), frame[["a", "b", "c"]].to_numpy())


def test_a_label_column_that_is_not_there_has_near_names(tmp_path):
    frame, _ = blobs(20)
    path = saved(frame.rename(columns={"label": "Outcome"}), tmp_path / "data.csv")
    with pytest.raises(DataError, match=r"expected a column 'outcome'.*did you mean 'Outcome'"):
        read_examples(path, Wanted(label="outcome"))
    with pytest.raises(ArgumentError, match="the name of the label column; got none given"):
        read_examples(path, Wanted())


def test_two_columns_of_one_name_are_refused(tmp_path):
    (tmp_path / "data.csv").write_text("a,b,a,label\n1,2,3,x\n4,5,6,y\n")
    with pytest.raises(DataError, match="column names that differ; got 'a' more than once"):
        read_examples(tmp_path / "data.csv", Wanted())
    frame = pd.DataFrame([[1, 2, "x"]], columns=["a", "a", "label"])
    with pytest.raises(DataError, match="column names that differ"):
        read_examples(frame, Wanted())


def test_one_class_only_is_refused():
    frame = pd.DataFrame({"a": range(9), "label": ["cat"] * 9})
    with pytest.raises(DataError, match="at least two classes; got only 'cat'"):
        read_examples(frame, Wanted())


def test_a_class_with_one_example_is_noted():
    frame = pd.DataFrame({"a": range(9), "label": ["cat"] * 5 + ["dog"] * 3 + ["emu"]})
    notes = read_examples(frame, Wanted()).notes
    assert "only one example of emu:" in notes[0]


def test_a_file_without_a_line_of_names_is_refused(tmp_path):
    path = tmp_path / "data.csv"
    path.write_bytes(bytes(300_000))
    with pytest.raises(DataError, match=r"a line of column names in data\.csv; got 300,000 char"):
        read_examples(path, Wanted())


def test_a_column_of_names_as_labels_is_refused():
    frame, _ = blobs(20)
    frame["label"] = [f"row {number}" for number in range(20)]
    with pytest.raises(DataError, match="20 examples with as many labels"):
        read_examples(frame, Wanted())


def test_rows_with_one_id_are_told_apart():
    frame, _ = blobs(20)
    frame["id"] = ["p1", "p1", "p1 (2)", "p1"] + [f"q{number}" for number in range(16)]
    found = read_examples(frame, Wanted(id="id"))
    assert found.ids[:4] == ("p1", "p1 (3)", "p1 (2)", "p1 (4)")
    assert found.notes == ("ids of several examples have a number behind them: p1",)
    assert len(set(found.ids)) == 20


def test_numbers_among_which_are_words_stay_numbers():
    frame, _ = blobs(100)
    frame["a"] = frame["a"].astype(object)
    frame.loc[::4, "a"] = "n/a?"
    frame.loc[1::9, "b"] = np.inf
    encoder = RowEncoder(read_examples(frame, Wanted()).inputs.frame)
    assert encoder.numeric == ["a", "b", "c"]
    assert encoder.notes[:2] == (
        "column 'a' has mixed types: 25 non-numbers as missing",
        "column 'b' has mixed types: 11 non-numbers as missing",
    )


def test_rows_without_a_label_are_left_out_and_counted():
    frame, _ = blobs(20)
    frame.loc[[3, 4], "label"] = None
    examples = read_examples(frame, Wanted())
    assert len(examples) == 18
    assert examples.ids[3] == "5"
    assert examples.notes == ("2 rows without a label left out (rows 3, 4)",)


def test_a_table_that_is_too_large_is_refused_or_sampled(tmp_path, monkeypatch):
    frame, _ = blobs(200)
    path = saved(frame, tmp_path / "data.csv")
    monkeypatch.setattr(reader, "LARGEST_FILE", 1000)
    with pytest.raises(DataError, match=r"memory has room for.*sample=100_000"):
        read_examples(path, Wanted())
    monkeypatch.setattr(reader, "CHUNK", 30)
    examples = read_examples(path, Wanted(sample=50))
    rows = [int(i) for i in examples.ids]
    assert len(examples) == 50
    assert rows == sorted(rows)
    assert max(rows) > 150


def test_columns_are_left_to_what_they_are_for():
    frame, _ = blobs(20)
    frame["who"] = [f"id{i}" for i in range(20)]
    frame["day"] = ["mon", "tue"] * 10
    examples = read_examples(frame, Wanted(id="who", group_by="day"))
    assert list(examples.inputs.frame) == ["a", "b", "c"]
    assert examples.ids[:2] == ("id0", "id1")
    assert examples.groups == ("mon", "tue") * 10


@pytest.mark.parametrize(
    ("labels", "name"),
    [
        ([0, 1] * 30, "binary"),
        ([1.0, 2.0, 3.0] * 20, "classes"),
        (list(np.linspace(0, 1, 60)), "regression"),
        (list(range(60)), "regression"),
        ([True, False] * 30, "binary"),
        ([["a"], ["a", "b"], []] * 20, "multi-label"),
    ],
)
def test_the_label_column_says_what_the_task_is(labels, name):
    frame = pd.DataFrame({"a": range(60), "label": labels})
    assert read_examples(frame, Wanted()).task.name == name


def test_what_is_no_data_is_refused(tmp_path):
    with pytest.raises(DataError, match="which is not there"):
        read_examples(tmp_path / "none.csv", Wanted())
    (tmp_path / "data.xlsx").write_text("x")
    with pytest.raises(DataError, match=r"a file ending in \.csv"):
        read_examples(tmp_path / "data.xlsx", Wanted())
    with pytest.raises(ArgumentError, match="a path, a DataFrame"):
        read_examples(3, Wanted())
