"""What the streamed steps of one epoch say about every example."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engram.core.errors import ArgumentError, DataError
from engram.core.storage.values import read_fields, wrong
from engram.tracking.history import Record
from engram.tracking.visits import Visit

if TYPE_CHECKING:
    import pandas as pd

UNSEEN, LOSS_ONLY, COMPLETE = 0, 1, 2
COLUMNS = ("loss", "loo_loss", "score", "visited", "visits", "status")


@dataclass
class Epoch:
    """Every example as it was last visited; losses in nats per example.

    Attributes:
        loss, loo_loss: with the example and without it, at its visit, [N].
        score: L1 norm of the deviation of its prediction, [N].
        visited: number of the streamed step that visited it last, -1 if none did, [N].
        visits: how often it was visited, [N].
        status: 0 not visited, 1 loss only (the optimizer had no state yet), 2 complete, [N].
    """

    loss: Tensor
    loo_loss: Tensor
    score: Tensor
    visited: Tensor
    visits: Tensor
    status: Tensor

    def __repr__(self) -> str:
        count, known = len(self.status), int((self.status == COMPLETE).sum())
        again = int((self.visits > 1).sum())
        return (
            f"Epoch({self.seen:,} of {count:,} examples visited, {again:,} more than once, "
            f"{known:,} with an estimate)"
        )

    @classmethod
    def empty(cls, num_data: int) -> Epoch:
        """Nothing visited yet."""
        with torch.inference_mode(False):  # written to in whatever mode a step runs
            nothing = torch.full((num_data,), torch.nan, dtype=torch.float32)
            losses = (nothing, nothing.clone(), nothing.clone())
            visited = torch.full((num_data,), -1, dtype=torch.int64)
            visits = torch.zeros(num_data, dtype=torch.int64)
            status = torch.zeros(num_data, dtype=torch.int8)
        return cls(*losses, visited, visits, status)

    def add(self, indices: Tensor, visit: Visit, step: int) -> None:
        """Write a step's examples; a later visit replaces an earlier one."""
        for name in ("loss", "loo_loss", "score"):
            getattr(self, name)[indices] = getattr(visit, name).to("cpu", torch.float32)
        self.visited[indices] = step
        self.visits[indices] += 1
        self.status[indices] = COMPLETE if visit.complete else LOSS_ONLY

    @property
    def seen(self) -> int:
        """How many examples were visited."""
        return int((self.status > UNSEEN).sum())

    @property
    def all_seen(self) -> bool:
        """Whether every example was visited."""
        return bool((self.status > UNSEEN).all())

    @property
    def estimated(self) -> int:
        """How many examples have a leave-one-out loss, which :attr:`loo_nll` is the mean of."""
        return int(self.loo_loss[self.status == COMPLETE].isfinite().sum())

    @property
    def train_nll(self) -> float:
        """Mean loss of the visited examples at their visits."""
        return float(self.loss[self.status > UNSEEN].double().mean())

    @property
    def loo_nll(self) -> float:
        """Mean leave-one-out loss at the visits: the estimate of the test loss."""
        return float(self.loo_loss[self.status == COMPLETE].double().mean())

    def to_frame(self) -> pd.DataFrame:
        """One row per example, indexed by its position in the data."""
        import pandas as pd

        columns = {name: getattr(self, name).numpy() for name in COLUMNS}
        return pd.DataFrame(columns).rename_axis("example")

    def record(self, step: int, validation: float, ranks: int) -> Record:
        """What the history keeps of it."""
        losses = (self.train_nll, self.loo_nll, validation)
        return Record(step, *losses, streamed=True, examples=self.estimated, ranks=ranks)

    def state(self) -> dict[str, Tensor]:
        """Copies of the columns."""
        return {name: getattr(self, name).clone() for name in COLUMNS}

    @classmethod
    def of_state(cls, state: Any, num_data: int) -> Epoch:
        """What :meth:`state` gave, for as many examples."""
        columns = read_fields(cls, state, "a saved epoch")
        if columns["status"].shape != (num_data,):
            raise DataError(
                f"a saved epoch of {num_data:,} examples",
                f"one of {columns['status'].numel():,}",
                "resume with the data that the run was started with",
            )
        like = cls.empty(num_data)
        for name, column in columns.items():
            wanted = getattr(like, name)
            if column.shape != wanted.shape or column.dtype != wanted.dtype:
                raise wrong(f"a saved epoch: {name}", f"{wanted.dtype} [N]", column)
        if not set(columns["status"].unique().tolist()) <= {UNSEEN, LOSS_ONLY, COMPLETE}:
            raise wrong("a saved epoch: status", "0, 1 or 2", columns["status"])
        return cls(**{name: column.cpu().clone() for name, column in columns.items()})


def ended(done: Record | None, step: int | None, told: bool) -> Record:
    """The record of the epoch that ended by itself, if it may have this step.

    Args:
        done: that record, if there is one.
        step: asked for; None for any.
        told: whether others know of the step under which it was recorded.
    """
    if done is None:
        raise DataError(
            "at least one streamed step", "none", "run steps inside `with tracker.step(...)`"
        )
    if told and step is not None and step != done.step:
        raise ArgumentError(
            f"step {done.step}, under which the epoch was recorded when its last example came",
            f"step {step}",
            "pass epoch= to tracker.step, or leave step out",
        )
    return done
