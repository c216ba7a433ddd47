"""A record with some rows of each net: those that are named are made anew, all others stay."""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.records import RESULTS, write
from benchmarks.timing import environment


def main(
    name: str,
    nets: Sequence[str],
    rows_of: Callable[[str], list[dict[str, Any]]],
    page: Callable[[Mapping[str, Any]], str],
    seed: int,
    doc: str | None,
) -> None:
    """Command line: names of nets, and the folder of record and page.

    Args:
        name: of the record and its page.
        nets: that are made if none are named.
        rows_of: the rows of one.
        page: of a record.
        seed: that is written down.
        doc: what ``--help`` says.
    """
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("names", nargs="*", default=nets)
    parser.add_argument("--output", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    file = chosen.output / f"{name}.json"
    record = json.loads(file.read_text()) if file.is_file() else {"rows": []}
    record["environment"] = environment(seed)
    for net in chosen.names:
        others = [row for row in record["rows"] if row["net"] != net]
        record["rows"] = others + rows_of(net)
        write(chosen.output, name, record, page(record))
    print(page(record))
