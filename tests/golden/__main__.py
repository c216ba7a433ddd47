"""Compare every golden result with what is stored, tell what changed, and store it anew.

``python -m tests.golden`` for all, or with the names of problems for these.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # as pytest finds the tables of problems

from golden.stored import differences, read, write
from golden.table import TABLE


def main(names: list[str]) -> None:
    for name in names or TABLE:
        golden = TABLE[name]
        record, stored = golden.record(), read(name)
        found = differences(record, stored, golden.tolerance)
        if not found:
            print(f"{name}: as stored")
            continue
        write(name, record)
        if stored.numbers:
            print(f"{name}: {len(found)} changes", *found, sep="\n  ")
        else:
            print(f"{name}: {len(record.numbers)} new values")


if __name__ == "__main__":
    main(sys.argv[1:])
