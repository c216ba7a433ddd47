"""Which examples of very large data are worth an estimate: by their losses, from a forward pass.

An example moves the model by its residual: where the loss is next to nothing there is nothing to
leave out. So a pass forward over all of them chooses those with the largest losses; a random sample
of the others stands for these in the mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from engram.core.data.batches import call
from engram.core.data.columns import Columns
from engram.engine.session import Session

if TYPE_CHECKING:
    import pandas as pd

FOLDER = "losses"  # of the first stage, inside the one of the scores
SAMPLE = 1000  # of the others that are estimated too: the error of their mean falls with its root
STAGE = "stage"
TOP, DRAWN, LOSS = "top", "sample", "loss"  # by which an example came to its estimate, or to none


def losses(session: Session, rows: Tensor) -> dict[str, Tensor]:
    """The loss of every example, forward alone."""
    size = session.batches.batch_size
    columns = Columns(len(rows))
    batches = session.batches.subset(rows, size)
    with torch.no_grad():
        for batch in session.parts(batches, "", -(-len(rows) // size)):
            placed = session.placed(batch)
            outputs = call(session.model, placed.inputs)
            targets = session.likelihood.prepare(outputs, placed.targets)
            loss = session.likelihood.loss(outputs, targets)
            columns.add({"example": batch.indices, "loss": loss})
    return columns.complete()


@dataclass(frozen=True)
class Chosen:
    """What the first pass says.

    Args:
        loss: of all examples, [N].
        stage: which way each goes, [N], as numbers of ``NAMES``.
    """

    NAMES: ClassVar[tuple[str, ...]] = (LOSS, TOP, DRAWN)

    loss: Tensor
    stage: Tensor

    @classmethod
    def of(cls, frame: pd.DataFrame, share: float) -> Chosen:
        """The share with the largest losses, and a sample of the others."""
        loss = torch.as_tensor(frame["loss"].to_numpy())
        count = max(1, round(share * len(loss)))
        order = loss.argsort(descending=True, stable=True)
        stage = torch.zeros(len(loss), dtype=torch.long)
        stage[order[:count]] = cls.NAMES.index(TOP)
        rest = order[count:]
        generator = torch.Generator().manual_seed(0)
        drawn = rest[torch.randperm(len(rest), generator=generator)[:SAMPLE]]
        stage[drawn] = cls.NAMES.index(DRAWN)
        return cls(loss, stage)

    def wanted(self, rows: range) -> Tensor:
        """Examples among these that are estimated."""
        own = torch.arange(rows.start, rows.stop)
        return own[self.stage[own] > 0]

    def completed(self, frame: pd.DataFrame, rows: range) -> pd.DataFrame:
        """Estimates of some, with the losses of the others and how each came about."""
        import pandas as pd

        whole = frame.set_index("example").reindex(pd.RangeIndex(rows.start, rows.stop))
        own = slice(rows.start, rows.stop)
        whole["loss"] = self.loss[own].to(torch.float64).numpy()
        whole["flagged"] = whole["flagged"].eq(True)
        whole[STAGE] = [self.NAMES[int(number)] for number in self.stage[own]]
        return whole.rename_axis("example").reset_index()


def mean_without(frame: pd.DataFrame) -> float:
    """Mean leave-one-out loss: of the top as it is, of the others by those that were drawn.

    What is drawn is the increase over the loss, which varies less; the losses are all known.
    """
    increase = frame["loo_loss"] - frame["loss"]
    top = frame[STAGE] == TOP
    drawn = increase[frame[STAGE] == DRAWN]
    rest = float(drawn.mean()) * int((~top).sum()) if len(drawn) else 0.0
    return float(frame["loss"].mean()) + (float(increase[top].sum()) + rest) / len(frame)
