"""What a misspelt name may have meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

CLOSE = 0.6  # share of letters in common from which a name is suggested: fewer help nobody
SUGGESTED = 3  # names at most


def near(name: object, names: Iterable[str]) -> str:
    """Names that look like the given one, as a question; empty where none does.

    Example:
        >>> near("labl", ["label", "text", "lable"])
        'did you mean lable or label?'
        >>> near("x", ["label"])
        ''
    """
    lower = {known.lower(): known for known in names}
    found = get_close_matches(str(name).lower(), lower, SUGGESTED, CLOSE)
    return f"did you mean {' or '.join(lower[match] for match in found)}?" if found else ""
