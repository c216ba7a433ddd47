"""Plain text: a label and a text on every line."""

from __future__ import annotations

from pathlib import Path

from engram.auditing.columns import Wanted, from_frame
from engram.auditing.examples import Examples
from engram.errors import DataError, brief

FASTTEXT = "__label__"  # that fastText writes before a label


def read_text_lines(path: Path, wanted: Wanted) -> Examples:
    """Lines of a label, a tab or space, and a text; of a label nothing but the first word."""
    import pandas as pd

    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError("a file that can be read", brief(error), "check the path") from error
    if b"\0" in content[:4096]:
        raise DataError(
            "a text file with a label and a text on each line",
            f"{path.name}, which is no text",
            "name it by what is in it: .csv, .parquet, .npz, .jsonl",
        )
    lines = [line for line in _decoded(content).splitlines() if line.strip()]
    divider = "\t" if sum("\t" in line for line in lines) > len(lines) / 2 else None
    pairs = [line.strip().split(divider, 1) for line in lines]
    short = [number for number, pair in enumerate(pairs) if len(pair) < 2]
    if len(short) == len(pairs):
        raise DataError(
            "a label and a text on each line", f"{path.name} without any", "write them so"
        )
    rows = [(p[0].removeprefix(FASTTEXT), p[1]) for p in pairs if len(p) == 2]
    frame = pd.DataFrame(rows, columns=["label", "text"])
    if wanted.sample is not None and wanted.sample < len(frame):
        frame = frame.sample(wanted.sample, random_state=wanted.seed).sort_index()
    plain = Wanted(label="label", text="text", task="classes", seed=wanted.seed)
    return from_frame(frame, plain, path.name, path.parent)


def _decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("latin-1")
