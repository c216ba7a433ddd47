"""The group of commands: how errors are told, and a run's own file as a command."""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import typer
from typer.core import TyperGroup

import engram
from engram.core.printable import printable
from engram.errors import EngramError

RUN_FILE = "run.json"  # of a run's folder: given in place of a command, the run is made again
FAILED, INTERRUPTED = 1, 130  # exit codes; 2 is for wrong arguments
OWN = str(Path(engram.__file__).parent)
INSTALLED = (sys.prefix, sys.base_prefix)
LIBRARIES = ("site-packages", "dist-packages")  # folders of them, also beside this interpreter's


class Commands(TyperGroup):
    """Commands whose errors are told in a few lines."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command of a name; ``RUN/run.json`` stands for making that run again."""
        if args and Path(args[0]).name == RUN_FILE:
            args = ["again", *args]
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        with told(lambda: self._options(ctx)):
            return super().invoke(ctx)

    def _options(self, ctx: Any) -> tuple[str, ...]:
        """Names of the options that the command in use has."""
        command = self.get_command(ctx, ctx.invoked_subcommand or "")
        if command is None:
            return ()
        return tuple(str(p.name) for p in command.params if p.param_type_name == "option")


def no_options() -> tuple[str, ...]:
    """Of no command."""
    return ()


@contextmanager
def told(options: Callable[[], tuple[str, ...]] = no_options) -> Iterator[None]:
    """Errors in words, without our traceback; of the user's own code with theirs.

    Args:
        options: names of those of the command, which an error calls by their Python names.
    """
    try:
        yield
    except EngramError as error:
        tell(error, options())
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        typer.echo("\nengram: stopped. The same command goes on where it can.", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except OSError as error:
        if error.errno == errno.EPIPE or from_user_code(error) is not None:
            raise _of_user_code(error) from None
        typer.echo(f"engram: {printable(error)}", err=True)
        raise typer.Exit(FAILED) from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] in ("click", "typer"):
            raise
        raise _of_user_code(error) from None


def tell(error: EngramError, options: Sequence[str] = ()) -> None:
    """What was expected, what came, and what to do; below it what failed in the user's code."""
    expected, remedy = (as_options(words, options) for words in (error.expected, error.remedy))
    typer.echo(f"engram: expected {printable(expected)}", err=True)
    typer.echo(f"        got {printable(error.got)}", err=True)
    typer.echo(f"        what to do: {printable(remedy)}", err=True)
    cause = error.__cause__
    if cause is not None and from_user_code(cause) is not None:
        _of_user_code(cause)


def as_options(words: str, options: Sequence[str]) -> str:
    """Arguments of Python as options of the command, where it has them.

    Example:
        >>> as_options("audit a part: sample=100_000, or use text=", ["sample", "text"])
        'audit a part: --sample 100000, or use --text'
    """
    for name in options:
        argument = re.compile(rf"(?<![\w.(]){name}=([\d_]+|[^\s,;()]*)")
        words = argument.sub(partial(_found_option, name), words)
    return words


def _found_option(name: str, found: re.Match[str]) -> str:
    """One argument as it is typed."""
    value = found[1]
    plain = value.replace("_", "") if value.replace("_", "").isdigit() else value
    return f"--{name.replace('_', '-')} {plain}".rstrip()


def _of_user_code(error: BaseException) -> BaseException:
    """Print the traceback of the user's code, and what ends the command; ours are raised."""
    if isinstance(error, OSError) and error.errno == errno.EPIPE:
        return error
    start = from_user_code(error)
    if start is None:
        return error
    typer.echo("engram: this failed in your code:", err=True)
    for line in traceback.format_exception(type(error), error, start):
        typer.echo(printable_lines(line), err=True, nl=False)
    return typer.Exit(FAILED)


def printable_lines(text: str) -> str:
    """Lines of a traceback without control characters."""
    return "\n".join(printable(line) for line in text.split("\n"))


def from_user_code(error: BaseException) -> TracebackType | None:
    """The part of a traceback from the first line in a file of the user's on; None without any.

    Files of engram and of installed libraries are not the user's.
    """
    found = error.__traceback__
    while found is not None and not _is_the_users(found.tb_frame.f_code.co_filename):
        found = found.tb_next
    return found


def _is_the_users(filename: str) -> bool:
    path = os.path.abspath(filename)
    if not os.path.exists(path) or path.startswith(
        (OWN, *INSTALLED)
    ):  # compiled ones are not there
        return False
    return not any(folder in LIBRARIES for folder in Path(path).parts)
