"""One removal beside the truth, and what its verdict said."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import engram
from engram.trust.verdict import Verdict

OFF = 3.0  # factor from which on an estimate is wrong


@dataclass(frozen=True)
class Row:
    """An estimated change of a mean loss, the true one, and the verdict.

    Args:
        kind: of nets, and what is known of their training.
        net: which one.
        way: posterior and rule.
        group: that is left out.
        loss: whose change it is: the group's ``own`` or that of the ``test`` set.
        estimated, true: nats per example, without the group minus with it.
        level: of the verdict.
        sign: what it says of the sign.
    """

    kind: str
    net: str
    way: str
    group: str
    loss: str
    estimated: float
    true: float
    level: str
    sign: str

    @property
    def same_sign(self) -> bool:
        return self.estimated * self.true > 0

    @property
    def wrong(self) -> bool:
        """Whether the sign is wrong, or the size by more than a factor 3."""
        return not (self.same_sign and 1 / OFF <= self.estimated / self.true <= OFF)

    def plain(self) -> dict[str, Any]:
        found = asdict(self)
        return found | {name: float(f"{found[name]:.4g}") for name in ("estimated", "true")}


def row(
    about: tuple[str, str, str, str], loss: str, estimated: float, true: float, verdict: Verdict
) -> Row:
    """Kind, net, way and group, with the numbers and what the verdict says."""
    return Row(*about, loss, estimated, true, verdict.level, verdict.ranking.text)


def own(about: tuple[str, str, str, str], removal: engram.Removal, true: float) -> Row:
    """Of the group's own loss."""
    return row(about, "own", removal.group.change, true, removal.verdict)
