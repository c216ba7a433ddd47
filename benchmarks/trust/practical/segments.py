"""What more segments of the walk bring: ``python -m benchmarks.trust.practical.segments NAMES``.

One recorded training each of nets of the study; the estimate along four segments, as by default,
and along eight, beside the truth.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import engram
from benchmarks.by_net import main
from benchmarks.practical.estimates import Watched
from benchmarks.records import conditions, table
from benchmarks.trust.practical.settings import SETTINGS
from benchmarks.trust.practical.truths import ranks, truth
from benchmarks.trust.runs import rounded

NAME = "segments"
NETS = (
    *("mlp-2", "mlp-4", "mlp-5", "mlp-6", "mlp-8", "mlp-9", "mlp-10", "mlp-15", "linear-2"),
    *("cnn-3", "cnn-5", "cnn-6", "cnn-8", "cnn-10", "cnn-14", "cnn-18"),
    *("resnet-1", "resnet-2", "resnet-3", "resnet-4", "resnet-6"),
    *("transformer-1", "transformer-4", "transformer-6"),
)
COUNTS, SEED = (4, 8), 0
NEAR = 1.5  # times too large or too small


def rows_of(name: str) -> list[dict[str, Any]]:
    """A row a number of segments."""
    setting, known = SETTINGS[name], truth(name)
    watched, data = Watched(augment=setting.augment), setting.split().data
    began = time.process_time()
    model = setting.train(SEED, watched)
    one, true = time.process_time() - began, known.out.double()
    posterior = engram.laplace(
        model, data, structure="kronecker", training=watched.training, progress=False
    )
    rows = []
    for count in COUNTS:
        began = time.process_time()
        found = engram.sensitivities(model, data, posterior, segments=count, progress=False)
        numbers = {
            "cost": (time.process_time() - began) / one,
            "size": (found.loo_nll - found.train_nll) / known.increase,
            "ranking": ranks(found.loo_loss.double(), true) / math.sqrt(known.reliability[0]),
        }
        rows.append({"net": name, "segments": count} | rounded(numbers))
    return rows


def page(record: Mapping[str, Any]) -> str:
    """A table, a line a net."""
    rows = {(row["net"], row["segments"]): row for row in record["rows"]}
    nets = list(dict.fromkeys(net for net, _ in rows))
    cells = []
    for net in nets:
        own = [rows[net, count] for count in COUNTS]
        sizes, rankings = ([f"{row[part]:.2f}" for row in own] for part in ("size", "ranking"))
        cells.append([net, *sizes, *rankings, *(f"{row['cost']:.1f}" for row in own)])
    header = [f"{what}, {count}" for what in ("size", "ranking", "trainings") for count in COUNTS]
    wide = [net for net in nets if not net.startswith(("mlp", "linear"))]
    rest = [net for net in nets if net not in wide]
    return f"""# More segments along a recorded training

{len(nets)} nets of [the study](trust-practical.md), one recorded training each, along four segments
as by default and along `segments=8`. *Size* is the estimated over the true increase of the losses,
*ranking* as in the study, *trainings* the processor time over that of the training.
{conditions(record["environment"])} Written by `python -m benchmarks.trust.practical.segments`.

{_told(rows, wide, "Convolutional and residual nets and transformers")}
{_told(rows, rest, "MLPs and softmax regressions")}

{table(["net", *header], cells)}
"""


def _told(rows: Mapping[Any, Any], nets: Sequence[str], words: str) -> str:
    """How far sizes are off, and how often they are near."""
    off = {n: [abs(math.log(rows[net, n]["size"])) for net in nets] for n in COUNTS}
    mean = {n: math.exp(sum(values) / max(1, len(values))) for n, values in off.items()}
    near = {n: sum(value <= math.log(NEAR) for value in values) for n, values in off.items()}
    few, many = COUNTS
    return (
        f"{words}: sizes off by {mean[few]:.2f} times in the mean with {few} segments and "
        f"{mean[many]:.2f} with {many}; within {NEAR} times {near[few]} and {near[many]} of "
        f"{len(nets)}."
    )


if __name__ == "__main__":
    main(NAME, NETS, rows_of, page, SEED, __doc__)
