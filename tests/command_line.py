"""The command in this process, as a terminal of 80 characters without colours would have it."""

from typer.testing import CliRunner

from engram.cli import app


def call(*arguments, **environment):
    settings = {"COLUMNS": "80", "TERM": "dumb"} | environment
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=settings)
