"""One way to train everything: mini-batches, a cosine schedule, weight decay delta / N."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR
from tqdm import tqdm

from experiments.panel import Scale
from experiments.workplace import Data

MOMENTUM = 0.9
IBLR_BETA2 = 0.99999
STABLE = 0.1  # the largest rate of SGD with momentum that a scale takes by itself
# iBLR's momentum is an average, ten times smaller than a sum with the same beta
LARGEST = {"iblr": STABLE / (1 - MOMENTUM)}


@dataclass(frozen=True)
class Training:
    """How a net is trained; the learning rate falls along a cosine from the first to the last.

    Args:
        optimizer: ``sgd``, ``adam``, ``adamw`` or ``iblr``.
        rates: the first learning rate and the last.
        batch_size: of the mini-batches.
        prior_precision: delta of delta / 2 |theta|^2 on the sum of the losses, for all of the
            paper's images.
        hessian_start: h_0 of iBLR.
    """

    optimizer: str
    rates: tuple[float, float]
    batch_size: int
    prior_precision: float
    hessian_start: float = 0.1

    def on(self, data: Data, scale: Scale) -> Training:
        """On as many images as there are: delta / N stays; rates and batches are the scale's."""
        first, last = self.rates
        faster = min(scale.faster, max(1.0, LARGEST.get(self.optimizer, STABLE) / first))
        return replace(
            self,
            rates=(faster * first, faster * last),
            batch_size=scale.batch or self.batch_size,
            prior_precision=data.share * self.prior_precision,
            hessian_start=scale.hessian_start or self.hessian_start,
        )


def make_optimizer(model: nn.Module, training: Training, num_data: int) -> optim.Optimizer:
    """With weight decay delta / N, since the loss is a mean."""
    rate, decay = training.rates[0], training.prior_precision / num_data
    parameters = model.parameters()
    if training.optimizer == "iblr":
        from ivon import IVON

        found: optim.Optimizer = IVON(
            parameters,
            lr=rate,
            ess=num_data,
            hess_init=training.hessian_start,
            beta1=MOMENTUM,
            beta2=IBLR_BETA2,
            weight_decay=decay,
        )
        return found
    if training.optimizer == "sgd":
        return optim.SGD(parameters, lr=rate, momentum=MOMENTUM, weight_decay=decay)
    kinds: dict[str, Any] = {"adam": optim.Adam, "adamw": optim.AdamW}
    chosen: optim.Optimizer = kinds[training.optimizer](parameters, lr=rate, weight_decay=decay)
    return chosen


def likelihood_of(model: nn.Module) -> str:
    """One logit, or one for every class."""
    last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    return "bernoulli" if last.out_features == 1 else "categorical"


def loss_of(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross entropy of one logit, or of one for every class."""
    if outputs.shape[1] == 1:
        return functional.binary_cross_entropy_with_logits(
            outputs[:, 0], targets.to(outputs.dtype), reduction=reduction
        )
    return functional.cross_entropy(outputs, targets, reduction=reduction)


def fit(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    training: Training,
    epochs: int,
    *,
    seed: int = 0,
    optimizer: optim.Optimizer | None = None,
    after: Callable[[int], None] | None = None,
    progress: bool = True,
    words: str = "training",
) -> nn.Module:
    """Train for some epochs; ``after(epoch)`` is called at the end of each.

    Args:
        model: trained in place, and returned.
        data: images and labels.
        training: how.
        epochs: passes over the data.
        seed: of the order of the batches.
        optimizer: one that was made before, for whoever follows its state.
        after: is told the number of each epoch that has ended.
        progress: show a bar.
        words: beside it.
    """
    inputs, targets = data
    optimizer = optimizer or make_optimizer(model, training, len(targets))
    schedule = CosineAnnealingLR(optimizer, epochs, eta_min=training.rates[1])
    generator = torch.Generator().manual_seed(seed)
    sampled = hasattr(optimizer, "sampled_params")
    for epoch in tqdm(range(1, epochs + 1), words, disable=not progress, leave=False, delay=2):
        model.train()
        for batch in torch.randperm(len(targets), generator=generator).split(training.batch_size):
            optimizer.zero_grad()
            with optimizer.sampled_params(train=True) if sampled else nullcontext():
                loss_of(model(channels_last(inputs[batch])), targets[batch]).backward()
            optimizer.step()
        schedule.step()
        if after is not None:
            model.eval()
            after(epoch)
    return model.eval()


def channels_last(images: Tensor) -> Tensor:
    """The same images in memory as convolutions are fastest on a processor."""
    if images.shape[1] > 1:
        return images.contiguous(memory_format=torch.channels_last)
    height, width = images.shape[2:]  # one channel: strides alone tell the layout
    return images.contiguous().as_strided(images.shape, (height * width, 1, width, 1))


@torch.no_grad()
def figures_on(model: nn.Module, data: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Mean negative log likelihood in nats, and the share of wrong predictions."""
    was = model.training
    model.eval()
    outputs = torch.cat([model(channels_last(part)) for part in data[0].split(500)])
    model.train(was)
    one = outputs.shape[1] == 1
    predicted = (outputs[:, 0] > 0).long() if one else outputs.argmax(1)
    return {
        "nll": float(loss_of(outputs, data[1])),
        "error": float((predicted != data[1]).double().mean()),
    }


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Weights to keep, by name."""
    return {f"weights.{name}": value.clone() for name, value in model.state_dict().items()}


def with_weights(model: nn.Module, arrays: Any) -> nn.Module:
    """The model at weights that were kept."""
    prefix = "weights."
    model.load_state_dict(
        {n.removeprefix(prefix): v for n, v in arrays.items() if n.startswith(prefix)}
    )
    return model.eval()
