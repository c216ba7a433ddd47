"""``python -m engram``: the same as the command ``engram``."""

from engram.cli import app

app(prog_name="engram")
