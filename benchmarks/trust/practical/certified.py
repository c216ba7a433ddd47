"""How wide the intervals of ``engram.certify`` are for nets of the study, and how long they take.

``python -m benchmarks.trust.practical.certified NAMES``: one recorded training each, its estimate,
and 32 refits, from new first weights and by walking the record.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import engram
from benchmarks.records import RESULTS, conditions, table, write
from benchmarks.refine_stopped import Everything
from benchmarks.timing import environment
from benchmarks.trust.practical.settings import SETTINGS
from benchmarks.trust.practical.truths import truth
from benchmarks.trust.runs import rounded
from engram.retraining.recipes import FromStart, Replay

NAME = "trust-certify"
NETS = ("mlp-10", "cnn-2", "transformer-2", "cnn-10")
REFITS, SEED = 32, 0


def rows_of(name: str) -> list[dict[str, Any]]:
    """Both ways on one training of a setting."""
    setting, watched = SETTINGS[name], Everything()
    data, began = setting.split().data, time.process_time()
    model = setting.train(SEED, watched)
    watched.training.stop()
    one, training = time.process_time() - began, watched.training
    posterior = engram.laplace(
        model, data, structure="kronecker", training=training, progress=False
    )
    result = engram.sensitivities(model, data, posterior, progress=False)
    ways = {
        "from new first weights": FromStart(setting.fit, setting.net),
        "the record walked": Replay(training, loss=functional.cross_entropy),
    }
    rows = []
    for way, train in ways.items():
        began = time.process_time()
        found = engram.certify(model, data, result, train=train, refits=REFITS, progress=False)
        low, high = found.interval
        numbers = {
            "estimated": result.loo_nll,
            "certified": found.loo_nll,
            "half_width": (high - low) / 2 / found.loo_nll,
            "by_subsets": float(truth(name).out.nanmean()),
            "cost": (time.process_time() - began) / one,
        }
        rows.append({"net": name, "way": way} | rounded(numbers))
    return rows


def page(record: Mapping[str, Any]) -> str:
    """A table."""
    header = ["net", "refits", "estimated", "certified", "either way", "by subsets", "trainings"]
    cells = [
        [
            row["net"],
            row["way"],
            f"{row['estimated']:.2f}",
            f"{row['certified']:.2f}",
            f"{row['half_width']:.0%}",
            f"{row['by_subsets']:.2f}",
            f"{row['cost']:.0f}",
        ]
        for row in record["rows"]
    ]
    return f"""# What `certify` brings for nets that were stopped

Nets of [the study](trust-practical.md), a recorded training each, and `engram.certify(...,
refits={REFITS})`: the estimated mean leave-one-out loss, the certified one, half the width of its
interval over it, and what it took by processor time. The mean by the study's trainings on 85 % of
the data, over seeds, stands beside it; it is of other trainings, and a little high. Whether
intervals hold what they are of is [another page's](certify.md).
{conditions(record["environment"])}
Written by `python -m benchmarks.trust.practical.certified`.

{table(header, cells)}
"""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NETS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    file = chosen.output / f"{NAME}.json"
    record = json.loads(file.read_text()) if file.is_file() else {"rows": []}
    record["environment"] = environment(SEED)
    for name in chosen.names:
        others = [row for row in record["rows"] if row["net"] != name]
        record["rows"] = others + rows_of(name)
        write(chosen.output, NAME, record, page(record))
    print(page(record))


if __name__ == "__main__":
    main()
