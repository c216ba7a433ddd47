"""The examples as the script of a page reads them: JSON, with columns of numbers as base64.

A page of 60,000 examples is to be opened from a mail, so every number has as many bytes as an eye
can tell apart: single precision for losses, a byte for a probability. Texts, rows and pictures are
there for the examples somebody will look at (:mod:`engram.report.shown`), the numbers for all.
"""

from __future__ import annotations

import base64
import json
import unicodedata
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from engram.core.printable import printable
from engram.report.examples import NUMBERS, Array, Examples, Neighbours
from engram.report.shown import shown_positions
from engram.report.sprite import sprite

TOP_CLASSES = 3  # of the likeliest that a card shows, beside the given one
TEXT_LENGTH = 400  # characters of a text on a card; what is longer ends with an ellipsis
CELL_LENGTH = 60  # characters of a cell in a row
ROW_CELLS = 12  # columns of a row on a card
TEXT_BYTES = 1_500_000  # of all texts and rows together
JOINERS = "\u200c\u200d"  # write Persian, and emoji of several parts


def payload(examples: Examples) -> dict[str, Any]:
    """Everything about the examples that the page shows."""
    shown = shown_positions(examples)
    found: dict[str, Any] = {
        "count": len(examples),
        "ids": _ids(examples.ids),
        "numbers": {name: packed(_column(examples, name)) for name in _present(examples)},
        "classes": [readable(name) for name in examples.classes],
        "labels": _labels(examples),
        "trust": None if examples.trust is None else packed(examples.trust.astype(np.uint8)),
        "flags": {readable(name): packed(on.astype(np.uint8)) for name, on in _flags(examples)},
        "groups": {readable(name): _grouping(of) for name, of in examples.groups.items()},
        "probabilities": _probabilities(examples),
        "neighbours": None if examples.neighbours is None else _neighbours(examples.neighbours),
        "texts": _texts(examples, shown),
        "rows": _rows(examples, shown),
        "sprite": None,
    }
    if examples.images is not None:
        found["sprite"] = sprite(examples.images, shown)
    return found


def safe_json(value: Any) -> str:
    r"""JSON that may stand in a script tag: nothing in it ends the tag or opens a comment.

    Example:
        >>> safe_json("</script><!--")
        '"\\u003c/script\\u003e\\u003c!--"'
    """
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":  # only inside strings, where JSON may write any character by its number
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def packed(column: Array) -> dict[str, str]:
    """A column as base64 with its type, little end first.

    Example:
        >>> packed(np.array([1, 2], dtype=np.uint8))
        {'type': 'uint8', 'data': 'AQI='}
    """
    little = np.ascontiguousarray(column.astype(column.dtype.newbyteorder("<")))
    return {"type": column.dtype.name, "data": base64.b64encode(little.tobytes()).decode()}


def readable(words: object, length: int = TEXT_LENGTH) -> str:
    r"""Text to be shown: lines stay lines, what is invisible is written out, the end is cut off.

    Marks of writing direction would turn the words around them; joiners are part of a script.

    Example:
        >>> readable("a\u202eb\tc\nd"), readable("abcdef", 4)
        ('a\\u202eb c\nd', 'abc…')
    """
    text = str(words)
    text = text if len(text) <= length else text[: length - 1] + "…"
    return "".join(_sign(c) for c in text.replace("\r\n", "\n"))


def _sign(character: str) -> str:
    if character == "\n" or character in JOINERS:
        return character
    if character == "\t" or unicodedata.category(character) == "Zs":
        return " "
    return printable(character)


def _present(examples: Examples) -> list[str]:
    names = [*NUMBERS, "label_score"]
    return [name for name in names if getattr(examples, name) is not None]


def _column(examples: Examples, name: str) -> Array:
    column: Array = getattr(examples, name).astype(np.float32)
    return column


def _flags(examples: Examples) -> list[tuple[str, Array]]:
    return [(name, flag) for name, flag in examples.flags.items() if flag.any()]


def _ids(ids: Sequence[Any]) -> list[str] | None:
    """None where an example is called by its position."""
    plain = all(name == place for place, name in enumerate(ids))
    return None if plain else [readable(name) for name in ids]


def _labels(examples: Examples) -> dict[str, Any]:
    """Given and predicted: positions of classes, numbers, or words."""
    found: dict[str, Any] = {}
    for name in ("given", "predicted"):
        column = getattr(examples, name)
        if column is None:
            continue
        if examples.classes:
            found[name] = packed(_smallest(column))
        elif np.issubdtype(column.dtype, np.number):
            found[name] = packed(column.astype(np.float32))
        else:
            found[name] = [readable(words, CELL_LENGTH) for words in column.tolist()]
    return found


def _smallest(column: Array) -> Array:
    """The positions in the smallest unsigned type that holds them."""
    dtype = np.min_scalar_type(int(column.max(initial=0)))
    smallest: Array = column.astype(dtype)
    return smallest


def _grouping(values: Sequence[Any]) -> dict[str, Any]:
    """The names of the groups and, for each example, which one it belongs to."""
    names, place = np.unique([readable(value) for value in values], return_inverse=True)
    return {"names": names.tolist(), "of": packed(_smallest(place))}


def _probabilities(examples: Examples) -> dict[str, Any] | None:
    """The likeliest classes under leave-one-out and the given one, before and after, as bytes."""
    before, after = examples.probabilities, examples.loo_probabilities
    if before is None or after is None:
        return None
    count = min(TOP_CLASSES, after.shape[1])
    order = np.argsort(-np.nan_to_num(after, nan=-1.0), axis=1, kind="stable")[:, :count]
    if examples.given is not None:
        order = np.concatenate([order, examples.given[:, None]], axis=1)
    return {
        "classes": packed(_smallest(order.ravel())),
        "each": order.shape[1],
        "before": packed(_bytes(np.take_along_axis(before, order, 1))),
        "after": packed(_bytes(np.take_along_axis(after, order, 1))),
    }


def _bytes(shares: Array) -> Array:
    """Shares of 1 in steps of 1/254; 255 stands for one that is not known."""
    known = np.isfinite(shares)
    steps = np.where(known, np.rint(254 * np.clip(np.where(known, shares, 0), 0, 1)), 255)
    found: Array = steps.astype(np.uint8).ravel()
    return found


def _neighbours(neighbours: Neighbours) -> dict[str, Any]:
    found: dict[str, Any] = {"each": int(np.asarray(neighbours.helpful).shape[1])}
    for item in fields(neighbours):
        value = getattr(neighbours, item.name)
        if value is not None:
            dtype = np.float32 if item.name.endswith("effect") else np.int32
            found[item.name] = packed(np.asarray(value).astype(dtype).ravel())
    return found


def _texts(examples: Examples, shown: Array) -> dict[str, str] | None:
    if examples.texts is None:
        return None
    texts = ((place, readable(examples.texts[place])) for place in shown.tolist())
    return _within({str(place): text for place, text in texts})


def _rows(examples: Examples, shown: Array) -> dict[str, Any] | None:
    if examples.rows is None:
        return None
    frame = examples.rows.iloc[shown, :ROW_CELLS]
    names = [readable(name, CELL_LENGTH) for name in frame.columns]
    rows = zip(shown.tolist(), frame.itertuples(index=False), strict=True)
    cells = {str(place): [_cell(value) for value in row] for place, row in rows}
    return {"columns": names, "cells": _within(cells), "more": examples.rows.shape[1] - len(names)}


def _cell(value: Any) -> str:
    if isinstance(value, float | np.floating):
        return "" if np.isnan(value) else f"{value:.6g}"
    return readable(value, CELL_LENGTH)


def _within(found: dict[str, Any]) -> dict[str, Any]:
    """The first of them that TEXT_BYTES have room for; who comes first is looked at first."""
    room, kept = TEXT_BYTES, {}
    for place, value in found.items():
        room -= len(json.dumps(value))
        if room < 0:
            break
        kept[place] = value
    return kept
