"""Which layer of a model comes last."""

from __future__ import annotations

import torch
from torch import nn

from engram.core.data.batches import Batches
from engram.core.parameters import uncompiled
from engram.core.state.model import state_preserved
from engram.engine.passes import Trace, trace
from engram.engine.prepare import first_examples, first_plan, prepare
from engram.engine.refusals import pass_on


def last_layer(model: nn.Module, batches: Batches) -> tuple[str, ...]:
    """Parameters of the layer whose result is the model's output, or comes last before it.

    From a run of two or three examples, in which no gradient of a parameter is formed.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3))
        >>> last_layer(model, Batches((torch.zeros(5, 2), torch.zeros(5)), 1))
        ('2.weight', '2.bias')
    """
    model = uncompiled(model)
    with state_preserved(model):
        found = _run(model, batches)
        gradients = found.gradients(torch.ones_like(found.outputs))
        used = [s for s, g in zip(found.sites, gradients, strict=True) if g is not None]
        owner = used[-1].names[-1].rpartition(".")[0]
        reaching = {name for site in used for name in site.names}
        return tuple(
            name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and name.rpartition(".")[0] == owner and name in reaching
        )


def _run(model: nn.Module, batches: Batches) -> Trace:
    """A forward pass over a few examples, by a plan that need not be right in its gradients."""
    few = first_examples(model, batches)
    try:
        return trace(model, first_plan(model, few, set()), few.inputs, len(few))
    except Exception as error:  # some form of the plan runs, or the error says what is wrong
        pass_on(error)
        return prepare(model, batches).trace(few)
