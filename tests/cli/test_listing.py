"""Tables in terminals that are narrow, or that have few characters."""

import io

import pandas as pd
from rich.console import Console

from engram.cli.output import frame_table


def test_no_digit_is_cut_off_in_a_narrow_terminal():
    values = {f"column_{n}": [7777.0] for n in range(9)}
    frame = pd.DataFrame(values, index=pd.Index([0], name="example"))
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=stream, width=40).print(frame_table(frame, "one example"))
    stream.seek(0)
    shown = stream.read()
    assert shown.count("7") == 4 * 9 + 1  # and column_7
    assert "..." not in shown
