"""Likelihoods in saved folders: engram's own are made again from their name and settings.

Of a user's own likelihood only the description is kept, since functions are not saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engram.core.storage.values import READERS, WRITERS, wrong
from engram.likelihoods import KNOWN
from engram.likelihoods.base import Likelihood


@dataclass(frozen=True)
class Remembered:
    """Stands for a user's own likelihood after loading: it can be compared, but not evaluated.

    Args:
        text: how it was printed.
        identity: by which the same one is known again.
    """

    text: str
    identity: str

    def __repr__(self) -> str:
        return self.text


def described(likelihood: Likelihood | Remembered) -> dict[str, Any]:
    """Plain values from which :func:`restored` makes it again."""
    about = {"text": repr(likelihood), "identity": likelihood.identity}
    if isinstance(likelihood, Remembered) or KNOWN.get(likelihood.name) is not type(likelihood):
        return about
    if likelihood.arguments is None:
        return about
    parts = likelihood.arguments
    if any(isinstance(v, Likelihood) and "name" not in described(v) for v in parts.values()):
        return about
    settings = {k: described(v) if isinstance(v, Likelihood) else v for k, v in parts.items()}
    return about | {"name": likelihood.name, "settings": settings}


def restored(about: Mapping[str, Any]) -> Likelihood | Remembered:
    """The likelihood of a description; remembered where it was not one of engram's own."""
    if "name" in about:
        parts = about["settings"]
        if not isinstance(parts, Mapping):
            raise TypeError(f"arguments by name, not {type(parts).__name__}")
        return KNOWN[about["name"]](
            **{k: restored(v) if isinstance(v, Mapping) else v for k, v in parts.items()}
        )
    return Remembered(about["text"], about["identity"])


def read_likelihood(value: Any, where: str) -> Likelihood | Remembered:
    """The likelihood that a file describes."""
    try:
        return restored(value)
    except (KeyError, TypeError, ValueError) as error:
        raise wrong(where, "a likelihood", value) from error


WRITERS[Likelihood] = WRITERS[Remembered] = described
READERS[Likelihood | Remembered] = read_likelihood
