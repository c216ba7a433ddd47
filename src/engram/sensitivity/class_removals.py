"""The effects of leaving out each class in turn, as people look at them."""

from __future__ import annotations

import math
from textwrap import wrap
from typing import TYPE_CHECKING

from engram.trust.aspects import LEVELS
from engram.trust.verdict import Reason, Verdict

if TYPE_CHECKING:
    import pandas as pd

    from engram.sensitivity.groups import Removal

WIDTH = 80  # of a terminal's line


class ClassRemovals(dict[int, "Removal"]):
    """The effect of leaving out each class, by class number."""

    @property
    def verdicts(self) -> dict[int, Verdict]:
        """How far to believe each, by class number."""
        return {label: removal.verdict for label, removal in self.items()}

    def to_frame(self) -> pd.DataFrame:
        """One row per class."""
        import pandas as pd

        rows = {
            label: {
                "examples": len(removal.indices),
                "class_loss": float(removal.group.loss.mean()),
                "class_loss_without": float(removal.group.loss_without.mean()),
                "evaluation_change": removal.evaluation.change if removal.evaluation else math.nan,
                "flagged": removal.flagged,
                "verdict": removal.verdict.level,
            }
            for label, removal in self.items()
        }
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("class")

    def __repr__(self) -> str:
        lines = [
            "Each class left out: change of the mean loss without it, nats per example",
            f"{'class':>7}{'examples':>10}{'its own':>10}{'evaluation':>12}  verdict",
        ]
        for label, removal in self.items():
            own, other = removal.group.change, removal.evaluation
            change = "-" if other is None else f"{other.change:+.4f}"
            row = f"{label:>7}{len(removal.indices):>10,}{own:>+10.4f}{change:>12}"
            lines.append(f"{row}  {removal.verdict.level}")
        return "\n".join([*lines, *self._reasons()])

    def _reasons(self) -> list[str]:
        """Why classes are doubtful, each reason once: as it is where it is worst."""
        worst: dict[str, Reason] = {}
        counts: dict[str, int] = {}
        for removal in self.values():
            for reason in removal.verdict.reasons:
                counts[reason.signal] = counts.get(reason.signal, 0) + 1
                known = worst.get(reason.signal)
                if known is None or _how_bad(reason) > _how_bad(known):
                    worst[reason.signal] = reason
        told = sorted(worst.values(), key=_how_bad, reverse=True)
        return [
            line
            for reason in told
            for line in wrap(
                f"{counts[reason.signal]} of {len(self)}, the worst {reason}",
                WIDTH,
                initial_indent="  ",
                subsequent_indent="    ",
            )
        ]


def _how_bad(reason: Reason) -> tuple[int, float]:
    return LEVELS.index(reason.level), reason.value
