"""An estimate on paper: a 7B model with LoRA on a million sequences, from counted operations.

Floating-point operations of a training step, a fit and a pass are counted (not timed) on small
models of the same build, the calls that a user makes; per sequence, as the difference of two
numbers of sequences, so that what is done once is left out. As multiples of one forward pass they
hardly depend on the size, which is what the table shows and the estimate rests on.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import engram
from benchmarks.records import RESULTS, conditions, table, write
from benchmarks.timing import environment

RANK = 8
FEW, MANY, BATCH = 2, 6, 2
QUIET: dict[str, Any] = {"progress": False, "batch_size": BATCH}


@dataclass(frozen=True)
class Shape:
    """Of a Llama: 7B is 4096, 11008, 32 layers, 32 heads, 32,000 words."""

    width: int
    inner: int
    layers: int
    heads: int
    words: int


SMALL = {width: Shape(width, 8 * width // 3, 2, 4, 4 * width) for width in (64, 128, 256, 512)}
LARGE = Shape(4096, 11008, 32, 32, 32000)
UTILISATION, PEAK = 0.4, 312e12  # of an A100 in bfloat16: what trainings reach, and its maker says


def weights(shape: Shape) -> tuple[int, int]:
    """Of the layers and the head, which are multiplied with every token; and of the adapters."""
    w, i = shape.width, shape.inner
    layer = 4 * w * w + 3 * w * i
    adapters = 4 * RANK * 2 * w + 3 * RANK * (w + i)
    return shape.layers * layer + shape.words * w, shape.layers * adapters


def forward_operations(shape: Shape, length: int) -> float:
    """Of one sequence, by arithmetic: two a weight and token, and attention over all positions."""
    base, adapters = weights(shape)
    return 2.0 * (base + adapters) * length + 4.0 * length**2 * shape.width * shape.layers


def model_of(shape: Shape, length: int) -> nn.Module:
    """With adapters on every linear layer but the head."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.words,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=length,
        attn_implementation="eager",
        use_cache=False,
    )
    adapters = LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(LlamaForCausalLM(config), adapters).eval()


def counted(task: Callable[[], object]) -> float:
    """Floating-point operations."""
    with FlopCounterMode(display=False) as counter:
        task()
    return float(counter.get_total_flops())


def measured(width: int, length: int) -> dict[str, Any]:
    """Operations a sequence of every call, over those of a forward pass."""
    shape = SMALL[width]
    model = model_of(shape, length)
    ids = torch.randint(shape.words, (MANY, length))

    def data(count: int) -> dict[str, Tensor]:
        return {"input_ids": ids[:count], "labels": ids[:count]}

    def step(count: int) -> None:
        for start in range(0, count, BATCH):
            part = {k: v[start : start + BATCH] for k, v in data(count).items()}
            model(**part).loss.backward()
        model.zero_grad()

    def fit(count: int) -> engram.Posterior:
        return engram.laplace(
            model,
            data(count),
            likelihood="tokens",
            structure="kronecker",
            curvature="fisher",
            prior_precision=1.0,
            **QUIET,
        )

    posterior = fit(FEW)
    tasks: dict[str, Callable[[int], object]] = {
        "forward": lambda count: [
            model(**{"input_ids": part}) for part in ids[:count].split(BATCH)
        ],
        "training step": step,
        "fit": fit,
        "pass": lambda count: engram.sensitivities(
            model, data(count), posterior, estimator="linear", diagnostics=False, **QUIET
        ),
    }
    per_sequence = {}
    for name, task in tasks.items():
        counts = {count: counted(lambda t=task, c=count: t(c)) for count in (FEW, MANY)}
        per_sequence[name] = (counts[MANY] - counts[FEW]) / (MANY - FEW)
    forward = per_sequence["forward"]
    return {
        "shape": asdict(shape),
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "operations": per_sequence,
        "by_arithmetic": forward_operations(shape, length) / forward,
        "forwards": {name: value / forward for name, value in per_sequence.items()},
    }


def estimate(forwards: dict[str, float], sequences: int, length: int) -> dict[str, Any]:
    """Operations and hours on one card for the large model."""
    one = forward_operations(LARGE, length)
    rate = UTILISATION * PEAK
    operations = {name: value * one * sequences for name, value in forwards.items()}
    base, adapters = weights(LARGE)
    return {
        "sequences": sequences,
        "length": length,
        "weights": base,
        "adapters": adapters,
        "forward": one,
        "operations": operations,
        "hours": {name: value / rate / 3600 for name, value in operations.items()},
    }


def page(record: dict[str, Any]) -> str:
    """The arithmetic for people."""
    nets, large = record["nets"], record["estimate"]
    names = list(nets[0]["forwards"])
    rows = [
        [
            f"{net['shape']['width']}",
            f"{net['parameters']:,}",
            f"{net['trained']:,}",
            f"{net['by_arithmetic']:.3f}",
            *(f"{net['forwards'][name]:.2f}" for name in names),
        ]
        for net in nets
    ]
    header = ["width", "parameters", "trained", "forward, formula / counted", *names]
    totals = [
        [
            name,
            f"{nets[-1]['forwards'][name]:.2f}",
            f"{large['operations'][name]:.2e}",
            f"{large['hours'][name]:,.0f}",
        ]
        for name in names
    ]
    both = nets[-1]["forwards"]
    ratio = (both["fit"] + both["pass"]) / both["training step"]
    return f"""# A 7B model with LoRA on a million sequences: an estimate on paper

Nothing of this size was run. Counted, by `torch.utils.flop_counter`, were the operations of the
calls a user makes, on Llamas of two layers and growing width with LoRA of rank {RANK} on every
linear layer, sequences of {record["length"]} tokens in batches of {BATCH}: of a training step, of a
fit with sampled tokens (`engram.laplace(structure="kronecker", curvature="fisher")`), of a pass
(`engram.sensitivities(estimator="linear", diagnostics=False)`; diagnostics look at a fixed number
of examples). Per sequence, what is done once left out, over one forward pass:

{table(header, rows)}

{conditions(record["environment"])} Written by `python -m benchmarks.flops`.

## The arithmetic

The large one has width 4,096, inner width 11,008, 32 layers and 32,000 words:
{large["weights"] / 1e9:.2f} billion weights that every token is multiplied with, and
{large["adapters"] / 1e6:.1f} million of the adapters. A forward pass over a sequence of
{large["length"]:,} tokens is 2 x weights x tokens + 4 x tokens^2 x width x layers =
{large["forward"]:.2e} operations. For {large["sequences"]:,} sequences, with the multiples of the
widest model above, and at {UTILISATION:.0%} of {PEAK / 1e12:.0f} Tflop/s (one A100 in bfloat16: an
assumption, and the pass has not been tried in that format at this size):

{table(["what", "forwards", "operations", "hours on one card"], totals)}

Fit and pass together are {ratio:.2f} training epochs of the adapters. They go over cards as the
data do: each takes its share of the sequences ([how](../large-data.md)).

## Memory

The frozen base is held once, {large["weights"] * 2 / 1e9:.0f} GB in bfloat16. What is new is the
posterior. Kronecker factors are square in the widths of a layer, also where the adapter between
them is narrow: {record["factor_gigabytes"]["all"]:.0f} GB in single precision with adapters on
every linear layer, {record["factor_gigabytes"]["queries and values"]:.0f} GB on queries and values
alone. The first does not fit beside the base on a card of 40 GB: there take
`structure="diagonal"`, which is as large as the adapters ({large["adapters"] * 4 / 1e9:.2f} GB),
or fewer adapted layers.
"""


def factor_gigabytes() -> dict[str, float]:
    """Of Kronecker factors in single precision: the wide sides of an adapter's two matrices.

    Above 8,192 rows, as behind the inner width, there is only a diagonal.
    """
    w, i = LARGE.width, LARGE.inner
    attention, feed_forward = 8 * w**2, 2 * w**2 + (i**2 + w**2)
    layers = {"all": attention + feed_forward, "queries and values": 4 * w**2}
    return {name: 4 * LARGE.layers * entries / 1e9 for name, entries in layers.items()}


def main() -> None:
    """Count, then calculate."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flops", description=__doc__)
    parser.add_argument("--widths", type=int, nargs="+", choices=list(SMALL), default=list(SMALL))
    parser.add_argument("--length", type=int, default=128, help="tokens of a counted sequence")
    parser.add_argument("--sequences", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=1024, help="of a sequence in the estimate")
    parser.add_argument("--output", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    nets = []
    for width in chosen.widths:
        nets.append(measured(width, chosen.length))
        print(nets[-1], flush=True)
    record = {
        "environment": environment(0),
        "length": chosen.length,
        "nets": nets,
        "factor_gigabytes": factor_gigabytes(),
        "estimate": estimate(nets[-1]["forwards"], chosen.sequences, chosen.tokens),
    }
    write(chosen.output, "flops", record, page(record))


if __name__ == "__main__":
    main()
