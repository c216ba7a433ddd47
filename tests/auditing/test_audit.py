"""An audit from a file to its folder and back."""

import numpy as np
import pandas as pd
import pytest
import torch

import engram
from auditing_tables import blobs
from engram.auditing.issues import COLUMNS


@pytest.fixture(scope="module")
def audited(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audit")
    frame, wrong = blobs()
    frame["source"] = np.where(np.arange(len(frame)) % 3 == 0, "web", "lab")
    frame.to_csv(folder / "data.csv", index=False)
    found = engram.audit(
        folder / "data.csv", folder / "run", group_by="source", epochs=25, progress=False
    )
    return found, wrong, folder


def test_wrong_labels_come_first(audited):
    found, wrong, _ = audited
    first = found.issues.sort_values("label_score").index[: len(wrong)]
    assert set(first) == set(wrong)
    assert found.issues["is_label_issue"][wrong].all()
    assert found.findings.num_label_issues == int(found.issues["is_label_issue"].sum())


def test_the_table_has_the_columns_that_are_documented(audited):
    found, _, _ = audited
    assert list(found.issues.columns) == ["id", *COLUMNS]
    assert found.issues["label_score"].between(0, 1).all()
    assert set(found.issues["given_label"]) == {"yes", "no"}


def test_it_is_read_again_as_it_was(audited):
    found, _, folder = audited
    again = engram.load(folder / "run")
    pd.testing.assert_frame_equal(again.issues, found.issues)
    pd.testing.assert_frame_equal(again.groups, found.groups, check_index_type=False)
    assert torch.equal(again.result.loo_loss, found.result.loo_loss)
    assert again.findings == found.findings
    assert again.settings == found.settings
    assert repr(again) == repr(found)


def test_ordinary_tools_open_the_folder(audited):
    _, _, folder = audited
    names = {path.name for path in (folder / "run").iterdir()}
    assert {"run.json", "examples.parquet", "result", "report.html"} <= names
    table = pd.read_parquet(folder / "run" / "examples.parquet")
    assert len(table) == 120
    assert "is_label_issue" in table


def test_the_same_seed_gives_the_same_numbers():
    frame, _ = blobs(60)
    first, second = (
        engram.audit(frame, epochs=2, progress=False).result.loo_loss for _ in range(2)
    )
    assert torch.equal(first, second)


def test_the_random_state_is_as_before():
    frame, _ = blobs(40)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    engram.audit(frame, epochs=1, minimal=True, progress=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_every_group_has_a_row_and_every_example_its_harm(audited):
    found, _, _ = audited
    assert set(found.groups.index) == {"web", "lab"}
    harms = found.issues["group"].map(found.groups["harm"])
    assert np.allclose(harms.to_numpy(dtype=float), found.issues["group_harm"])
