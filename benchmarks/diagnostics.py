"""What diagnostics (leverages, effective parameters, the gradient) add to the call they come with.

``python -m benchmarks.diagnostics`` times calls with and without them in turns: processor time of
one thread, so that what is compared is the code, not the machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import engram
from benchmarks.data import Images, images
from benchmarks.nets import SIDE, build
from benchmarks.records import RESULTS, against, conditions, table, times, write
from benchmarks.timing import environment, interleaved, ratio
from benchmarks.training import BATCH_SIZE, epoch

BAR = 0.25  # of a call without them
STRUCTURES = ("kronecker", "diagonal")
FIT_EXAMPLES = 512
UPDATED = "tracker, Adam"  # its row in the table
CLOCK = "cpu"


class Encoder(nn.Module):
    """Two layers of MiniLM's shape: 64 tokens, width 384, 12 heads, 1536 inside."""

    def __init__(self, outputs: int, width: int = 384) -> None:
        super().__init__()
        self.tokens, self.embed = 64, nn.Linear(SIDE * SIDE // 16, width)
        self.encoder = nn.Sequential(
            *[
                nn.TransformerEncoderLayer(
                    width, 12, 4 * width, dropout=0.0, activation="gelu", batch_first=True
                )
                for _ in range(2)
            ]
        )
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(len(x), 16, -1).repeat(1, self.tokens // 16, 1)
        outputs: Tensor = self.head(self.encoder(self.embed(tokens)).mean(1))
        return outputs


# net, outputs, and the numbers of examples
CASES: dict[str, tuple[str, int, tuple[int, ...]]] = {
    "MLP": ("mlp", 10, (64, 1024, 4096)),
    "MLP, 1000 outputs": ("mlp", 1000, (64, 1024, 4096)),
    "LeNet5": ("lenet5", 10, (64, 1024, 4096)),
    "LeNet5, 1000 outputs": ("lenet5", 1000, (64, 1024, 4096)),
    "small transformer": ("transformer", 10, (64, 1024)),
    "encoder of MiniLM's shape": ("encoder", 10, (16, 128)),
}


def trained(net: str, outputs: int, data: Images) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A net after an epoch over some examples, and its optimizer."""
    torch.manual_seed(0)
    model = Encoder(outputs) if net == "encoder" else build(net, outputs)
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=1e-3)
    epoch(model, optimizer, data.first(min(FIT_EXAMPLES, len(data.inputs))))
    return model, optimizer


def calls(
    net: str, outputs: int, data: Images, count: int
) -> dict[str, Callable[[bool], engram.Result | None]]:
    """Sensitivities with each structure, and an update of a tracker; asked with and without."""
    model, optimizer = trained(net, outputs, data)
    subset = data.first(count)
    found: dict[str, Callable[[bool], engram.Result | None]] = {}
    for structure in STRUCTURES:
        posterior = engram.laplace(
            model,
            data.first(min(FIT_EXAMPLES, len(data.inputs))),
            structure=structure,
            curvature="fisher",
            prior_precision=1.0,
            progress=False,
        )

        def run(diagnostics: bool, posterior: engram.Posterior = posterior) -> engram.Result:
            return engram.sensitivities(
                model, subset, posterior, diagnostics=diagnostics, progress=False
            )

        found[structure] = run
    tracker = engram.Tracker(model, optimizer, subset, training_batch_size=BATCH_SIZE)
    found[UPDATED] = lambda diagnostics: tracker.update(diagnostics=diagnostics)
    return found


def measure(case: str, count: int, repeats: int, seed: int) -> list[dict[str, Any]]:
    """A row for every posterior."""
    net, outputs, counts = CASES[case]
    data = images(max(counts), seed)
    asked = calls(net, outputs, data, count)
    tasks = {(name, on): partial(call, on) for name, call in asked.items() for on in (True, False)}
    results = {key: task() for key, task in tasks.items()}  # warm up
    seconds = interleaved(tasks, repeats, CLOCK)
    rows = []
    for name in asked:
        with_them = results[name, True]
        assert with_them is not None
        figures = with_them.diagnostics
        rows.append(
            {
                "case": case,
                "examples": count,
                "posterior": name,
                "share": ratio(seconds[name, True], seconds[name, False]) - 1,
                "leverages": figures.leverage_examples,
                "effective_parameters": figures.effective_parameters,
                "error": None
                if figures.leverage_examples == 1
                else figures.effective_parameters_error,
                "seconds_without": sorted(seconds[name, False])[repeats // 2],
            }
        )
    return rows


def page(record: dict[str, Any]) -> str:
    """The Markdown page."""
    rows = [
        [
            f"{row['case']}, {row['examples']:,}",
            row["posterior"],
            against(row["share"], BAR),
            str(row["leverages"]),
            "not known"
            if row["error"] is None
            else times(100 * row["error"] / row["effective_parameters"]) + " %",
        ]
        for row in record["rows"]
    ]
    header = ["net, examples", "posterior", "share", "leverages", "error"]
    above = sum(row["share"] > BAR for row in record["rows"])
    return f"""# What diagnostics cost

Every result carries leverages, the effective number of parameters and the gradient of the
objective. *Share* is what they add to the whole call, over the call with `diagnostics=False`; the
bar is a quarter, and {above} of {len(rows)} are above it. *Leverages*: of how many examples one was
computed, as many as the budget has room for; *error*: of the effective parameters, relative, one
standard error. A tracker's update opens a model that was planned before, and its posterior is read
off Adam.

Processor time of one thread; medians of {record["repeats"]} rounds in which all take turns. Data:
{record["data"]}. {conditions(record["environment"])} {record["note"]}

{table(header, rows)}

`python -m benchmarks.diagnostics` measures this again.
"""


def main() -> None:
    """Measure case by case; the files are written after each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diagnostics", description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--repeats", type=int, default=5, help="rounds; medians are compared")
    parser.add_argument("--note", default="", help="a sentence to go with the record")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of diagnostics.json")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    record: dict[str, Any] = {
        "environment": environment(chosen.seed),
        "data": images(1).source,
        "repeats": chosen.repeats,
        "note": chosen.note,
        "rows": rows,
    }
    for case in chosen.cases:
        for count in CASES[case][2]:
            print(f"{case}, {count} examples", file=sys.stderr, flush=True)
            rows += measure(case, count, chosen.repeats, chosen.seed)
            write(chosen.output, "diagnostics", record, page(record))
    print(page(record))


if __name__ == "__main__":
    main()
