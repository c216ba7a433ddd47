"""Text from a file or a user, made safe for a terminal."""

from __future__ import annotations


def printable(words: object) -> str:
    r"""The text with control characters escaped.

    What was saved may come from anywhere. An escape sequence in it would colour, move or forge
    lines, and so would a line break; marks that turn the direction of writing are written out too.

    Example:
        >>> print(printable("full\x1b[2J\nverdict good"))
        full\x1b[2J\nverdict good
    """
    text = str(words)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
