"""The page of the speed benchmark: figures beside their bars."""

from __future__ import annotations

from typing import Any

from benchmarks.data import FULL_SIZE
from benchmarks.records import against, conditions, table, times

PASS_BARS = {"mlp": 1.2, "lenet5": 2.0, "resnet20": 3.0, "transformer": 2.5}
MANY_OUTPUTS_BAR = 1.3
SAMPLED_BAR, EXACT_BAR = 2.0, 4.0

Nets = dict[str, Any]


def _passes(nets: Nets) -> str:
    rows = []
    for net, found in nets.items():
        bar, row = PASS_BARS[net], [net, f"{found['examples']:,}"]
        for key in ("ratio", "ratio_at_full_size"):
            row += [against(found[key][name], bar) for name in ("diagonal", "kronecker")]
        row += [f"{found['fixed'][name]:.3f}" for name in ("diagonal", "kronecker")]
        rows.append([*row, f"<= {bar}", times(found["ratio"].get("kronecker_exact"))])
    full = f"at {FULL_SIZE:,}"
    header = ["net", "examples", "diagonal", "Kronecker", f"diagonal {full}", f"Kronecker {full}"]
    header += ["fixed, diagonal", "fixed, Kronecker", "bar", "Kronecker, nothing merged"]
    return table(header, rows)


def _fits(nets: Nets) -> str:
    rows = []
    for net, found in nets.items():
        row = [net, f"{found['examples']:,}"]
        for key in ("ratio", "ratio_at_full_size"):
            row += [
                against(found[key]["sampled_kfac"], SAMPLED_BAR),
                against(found[key]["exact_kfac"], EXACT_BAR),
            ]
        rows.append([*row, times(found["ratio"].get("whole_kfac"))])
    full = f"at {FULL_SIZE:,}"
    header = ["net", "examples", f"sampled (<= {SAMPLED_BAR})", f"exact (<= {EXACT_BAR})"]
    return table([*header, f"sampled {full}", f"exact {full}", "exact, nothing sampled"], rows)


def _many_outputs(nets: Nets) -> str:
    rows = []
    for net, found in nets.items():
        many, row = found["many_outputs"], [net, f"{found['examples']:,}"]
        for key in ("ratio", "ratio_at_full_size"):
            ours = [many[name][key] for name in ("diagonal", "kronecker")]
            row += [against(value, MANY_OUTPUTS_BAR) for value in ours]
            training = many["epoch"][key]
            row += [times(training), *(times(value / training) for value in ours)]
        rows.append([*row, f"<= {MANY_OUTPUTS_BAR}"])
    columns = ["diagonal", "Kronecker", "training", "diagonal in epochs", "Kronecker in epochs"]
    full = [f"{column} at {FULL_SIZE:,}" for column in columns]
    return table(["net", "examples", *columns, *full, "bar"], rows)


def _slow_ways(nets: Nets) -> str:
    rows = []
    for net, found in nets.items():
        ratios, difference = found["ratio"], found["difference"]
        row = [net, times(ratios["diagonal"])]
        for way in ("functional", "jacobian"):
            note = difference[way]
            ran = isinstance(note, float)
            row += [times(ratios[way]) if ran else "does not run", f"{note:.0e}" if ran else "-"]
        rows.append(row)
    header = ["net", "engram", "vmap(jvp o grad)", "difference", "vmap(jacrev) + einsum"]
    return table([*header, "difference"], rows)


def page(record: dict[str, Any]) -> str:
    """The Markdown page."""
    nets = record["nets"]
    rounds = ", ".join(f"{n}: {len(f['seconds'][0]['rounds'])}" for n, f in nets.items())
    return f"""# What a pass and a fit cost

Every figure is a multiple of one plain training epoch (forward, cross entropy, backward, Adam step;
batch size {record["batch_size"]}) over the same examples, timed in turns with it in one run: the
medians over rounds ({rounds}), {record["clock"]} clock. Data: {record["data"]}.
{conditions(record["environment"])}
A figure above its bar is bold. Written by `python -m benchmarks.pass_cost`.

Columns "at {FULL_SIZE:,}" follow cost(N) = fixed + N x per example, fitted to the times at two
sizes (the number of examples shown and about a quarter of it).

## A pass with the `linear` estimator

`engram.sensitivities` as a user calls it, diagnostics included. The fixed cost (planning, leverages
of 256 examples) is in epochs of {FULL_SIZE:,} examples. Posteriors are fitted after training on
16,384 examples, with eigenvalues to the prior's as with {FULL_SIZE:,} examples and a prior
precision of 60: how many eigenvalues of the Kronecker factors can be merged, and so what a pass
costs, depends on it ([what that changes](tolerance.md)). The last column is with `tolerance=0`.

{_passes(nets)}

## A K-FAC fit

`engram.laplace(structure="kronecker")` with `curvature="fisher"` (sampled) or `"ggn"` (exact). By
default the unlikely classes, with the last 9 % of the outputs' variance, are sampled also in the
exact one ([what that changes](tolerance.md)); the last column is with `tolerance=0`.

{_fits(nets)}

## 1000 outputs instead of 10

The cost on the same trunk with 1000 outputs over the cost with 10: of a pass, and of training,
which has to pay for the larger last layer too. "In epochs" is the first over the second: how much
more a pass costs in epochs of the net that it is made for.

{_many_outputs(nets)}

## Other ways to the same deviations

Diagonal posterior, timed on a few examples and extrapolated per example, with the relative
difference of the deviations from engram's.

{_slow_ways(nets)}
"""
