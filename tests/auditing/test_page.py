"""What stands on the page of an audit."""

import shlex

import numpy as np
import pytest
import torch

import engram
from auditing_tables import blobs
from engram.auditing.page import _hanging
from engram.report.page import Examples
from engram.report.shown import shown_positions


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    frame, _ = blobs()
    frame["place"] = np.where(np.arange(len(frame)) % 2, "field", "lab")
    folder = tmp_path_factory.mktemp("audit") / "run"
    found = engram.audit(frame, folder, epochs=4, progress=False)
    return found, engram.load(folder)


def test_a_table_is_shown_by_its_cells(table):
    for found in table:
        examples = found.page_data().examples
        assert list(examples.rows.columns) == ["a", "b", "c", "place"]
        assert examples.rows["place"].tolist()[:2] == ["lab", "field"]
        assert examples.texts is None


def test_the_sentence_says_how_many_are_wrong(table):
    found = table[0].findings
    sentence = table[0].page_data().headline.sentence
    assert sentence.startswith(f"{found.num_label_issues} of 120 labels look wrong; ")
    assert f"{found.fewest_wrong} to {found.most_wrong} of those" in sentence
    assert found.fewest_wrong <= found.num_label_issues * found.precision <= found.most_wrong


def test_contradicted_labels_are_a_filter_and_no_alert(table):
    page = table[0].page_data()
    assert "contradicted label" in page.examples.flags
    assert "contradicted label" not in [alert.flag for alert in page.alerts]


def test_the_command_makes_the_audit_again(tmp_path):
    frame, _ = blobs()
    frame.to_csv(tmp_path / "my data.csv", index=False)
    found = engram.audit(tmp_path / "my data.csv", epochs=1, minimal=True, progress=False)
    command = found.page_data().making.command
    assert shlex.split(command) == [
        *("engram", "audit", str(tmp_path / "my data.csv")),
        *("--epochs", "1", "--minimal"),
    ]


def test_classes_that_hang_on_single_examples_are_one_alert():
    given = np.repeat(np.arange(5), 4)
    right, wrong = np.eye(5)[given], np.eye(5)[(given + 1) % 5]
    wrong[:4] = right[:4]
    losses = np.ones(20)
    examples = Examples(
        [str(i) for i in range(20)],
        losses,
        losses,
        classes=list("abcde"),
        given=given,
        predicted=wrong.argmax(1),
        probabilities=right,
        loo_probabilities=wrong,
    )
    (alert,) = _hanging(examples)
    assert alert.title == "4 classes hang on single examples"
    assert "e 100 → 0 %, d 100 → 0 %, c 100 → 0 % and 1 more" in alert.text


def test_every_picture_that_is_shown_is_kept(monkeypatch):
    monkeypatch.setattr("engram.report.shown.shown_positions.__defaults__", (20,))
    generator = np.random.default_rng(0)
    labels = np.arange(60) % 2
    images = generator.integers(0, 60, (60, 8, 8)) + 150 * labels[:, None, None]
    found = engram.audit((images.astype(np.uint8), labels), epochs=2, progress=False)
    examples = found.page_data().examples
    assert set(shown_positions(examples)) == set(found.shown.pictured)
    place = int(found.shown.pictured[3])
    assert np.array_equal(examples.images[place], images[place])


def test_the_advice_is_something_that_whoever_audited_can_do():
    frame, _ = blobs(200)
    short = engram.audit(frame, epochs=1, minimal=True, progress=False)
    whole = engram.audit(frame, epochs=1, progress=False)
    assert [reason.signal for reason in short.verdict.reasons] == [
        reason.signal for reason in short.result.verdict.reasons
    ]
    told = [" ".join(str(reason) for reason in one.verdict.reasons) for one in (short, whole)]
    assert "without minimal" in told[0]
    assert not told[1] or "half of the data" in told[1]
    assert not any("engram.record(" in words for words in told)


def test_a_training_of_the_users_own_keeps_the_remedies():
    def train(model, data):
        with torch.no_grad():
            model[0].weight.mul_(1.5)

    def make():
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))

    frame, _ = blobs()
    found = engram.audit(frame, model=make, train=train, minimal=True, progress=False)
    assert "return the record" in str(found.verdict.reasons[0])
