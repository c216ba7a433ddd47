"""The model's call and its backward pass inside a user's training step, as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from engram.core.data.batches import as_outputs, logits_of
from engram.core.errors import EngineError
from engram.core.state.process import RandomState
from engram.engine.hooked import hooked

UPDATE = "use tracker.update() at chosen times instead: it looks at the model in eval mode"


class Witness:
    """Inputs, random state, outputs and their gradient of one call of the model.

    The step itself is untouched.

    Args:
        model: whose call it is.
        num_examples: rows that the batch should have.

    Attributes:
        args, kwargs: that the model was called with.
        random: the generators' state when it was called.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> witness = Witness(model, 3)
        >>> with witness.watching():
        ...     model(torch.ones(3, 2)).sum().backward()
        >>> witness.check()
        >>> witness.output_gradient.flatten()
        tensor([1., 1., 1.])
    """

    def __init__(self, model: nn.Module, num_examples: int) -> None:
        self.model, self.num_examples = model, num_examples
        self.raw: Tensor | None = None
        self.gradient: Tensor | None = None
        self.random: RandomState | None = None
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self._handle: RemovableHandle | None = None
        self._parameters = list(model.parameters())  # walking the model takes longer than looking
        self._weights: list[tuple[int, int]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Run the user's step inside; hooks are gone afterwards, also after an exception."""
        with hooked(self.model, self._begin, self._end):
            yield

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.random is not None:
            raise EngineError(
                "one call of the model in a streamed step",
                "a second one",
                f"put every call into a step of its own, or {UPDATE}",
            )
        self.random = RandomState.now({p.device for p in self._parameters})
        self._weights = self._marks()
        self.args, self.kwargs = args, kwargs

    def _end(self, model: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        logits = logits_of(result)
        if isinstance(logits, Tensor) and logits.requires_grad:
            self.raw = logits
            self._handle = logits.register_hook(self._arrived)

    def _arrived(self, gradient: Tensor) -> None:
        seen = gradient.detach()
        self.gradient = seen if self.gradient is None else self.gradient + seen

    def check(self) -> None:
        """The step must have had one forward and one backward pass over this batch."""
        if self.random is None:
            raise EngineError(
                "a call of the model inside the step",
                "none",
                "write outputs = model(inputs) inside `with tracker.step(indices):` (or twin_step)",
            )
        if self.raw is None or self.gradient is None:
            raise EngineError(
                "a backward pass inside the step",
                "none that reached the model's outputs",
                "call loss.backward() inside `with tracker.step(indices):` (or twin_step)",
            )
        if len(self.outputs) != self.num_examples:
            raise EngineError(
                f"{self.num_examples} examples, as many as there are indices",
                f"outputs for {len(self.outputs)}",
                "give the indices of exactly the examples in the batch",
            )
        if self._marks() != self._weights:
            raise EngineError(
                "the same weights from the model's call to the end of the step",
                "weights that were changed inside `with tracker.step(...)`",
                "call optimizer.step() after the block; with IVON, open the step inside of "
                "engram.optimizers.ivon.sampled(optimizer)",
            )

    def release(self) -> None:
        """Let go of the user's graph and of everything that was noted down."""
        if self._handle is not None:
            self._handle.remove()
        self.raw = self.gradient = None
        self.args, self.kwargs = (), {}

    @property
    def outputs(self) -> Tensor:
        """f, [B, K], as the user's forward pass gave them."""
        assert self.raw is not None
        return as_outputs(self.raw.detach())

    @property
    def output_gradient(self) -> Tensor:
        """Gradient of the user's loss by the outputs, [B, K]."""
        assert self.gradient is not None
        return as_outputs(self.gradient)

    def _marks(self) -> list[tuple[int, int]]:
        """What changes with the weights, cheap to look at: where they lie, and their version."""
        return [(p.data_ptr(), p._version) for p in self._parameters]
