"""Exact K-FAC: engram's fit against curvlinops' KFACLinearOperator, in one run."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import engram
from benchmarks.data import Images, images
from benchmarks.nets import NETS, build
from benchmarks.records import RESULTS, conditions, table, times, write
from benchmarks.timing import CLOCKS, environment, interleaved, ratio
from benchmarks.training import BATCH_SIZE
from engram.linalg.kronecker import KroneckerBlock

try:
    from curvlinops import KFACLinearOperator
except ImportError:
    raise SystemExit(
        "expected curvlinops, which this compares with; got none installed. Install it without its "
        "dependencies, which would change torch: pip install --no-deps -r requirements-peers.txt"
    ) from None

PRIOR_PRECISION = 1.0


def hooked_layers(model: nn.Module, inputs: Tensor) -> dict[str, nn.Parameter]:
    """Parameters of the layers that curvlinops can see: linear and convolutions that are called.

    The projections inside ``nn.MultiheadAttention`` are used without being called.
    """
    called: dict[str, nn.Parameter] = {}
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            found = {f"{name}.{local}": p for local, p in module.named_parameters()}
            handles.append(module.register_forward_hook(lambda *_, f=found: called.update(f)))
    model(inputs)
    for handle in handles:
        handle.remove()
    return called


def engram_fit(model: nn.Module, data: tuple[Tensor, Tensor]) -> engram.Posterior:
    """Factors and their eigendecompositions, and a diagonal for what has no factors."""
    return engram.laplace(
        model,
        data,
        structure="kronecker",
        prior_precision=PRIOR_PRECISION,
        batch_size=BATCH_SIZE,
        progress=False,
    )


def curvlinops_fit(
    model: nn.Module, data: tuple[Tensor, Tensor], parameters: dict[str, nn.Parameter]
) -> KFACLinearOperator:
    """Factors only; the numbers that it would find by extra passes are given."""
    operator = KFACLinearOperator(
        model,
        nn.CrossEntropyLoss(reduction="sum"),
        list(parameters.values()),
        list(zip(*(tensor.split(BATCH_SIZE) for tensor in data), strict=True)),
        fisher_type="type-2",
        separate_weight_and_bias=False,
        check_deterministic=False,
        num_data=len(data[0]),
        num_per_example_loss_terms=1,
    )
    operator.compute_kronecker_factors()
    return operator


def difference(
    posterior: engram.Posterior, operator: KFACLinearOperator, parameters: dict[str, nn.Parameter]
) -> float:
    """Relative difference of the two matrices' products with a random vector."""
    vector = {name: torch.randn_like(p) for name, p in parameters.items()}
    product = posterior.multiply(vector)
    theirs = torch.cat([t.flatten() for t in operator @ list(vector.values())])
    ours = torch.cat([(product[n] - PRIOR_PRECISION * v).flatten() for n, v in vector.items()])
    return float((ours - theirs).norm() / theirs.norm())


def factored(posterior: engram.Posterior) -> set[str]:
    """Parameters with Kronecker factors; the others have a diagonal."""
    turned = [
        b for b in posterior.blocks if isinstance(b, KroneckerBlock) and b.columns is not None
    ]
    return {name for block in turned for name in block.names}


def layers(model: nn.Module, names: set[str]) -> dict[str, int]:
    """How many modules of each kind own these parameters."""
    owners = sorted({name.rpartition(".")[0] for name in names})
    return dict(Counter(type(model.get_submodule(owner)).__name__ for owner in owners))


def measure(net: str, data: Images, chosen: argparse.Namespace) -> dict[str, Any]:
    """Speed, coverage and agreement on one net."""
    model = build(net, seed=chosen.seed)
    parameters = hooked_layers(model, data.inputs[:2])
    warm, subset = data.first(BATCH_SIZE), data.first(chosen.examples)
    apart = difference(engram_fit(model, warm), curvlinops_fit(model, warm, parameters), parameters)
    tasks: dict[str, Callable[[], object]] = {
        "engram": lambda: engram_fit(model, subset),
        "curvlinops": lambda: curvlinops_fit(model, subset, parameters),
    }
    seconds = interleaved(tasks, chosen.repeats, chosen.clock)
    names = factored(engram_fit(model, warm))
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    total = sum(sizes.values())
    return {
        "ratio": ratio(seconds["engram"], seconds["curvlinops"]),
        "difference": apart,
        "engram_factored": sum(sizes[n] for n in names) / total,
        "curvlinops_factored": sum(sizes[n] for n in parameters) / total,
        "layers": {
            "engram, factors": layers(model, names),
            "engram, diagonal": layers(model, set(sizes) - names),
            "curvlinops, factors": layers(model, set(parameters)),
            "curvlinops, not covered": layers(model, set(sizes) - set(parameters)),
        },
        "seconds": seconds,
    }


def _coverage(nets: dict[str, Any]) -> str:
    kinds = list(next(iter(nets.values()))["layers"])
    rows = []
    for net, found in nets.items():
        counts = [found["layers"][kind].items() for kind in kinds]
        rows.append([net, *(", ".join(f"{n} {k}" for k, n in c) or "-" for c in counts)])
    return table(["net", *kinds], rows)


def page(record: dict[str, Any]) -> str:
    """The Markdown page."""
    rows = []
    for net, found in record["nets"].items():
        shares = [f"{found[f'{peer}_factored']:.1%}" for peer in ("engram", "curvlinops")]
        rows.append([net, times(found["ratio"]), *shares, f"{found['difference']:.0e}"])
    header = ["net", "engram / curvlinops", "factored by engram", "by curvlinops", "difference"]
    return f"""# Exact K-FAC against curvlinops {record["curvlinops"]}

Time of `engram.laplace(structure="kronecker")` over that of `KFACLinearOperator` (type-2, expand,
weight and bias together), {record["examples"]:,} examples in batches of {BATCH_SIZE}, in turns, the
median of {record["repeats"]} rounds, {record["clock"]} clock; below 1 engram is faster. engram's
time includes the eigendecompositions and a diagonal for parameters without factors; curvlinops' is
the factors alone. Data: {record["data"]}. {conditions(record["environment"])}
Written by `python -m benchmarks.kfac_peers`.

{table(header, rows)}

Shares are of all parameters. The difference is that of the two matrices' products with a random
vector, relative, on what both factor.

## Modules whose parameters are covered

{_coverage(record["nets"])}
"""


def main() -> None:
    """Measure net by net."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kfac_peers", description=__doc__)
    parser.add_argument("--nets", nargs="+", choices=list(NETS), default=list(NETS))
    parser.add_argument("--examples", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3, help="rounds; medians are reported")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the two files")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    data = images(chosen.examples, chosen.seed)
    record: dict[str, Any] = {
        "environment": environment(chosen.seed),
        "curvlinops": version("curvlinops-for-pytorch"),
        "data": data.source,
        "examples": chosen.examples,
        "repeats": chosen.repeats,
        "clock": chosen.clock,
        "nets": {},
    }
    for net in chosen.nets:
        print(f"{net}, {chosen.examples} examples", file=sys.stderr, flush=True)
        record["nets"][net] = measure(net, data, chosen)
        write(chosen.output, "kfac_peers", record, page(record))
    print(page(record))


if __name__ == "__main__":
    main()
