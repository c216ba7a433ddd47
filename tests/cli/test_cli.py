"""The command as a user runs it; the demonstration with a small net and little training."""

import io
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from rich.console import Console

import engram
from command_line import call
from engram.cli.demonstration import run
from engram.demo.digits import Settings

SMALL = Settings(num_train=200, hidden=4, epochs=20, refit_epochs=2)


def demonstrate(folder, settings=SMALL, width=80, **terminal):
    console = Console(file=io.StringIO(), width=width, **terminal)
    run(settings, folder, console)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def demonstration(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    return folder, demonstrate(folder)


def test_version():
    result = call("--version")
    assert result.exit_code == 0
    assert result.stdout == f"engram {engram.__version__}\n"


def test_help_names_the_commands():
    result = call("--help")
    assert result.exit_code == 0
    assert "demo" in result.stdout
    assert "show" in result.stdout


def test_the_demonstration_tells_its_story(demonstration):
    folder, text = demonstration
    for words in (
        "Training on 200 digits, 10 with a wrong label",
        "leave-one-out loss",
        "of labels wrong",
        "How many of the 10 flipped labels are among the first 10",
        "chance",
        "retrained",
    ):
        assert words in text
    assert "predicted" in text
    assert all(len(line) <= 80 for line in text.splitlines() if str(folder) not in line)


def test_the_demonstration_writes_a_picture_and_a_result(demonstration):
    folder, _ = demonstration
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert engram.load(folder).num_data == 200


def test_the_demonstration_ends_with_its_page(demonstration):
    folder, text = demonstration
    page = folder / "report.html"
    assert "".join(text.splitlines()[-1].split()) == f"Page{page}"
    shown = page.read_text()
    for part in ("chart-effects-0", "chart-losses", "chart-comparison-1", '"neighbours":{'):
        assert part in shown


def test_the_demonstration_is_fixed_by_its_seed(demonstration, tmp_path):
    folder, _ = demonstration
    before = torch.get_rng_state()
    demonstrate(tmp_path / "same")
    assert torch.equal(torch.get_rng_state(), before)
    other = Settings(seed=1, num_train=200, hidden=4, epochs=20, refit_epochs=2)
    demonstrate(tmp_path / "other", other)
    expected = engram.load(folder).loo_loss
    assert torch.equal(engram.load(tmp_path / "same").loo_loss, expected)
    assert not torch.equal(engram.load(tmp_path / "other").loo_loss, expected)


@pytest.mark.parametrize("width", [20, 80, 200])
def test_a_terminal_with_colours_gets_half_blocks(tmp_path, width):
    text = demonstrate(tmp_path, width=width, force_terminal=True, color_system="truecolor")
    assert "▀" in text


def test_show_prints_summary_and_examples(demonstration):
    folder, _ = demonstration
    result = call("show", str(folder), "--top", "3")
    assert result.exit_code == 0
    assert "estimate of the test loss" in result.stdout
    assert "3 examples with the highest score" in result.stdout
    top = engram.load(folder).top(3)
    assert [row.split()[0] for row in result.stdout.splitlines()[-4:-1]] == [
        str(index) for index in top.index
    ]


def test_show_ranks_by_another_column(demonstration):
    folder, _ = demonstration
    result = call("show", str(folder), "--top", "1", "--by", "loo_loss")
    highest = int(engram.load(folder).loo_loss.argmax())
    assert result.stdout.splitlines()[-2].split()[0] == str(highest)


def test_show_asks_for_more_than_there_is(demonstration):
    folder, _ = demonstration
    assert "200 examples" in call("show", str(folder), "--top", "10000").stdout


EVIL = "\x1b[2J[bold red]all good[/bold red]\nverdict good\u202e:smile:\x9b31m"


def test_show_prints_what_was_saved_and_obeys_none_of_it(demonstration, tmp_path):
    folder, _ = demonstration
    result = engram.load(folder)
    basis = replace(result.basis, estimator=EVIL, structure=EVIL, in_eval_mode=(EVIL,))
    replace(result, basis=basis).save(tmp_path)
    found = call("show", str(tmp_path), "--top", "1")
    assert found.exit_code == 0
    for character in ("\x1b[2J", "\u202e", "\x9b"):
        assert character not in found.stdout
    assert "[bold red]all good[/bold red]" in found.stdout
    assert ":smile:" in found.stdout
    assert not any(line.startswith("verdict good") for line in found.stdout.splitlines())
    (tmp_path / "result.json").write_text(json.dumps({"format": EVIL}))
    found = call("show", str(tmp_path))
    assert found.exit_code == 1
    assert "\x1b" not in found.stderr


def test_show_of_a_folder_with_escapes_in_its_name(tmp_path):
    found = call("show", str(tmp_path / "\x1b[2J"))
    assert found.exit_code == 1
    assert "\x1b" not in found.stderr


def test_show_of_another_folder_says_what_to_do(tmp_path):
    result = call("show", str(tmp_path))
    assert result.exit_code == 1
    assert "expected a folder written by result.save" in result.stderr
    assert "Traceback" not in result.stderr


def test_show_of_another_format_says_what_to_do(demonstration, tmp_path):
    folder, _ = demonstration
    description = json.loads((folder / "result.json").read_text())
    (tmp_path / "result.json").write_text(json.dumps(description | {"format": 99}))
    result = call("show", str(tmp_path))
    assert result.exit_code == 1
    assert "99" in result.stderr


@pytest.mark.parametrize(
    "arguments", [("demo", "--seed", "-1"), ("show",), ("show", ".", "--by", "colour")]
)
def test_wrong_arguments_are_refused(arguments):
    assert call(*arguments).exit_code == 2


def test_the_package_runs_as_a_module():
    command = [sys.executable, "-m", "engram", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout == f"engram {engram.__version__}\n"
