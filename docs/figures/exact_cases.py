"""Draws docs/images/exact-cases.png: a smoother with and without what fits worst."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from engram.families import LinearStateSpace

TARGET = Path(__file__).resolve().parent.parent / "images" / "exact-cases.png"
BLUE, RED, GREY = "#1f5f99", "#c0392b", "#888888"


def series() -> tuple[np.ndarray, np.ndarray]:
    """Observed times and values of a slow wave, a gap and two wrong readings in it."""
    random = np.random.default_rng(4)
    times = np.concatenate([np.arange(38), np.arange(50, 80)])
    values = 2 * np.sin(times / 9) + 0.4 * random.normal(size=len(times))
    values[15], values[50] = values[15] - 4, values[50] + 3.5
    return times, values


def main() -> None:
    """Fit once, remove two observations, draw both."""
    times, values = series()
    walk = LinearStateSpace(
        80, [[1.0, 1.0], [0.0, 0.95]], [[0.01, 0.0], [0.0, 0.01]], [[1.0, 0.0]], 0.16, [0.0, 0.0]
    )
    posterior = walk.fit((times, values[:, None]))
    loo = posterior.loo_log_predictive().numpy()
    worst = np.argsort(loo)[:2]
    without = posterior.remove(worst.tolist())

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 5), sharex=True, layout="constrained")
    for smoother, colour, label in (
        (posterior, GREY, "all observations"),
        (without, BLUE, "without the two"),
    ):
        moments = smoother.moments()
        mean, spread = moments["mean"][:, 0].numpy(), moments["variance"][:, 0, 0].sqrt().numpy()
        top.plot(mean, color=colour, label=label)
        top.fill_between(
            range(80), mean - 2 * spread, mean + 2 * spread, color=colour, alpha=0.2, lw=0
        )
    top.plot(times, values, ".", color="black", ms=4)
    top.plot(times[worst], values[worst], "o", mfc="none", color=RED, ms=9)
    top.set_ylabel("state")
    top.legend(frameon=False, loc="lower left")
    bottom.stem(times, -loo, linefmt=GREY, markerfmt=".", basefmt=" ")
    bottom.plot(times[worst], -loo[worst], "o", mfc="none", color=RED, ms=9)
    bottom.set_ylabel("leave-one-out loss, nats")
    bottom.set_xlabel("time")
    for axis in (top, bottom):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(TARGET, dpi=130)


if __name__ == "__main__":
    main()
