"""Leave-one-out of linear models against fitting once more, and against statsmodels' influence."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import statsmodels.api as sm
import torch
from sklearn.linear_model import LogisticRegression, Ridge

import engram
from benchmarks.records import RESULTS, against, conditions, table, times, write
from benchmarks.timing import CLOCKS, environment, interleaved, ratio
from engram import models

Tasks = dict[str, Callable[[], object]]


def problem(count: int, width: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs with targets of a regression and of two classes that overlap."""
    random = np.random.default_rng(seed)
    inputs = random.normal(size=(count, width))
    signal = inputs @ random.normal(size=width) / np.sqrt(width)
    classes = random.uniform(size=count) < 1 / (1 + np.exp(-2 * signal))
    return inputs, signal + random.normal(size=count), classes.astype(int)


def fits(inputs: np.ndarray, targets: np.ndarray, classes: np.ndarray) -> dict[str, Tasks]:
    """For each model: fits, and leave-one-out from a fit of which nothing is known beforehand."""
    ridge = models.fit_linear(inputs, targets, penalty=1.0, dispersion=1.0)
    logistic = models.fit_glm(inputs, classes, penalty=1.0)
    peers = Ridge().fit(inputs, targets), LogisticRegression().fit(inputs, classes)
    newton = "newton-cholesky"
    return {
        "ridge": {
            "fit": lambda: models.fit_linear(inputs, targets, penalty=1.0, dispersion=1.0),
            "leave-one-out": lambda: models.sensitivities_of(replace(ridge)),
            "scikit-learn's fit": lambda: Ridge().fit(inputs, targets),
            "engram.from_estimator": lambda: engram.from_estimator(peers[0], inputs, targets),
        },
        "logistic": {
            "fit": lambda: models.fit_glm(inputs, classes, penalty=1.0),
            "leave-one-out": lambda: models.sensitivities_of(replace(logistic)),
            "scikit-learn's fit": lambda: LogisticRegression(solver=newton).fit(inputs, classes),
            "scikit-learn's fit, lbfgs": lambda: LogisticRegression().fit(inputs, classes),
            "engram.from_estimator": lambda: engram.from_estimator(peers[1], inputs, classes),
        },
    }


def influences(inputs: np.ndarray, targets: np.ndarray, classes: np.ndarray) -> dict[str, Tasks]:
    """The same measures by statsmodels, from a fit of its own, and by engram."""
    design = sm.add_constant(inputs)
    least = sm.OLS(targets, design).fit()
    logit = sm.GLM(classes, design, family=sm.families.Binomial()).fit()
    ours = models.read(least), models.read(logit)

    def one_step() -> None:
        found = logit.get_influence()
        _ = found.resid_studentized, found.cooks_distance, found.dfbetas, found.d_linpred

    return {
        "OLS, all measures (it loops)": {
            "statsmodels": lambda: least.get_influence().summary_frame(),
            "engram": lambda: models.linear_measures(replace(ours[0])).to_frame(),
        },
        "GLM, parameters without each example (it refits, engram takes a step)": {
            "statsmodels": lambda: logit.get_influence()._res_looo["params"],
            "engram": lambda: replace(ours[1]).parameter_deviation(),
        },
        "GLM, one-step measures (it does not loop)": {
            "statsmodels": one_step,
            "engram": lambda: models.glm_measures(replace(ours[1])),
        },
    }


def page(record: dict[str, Any]) -> str:
    """The Markdown page."""
    rows = []
    for name, found in record["fits"].items():
        rows += [
            [name, "leave-one-out / own fit", against(found["loo"], 1.0)],
            [name, "from_estimator / scikit-learn's fit", against(found["of"], 1.0)],
        ]
        if "of_lbfgs" in found:
            rows.append([name, "from_estimator / its lbfgs fit", against(found["of_lbfgs"], 1.0)])
    influence = [[name, times(found["speedup"])] for name, found in record["influences"].items()]
    small = record["influence_size"]
    return f"""# Leave-one-out of linear and generalised linear models

Times as ratios, in turns, the median of {record["repeats"]} rounds, {record["clock"]} clock. The
goal is at most 1 against fitting once more; what is above is bold.
{conditions(record["environment"])}
scikit-learn {record["scikit-learn"]}, statsmodels {record["statsmodels"]}.
Written by `python -m benchmarks.glm_speed`.

## Against fitting once more: N = {record["size"][0]:,}, P = {record["size"][1]}

{table(["model", "ratio of", "times"], rows)}

`leave-one-out` is `sensitivities_of` on a fit of engram, which holds the factor of its precision.
`engram.from_estimator` has only the coefficients and makes the precision first: one more product
X'WX. lbfgs needs six steps on these inputs, which are independent and of equal scale, and never
makes that product.

For logistic regression `estimator="exact"`, the default, looks where a second Newton step would
lead, with a pass over all data for each: for eight examples at this size, and for more where one of
these goes on. One step alone (`corrected`) looks too, since its verdict is made of that.

## Against statsmodels' influence: N = {small[0]:,}, P = {small[1]}

{table(["measures", "statsmodels / engram"], influence)}
"""


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    """Both comparisons."""
    record: dict[str, Any] = {
        "environment": environment(chosen.seed),
        "scikit-learn": version("scikit-learn"),
        "statsmodels": version("statsmodels"),
        "repeats": chosen.repeats,
        "clock": chosen.clock,
        "size": [chosen.examples, chosen.columns],
        "influence_size": [1000, 20],
        "fits": {},
        "influences": {},
    }
    for name, tasks in fits(*problem(chosen.examples, chosen.columns, chosen.seed)).items():
        seconds = interleaved(tasks, chosen.repeats, chosen.clock)
        found: dict[str, Any] = {
            "loo": ratio(seconds["leave-one-out"], seconds["fit"]),
            "of": ratio(seconds["engram.from_estimator"], seconds["scikit-learn's fit"]),
            "seconds": seconds,
        }
        if "scikit-learn's fit, lbfgs" in seconds:
            lbfgs = seconds["scikit-learn's fit, lbfgs"]
            found["of_lbfgs"] = ratio(seconds["engram.from_estimator"], lbfgs)
        record["fits"][name] = found
    for name, tasks in influences(*problem(*record["influence_size"], chosen.seed)).items():
        tasks["engram"]()  # first calls load kernels
        seconds = interleaved(tasks, chosen.repeats, chosen.clock)
        speedup = ratio(seconds["statsmodels"], seconds["engram"])
        record["influences"][name] = {"speedup": speedup, "seconds": seconds}
    return record


def main() -> None:
    """Measure, write and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.glm_speed", description=__doc__)
    parser.add_argument("--examples", type=int, default=100_000)
    parser.add_argument("--columns", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3, help="rounds; medians are reported")
    parser.add_argument("--threads", type=int, default=1, help="set OPENBLAS_NUM_THREADS alike")
    parser.add_argument("--clock", choices=list(CLOCKS), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the two files")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    record = measure(chosen)
    write(chosen.output, "glm_speed", record, page(record))
    print(page(record))


if __name__ == "__main__":
    main()
