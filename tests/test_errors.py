"""Errors are what they were after they have crossed from one process to another."""

from __future__ import annotations

import pickle

import pytest

from engram import errors
from engram.errors import EngramError, MemoryLimitError

KINDS = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_comes_back_from_another_process(kind: type[EngramError]) -> None:
    error = kind("one", "two", "use one")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)
    assert (again.expected, again.got, again.remedy) == ("one", "two", "use one")


def test_with_what_it_says_besides() -> None:
    error = MemoryLimitError("less", "more", "use fewer")
    error.examples = 7
    assert pickle.loads(pickle.dumps(error)).examples == 7
