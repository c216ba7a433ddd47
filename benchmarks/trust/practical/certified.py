"""How wide the intervals of ``engram.certify`` are for nets of the study, and how long they take.

``python -m benchmarks.trust.practical.certified NAMES``: one recorded training each, its estimate,
and 32 refits, from new first weights and by walking the record.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from torch.nn import functional

import engram
from benchmarks.by_net import main
from benchmarks.records import conditions, table
from benchmarks.refine_stopped import Everything
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


if __name__ == "__main__":
    main(NAME, NETS, rows_of, page, SEED, __doc__)
