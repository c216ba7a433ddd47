"""The trainings of a setting on random subsets, all at once: their weights stacked, one loop.

Each net has its own first weights, subset, order of batches, dropout and views. All that is shared
is the step, which is elementwise in the weights for the optimizers of the study. For nets of some
thousand weights that takes a third of the time of one after the other.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional

from benchmarks.practical.loop import Setting

KEEP = 0.85  # share of the examples that each training sees
BATCHES_SEED = (
    10_000  # of orders, dropout and views; first weights and subsets have seeds from 0 on
)
PART = 100  # examples that all nets are evaluated on at a time


@dataclass(frozen=True, eq=False)
class Trainings:
    """What S nets, each trained on some of N examples, say about all.

    Args:
        kept: which examples each saw, [S, N].
        outputs: of each on all examples, [S, N, K].
        losses: likewise, nats, [S, N].
    """

    kept: Tensor
    outputs: Tensor
    losses: Tensor

    def __len__(self) -> int:
        return len(self.kept)


class _Stacked(nn.Module):
    """Weights of all nets, as an optimizer takes them."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights.values())


def together(setting: Setting) -> Trainings:
    """All nets of a setting, each on its own share of the examples."""
    inputs, targets = setting.split().data
    number, nets, own = len(inputs), [], []
    for seed in range(setting.subsets):
        torch.manual_seed(seed)
        nets.append(setting.net().train())
        own.append(torch.randperm(number)[: round(KEEP * number)])
    stacked, buffers = stack_module_state(nets)
    weights = {name: nn.Parameter(value.detach().clone()) for name, value in stacked.items()}
    model = copy.deepcopy(nets[0])
    _train(setting, model, (weights, buffers), torch.stack(own))
    outputs = _outputs(model.eval(), (weights, buffers), inputs)
    kept = torch.zeros(len(nets), number, dtype=torch.bool).scatter_(1, torch.stack(own), True)
    losses = functional.cross_entropy(
        outputs.flatten(0, 1), targets.repeat(len(nets)), reduction="none"
    )
    return Trainings(kept, outputs, losses.view(len(nets), number))


def _train(
    setting: Setting,
    model: nn.Module,
    state: tuple[dict[str, Tensor], dict[str, Tensor]],
    own: Tensor,
) -> None:
    """Move the stacked weights, and statistics of normalisation, as the setting's loop would."""
    inputs, targets = setting.split().data
    optimizer = setting.optimizer(_Stacked(state[0]))
    steps = setting.epochs * -(-own.shape[1] // setting.batch_size)
    schedule = None if setting.schedule is None else setting.schedule(optimizer, steps)

    def loss(
        weights: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor
    ) -> Tensor:
        return functional.cross_entropy(functional_call(model, (weights, buffers), (x,)), y)

    each = vmap(loss, randomness="different")
    torch.manual_seed(BATCHES_SEED)
    for _ in range(setting.epochs):
        order = own.gather(1, torch.rand(own.shape).argsort(1))
        for chosen in order.split(setting.batch_size, 1):
            views = inputs[chosen]
            if setting.augment is not None:
                views = torch.stack([setting.augment(part) for part in views])
            optimizer.zero_grad()
            each(*state, views, targets[chosen]).sum().backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()


def _outputs(
    model: nn.Module, state: tuple[dict[str, Tensor], dict[str, Tensor]], inputs: Tensor
) -> Tensor:
    """Of every net on all examples, [S, N, K]."""
    run = vmap(lambda w, b, x: functional_call(model, (w, b), (x,)), in_dims=(0, 0, None))
    with torch.no_grad():
        return torch.cat([run(*state, part) for part in inputs.split(PART)], 1)
