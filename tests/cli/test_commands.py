"""How errors are told: ours in three lines, those of the user's code with their traceback."""

import pathlib

import pytest
import typer
from typer.testing import CliRunner

from command_line import call
from engram.cli.commands import Commands, from_user_code, told
from engram.errors import DataError, TrainingError


def application(function):
    """A program of two commands with our group."""
    app = typer.Typer(cls=Commands, pretty_exceptions_enable=False)
    app.command("first")(function)
    app.command("second")(lambda: None)
    return app


def outcome(function):
    return CliRunner().invoke(application(function), ["first"])


def test_our_errors_in_three_lines():
    def fails():
        raise DataError("a column 'label'", "text,\x1b[2J labels", "use --label labels")

    found = outcome(fails)
    assert found.exit_code == 1
    assert found.stderr.splitlines() == [
        "engram: expected a column 'label'",
        "        got text,\\x1b[2J labels",
        "        what to do: use --label labels",
    ]


def test_arguments_of_python_are_told_as_options():
    def fails(sample: int = 0, group_by: str = ""):
        raise DataError("group_by= or sample=", "6 GB", "use sample=100_000, not count=1")

    assert outcome(fails).stderr.splitlines() == [
        "engram: expected --group-by or --sample",
        "        got 6 GB",
        "        what to do: use --sample 100000, not count=1",
    ]


def test_the_users_code_is_shown_with_its_own_traceback():
    def train():
        raise ZeroDivisionError("no batch")

    found = outcome(lambda: train())
    assert found.exit_code == 1
    assert "engram: this failed in your code:" in found.stderr
    assert "in train" in found.stderr
    assert "ZeroDivisionError: no batch" in found.stderr
    assert "engram/cli/commands.py" not in found.stderr


def test_a_cause_in_the_users_code_is_shown_below_our_error():
    def train():
        raise ZeroDivisionError("no batch")

    def fails():
        try:
            train()
        except ZeroDivisionError as error:
            raise TrainingError("a training", "an error", "mend it") from error

    found = outcome(fails)
    assert found.stderr.index("what to do: mend it") < found.stderr.index("no batch")


def test_a_fault_of_ours_is_not_put_on_the_user():
    error = None
    try:
        int("x" * 3, base="wrong")
    except TypeError as caught:
        error = caught
    assert from_user_code(error) is not None  # this file is a user's
    assert from_user_code(ValueError("no traceback")) is None


def in_a_library(folder):
    library = folder / "site-packages" / "library.py"
    library.parent.mkdir()
    library.touch()
    return str(library)


@pytest.mark.parametrize("name_of", [in_a_library, lambda _: "library/_libs/compiled.pyx"])
def test_what_others_have_written_is_not_the_users_code(name_of, tmp_path):
    error = None
    try:
        exec(compile("raise ValueError", name_of(tmp_path), "exec"))
    except ValueError as caught:
        error = caught
    inside = error.with_traceback(error.__traceback__.tb_next)  # without this file
    assert from_user_code(inside) is None


def test_stopped_by_the_user():
    def stopped():
        raise KeyboardInterrupt

    found = outcome(stopped)
    assert found.exit_code == 130
    assert "stopped" in found.stderr
    assert "Traceback" not in found.stderr


def test_a_full_disk_is_told_in_a_line(tmp_path):
    def full():
        installed = pathlib.Path(tmp_path / "no" / "folder")
        installed.write_text("x")

    with pytest.raises(OSError, match="No such file") as raised:
        full()
    error = raised.value
    error.__traceback__ = None  # as if it came from engram itself

    with pytest.raises(typer.Exit) as caught, told():
        exec(compile("raise error", "<engram>", "exec"), {"error": error})
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("arguments", [("--help",), ("data", "--help"), ("compare", "--help")])
def test_help_fits_the_terminal(arguments):
    found = call(*arguments)
    assert found.exit_code == 0
    assert max(map(len, found.stdout.splitlines())) <= 80


@pytest.mark.parametrize("name", ["show", "compare", "check", "demo", "doctor"])
def test_every_command_has_an_example(name):
    assert f"Example: engram {name}" in call(name, "--help").stdout


def test_doctor_prints_versions_and_device():
    import json

    import torch

    found = call("doctor")
    assert found.exit_code == 0
    assert "threads" in found.stdout
    machine = json.loads(call("doctor", "--json").stdout)
    assert machine["threads"] == str(torch.get_num_threads())
