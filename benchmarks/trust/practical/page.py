"""The study's tables: how often levels were right, and every training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.records import conditions, table
from benchmarks.trust.practical.fit import (
    BAD_RANKING,
    BAD_SIZE,
    GOOD_RANKING,
    GOOD_SIZE,
    JUDGED,
    SHIPPED,
    Row,
    Said,
    chosen,
    factor,
    foretold,
    held_out,
    is_bad,
    is_good,
    shipped,
    with_unnamed,
)
from benchmarks.trust.practical.settings import SETTINGS, SUBSETS
from benchmarks.trust.practical.together import KEEP
from benchmarks.trust.practical.truths import Truth, kept_truths
from engram.trust.aspects import LEVELS

NEAR_RANKING, NEAR_SIZE = 0.8, 1.7  # of estimates that come near to being good


def share(rows: Sequence[Any], holds: Callable[[int], bool]) -> str:
    """So many of them, with the share."""
    count = sum(holds(n) for n in range(len(rows)))
    return f"{count} of {len(rows)}" + (f" ({count / len(rows):.0%})" if rows else "")


def cells(said: Sequence[Said]) -> list[str]:
    """How often levels were right."""
    bad = [one.level for one in said if is_bad(one.row)]
    good = [one.level for one in said if is_good(one.row)]
    called = [one.row for one in said if one.level == 0]
    levels = [one.level for one in said]
    return [
        share(bad, lambda n: bad[n] > 0),
        share(good, lambda n: good[n] > 0),
        share(good, lambda n: good[n] > 1),
        share(called, lambda n: is_good(called[n])),
        " / ".join(str(levels.count(n)) for n in range(len(LEVELS))),
    ]


def rates(record: Mapping[str, Any]) -> str:
    """Of each way: as shipped, without the net that it is tried on, and with limits without it."""
    rows, lines = with_unnamed(record["rows"]), []
    kinds = {"shipped": shipped, "predictors held out": foretold, "all held out": held_out}
    for words, find in kinds.items():
        said = find(rows)
        named = [one for one in said if "no visits" not in one.row["way"]]
        lines.append(["all", words, *cells(named)])
        recorded = [one for one in named if one.row["way"].startswith("recorded")]
        lines.append(["all that recorded", words, *cells(recorded)])
        for way in dict.fromkeys(row["way"] for row in rows):
            own = [one for one in said if one.row["way"] == way]
            lines.append([way, words, *cells(own)])
    header = ["way", "verdict", "bad flagged", "good flagged", "good called unreliable"]
    return table([*header, "called good and is", "good / caution / unreliable"], lines)


def nearly(record: Mapping[str, Any]) -> str:
    """How many of those called good along the record come near to it, predictors held out."""
    called = [s.row for s in foretold(record["rows"]) if s.level == 0 and s.row["path"] == JUDGED]
    fine = [
        row for row in called if row["ranking"] >= NEAR_RANKING and factor(row["size"]) <= NEAR_SIZE
    ]
    return (
        f"Of the {len(called)} along the record that are called good, predictors held out, "
        f"{len(fine)} have a ranking of {NEAR_RANKING:g} and sizes within {NEAR_SIZE:g} times."
    )


def beside_one_training(record: Mapping[str, Any]) -> str:
    """How estimates along the record rank, beside what one training without the examples would."""
    rows = [row for row in record["rows"] if row["path"] == JUDGED]
    called = [s.row for s in foretold(record["rows"]) if s.level == 0 and s.row["path"] == JUDGED]
    reached = [row["ranking"] / _one_training(row["setting"]) for row in rows]
    fine = [
        row
        for row in called
        if row["ranking"] >= _one_training(row["setting"]) and factor(row["size"]) <= GOOD_SIZE
    ]
    ceiling = sorted(_one_training(row["setting"]) for row in rows)
    return (
        f"A net trained *once* without the examples would have a ranking of {ceiling[0]:.2f} to "
        f"{ceiling[-1]:.2f} (median {_at(ceiling, 0.5):.2f}; by the reliability of the truth), as "
        "the truth is the mean over seeds: from there on no estimate of one net is to be blamed. "
        f"Along the record {share(reached, lambda n: reached[n] >= 1)} reach that, the lowest is "
        f"at {min(reached):.2f} of it. Of the {len(called)} called good, {len(fine)} "
        f"({len(fine) / len(called):.0%}) reach it with sizes within {GOOD_SIZE} times, and "
        f"{sum(map(is_good, called))} have the ranking of {GOOD_RANKING} that good ones have here."
    )


def _one_training(setting: str) -> float:
    return Truth.read(kept_truths()[setting]).of_one_training


def numbers(record: Mapping[str, Any]) -> str:
    """How far the numbers are that a verdict gives, held out."""
    rows, lines = with_unnamed(record["rows"]), []
    said = foretold(rows)
    for way in dict.fromkeys(row["way"] for row in rows):
        own = [(one.row, one.expected) for one in said if one.row["way"] == way]
        sizes = sorted(factor(row["size"]) for row, _ in own)
        left = sorted(factor(row["size"] / one.size) for row, one in own)
        means = sorted(factor(row["mean"]) for row, _ in own)
        ranks = sorted(abs(row["ranking"] - one.ranking) for row, one in own)
        within = sum(size <= BAD_SIZE for size in sizes) / len(own)
        lines.append(
            [
                way,
                f"{len(own)}",
                f"{sorted(row['ranking'] for row, _ in own)[len(own) // 2]:.2f}",
                f"{ranks[len(own) // 2]:.2f}",
                f"{within:.0%}",
                *(f"{_at(part, 0.5):.2f}, {_at(part, 0.9):.2f}" for part in (sizes, left, means)),
            ]
        )
    header = ["way", "runs", "ranking, median", "foretold within", "sizes within 2 times"]
    off = ["sizes off by: median, 9 of 10", "by what was foretold", "mean off by"]
    return table([*header, *off], lines)


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def page(record: Mapping[str, Any]) -> str:
    """The Markdown page."""
    rows = record["rows"]
    nets, ways = {row["setting"] for row in rows}, {row["way"] for row in rows}
    runs = {(row["setting"], row["seed"]) for row in rows}
    together = len({row["setting"] for row in rows if row["setting"] in kept_truths()})
    limits = chosen(foretold(with_unnamed(rows)))
    weights, losses = ([row["weights"] for row in rows], [row["losses"]["train"] for row in rows])
    return f"""# When to believe an estimate for nets as people train them: the study

{len(nets)} ways to train a net, of {len(SETTINGS)} in `benchmarks/trust/practical/settings.py`:
{kinds(rows)}; {min(weights):,} to {max(weights):,} weights, 300 to 600 examples of public data
sets, training losses of {min(losses):.3f} to {max(losses):.2f}. {len(runs)}
trainings of them were recorded with their visits and estimated in {len(ways)} ways: {len(rows)}
estimates. The truth is that of {SUBSETS} trainings on random {KEEP:.0%} of the examples, each
with another seed. That of {together} nets is kept in `trust-practical-truths.json`, trained all at
once (`benchmarks/trust/practical/together.py`).
{conditions(record["environment"])} Written by `python -m benchmarks.trust.practical NAMES
--seeds 0 1` with ENGRAM_DATA naming the folder of the data; settings that are not named stay as
they are, and `--again` writes this page anew from the rows.

*Ranking* is the rank correlation of the leave-one-out losses with the true losses without the
example, over the square root of the truth's own reliability (by halves of the trainings): a perfect
estimate of one net stays below 1, since the truth is the mean over seeds. *Size* is the estimated
over the true increase of the losses, *mean* the estimated over the true mean loss without the
example; nets that see {KEEP:.0%} of the data do somewhat worse than nets that leave out one,
so both come out a little low. *Of one training* is the ranking that the losses of one net trained
without the examples would have.

## How often the verdict is right

An estimate is *bad* with a ranking below {BAD_RANKING} or a size off by more than {BAD_SIZE:g}
times, *good* from {GOOD_RANKING} and within {GOOD_SIZE} times. *Flagged* is caution or unreliable.
*Predictors held out* were fitted without the net, all its seeds and ways. With *all held out* the
limits of caution were chosen without it too: of those that flag nine of ten bad estimates along the
record the ones that flag the fewest good; chosen on all nets they are {limits.ranking:g} for 1
minus the ranking and {limits.size:g} for the size, and shipped are {SHIPPED.ranking:g} and
{SHIPPED.size:g}. Which figures the predictors take was chosen on these nets as well. *No visits*
are the same rows as if no step had named its examples. Estimates of trainings of which nothing was
recorded and those from the end alone are never called good, which is why so many good ones are
flagged among all: no figure told sizes from there that were right from such as were off by up to 2
times.

{nearly(record)}

{beside_one_training(record)}

{rates(record)}

## What is to be expected, and how well it is foretold

{numbers(record)}

## Every estimate

{every(rows)}
"""


def kinds(rows: Sequence[Row]) -> str:
    """How many of each kind."""
    settings = dict.fromkeys((row["kind"], row["setting"]) for row in rows)
    found = [kind for kind, _ in settings]
    return ", ".join(f"{found.count(kind)} {kind}" for kind in dict.fromkeys(found))


def every(rows: Sequence[Row]) -> str:
    """One line for each way, over both seeds."""
    lines = []
    for row in rows:
        lines.append(
            [
                f"{row['setting']}, seed {row['seed']}",
                row["way"],
                f"{row['losses']['train']:.3f}",
                f"{row['true_loo']:.2f}",
                f"{row['ranking']:.2f}",
                f"{_one_training(row['setting']):.2f}",
                f"{row['score_ranking']:.2f}",
                f"{row['size']:.2f}",
                f"{row['mean']:.2f}",
                LEVELS[shipped([row])[0].level] if row["path"] else "-",
            ]
        )
    header = ["training", "way", "training loss", "true loss without", "ranking"]
    return table([*header, "of one training", "of scores", "size", "mean", "verdict"], lines)
