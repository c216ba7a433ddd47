"""The nets and their data, of any size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import engram
from benchmarks.libraries.case import Case, summed_loss
from benchmarks.nets import SIDE, Transformer, lenet5, mlp
from benchmarks.practical.nets import resnet20

NUM_TEST = 32  # that influences are on
PRIOR_PRECISION = 1.0


class LanguageModel(nn.Module):
    """A small Llama: token numbers [N, T] to logits [N, T, V]."""

    def __init__(self, words: int = 2000, width: int = 64, length: int = 64) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        self.inner = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=words,
                hidden_size=width,
                intermediate_size=2 * width,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=length,
                attn_implementation="eager",
            )
        )

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.inner(input_ids=tokens, use_cache=False).logits
        return logits


def pixels(
    count: int, channels: int = 1, side: int = SIDE, classes: int = 10
) -> tuple[Tensor, Tensor]:
    """Images of a size: what they show does not change what anything costs."""
    return torch.rand(count, channels, side, side), torch.randint(classes, (count,))


def text(count: int, length: int = 64, words: int = 2000) -> tuple[Tensor, Tensor]:
    """Token numbers, and the next ones."""
    tokens = torch.randint(words, (count, length + 1))
    return tokens[:, :-1], tokens[:, 1:]


def record_of(model: nn.Module, train: tuple[Tensor, Tensor]) -> engram.Training:
    """The record of two epochs of training."""
    loader = DataLoader(TensorDataset(*train), batch_size=Case.batch_size, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters())
    training = engram.record(optimizer, model, loader=loader)
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            (summed_loss(model(inputs), targets) / len(targets)).backward()
            optimizer.step()
    return training


@dataclass(frozen=True)
class Setting:
    """A net with its data.

    Args:
        examples: over which methods are timed that are not too slow for it.
        pairs: whether influences on other examples are measured too.
        recorded: whether the net comes with the record of a training.
    """

    title: str
    net: Callable[[], nn.Module]
    data: Callable[[int], tuple[Tensor, Tensor]]
    examples: int
    pairs: bool = False
    recorded: bool = False

    def case(self, count: int, seed: int = 0) -> Case:
        """So many examples, and a fresh net, or one with the record of two epochs."""
        torch.manual_seed(seed)
        model, train, test = self.net(), self.data(count), self.data(NUM_TEST)
        training = record_of(model, train) if self.recorded else None
        return Case(model.eval(), train, test, PRIOR_PRECISION, training)


NETS = {
    "mlp": Setting("MLP 784-500-300-10", lambda: mlp(10), pixels, 4096, pairs=True),
    "lenet5": Setting("LeNet5", lambda: lenet5(10), pixels, 2048, pairs=True),
    "resnet20": Setting(
        "ResNet-20, BatchNorm, 32 x 32 x 3",
        lambda: resnet20(16),
        lambda count: pixels(count, 3, 32),
        128,
    ),
    "vit": Setting(
        "transformer encoder on images, 28 tokens, width 64",
        lambda: Transformer(10),
        pixels,
        512,
    ),
    "llama": Setting("Llama, 2 layers, width 64, V = 2,000, T = 64", LanguageModel, text, 256),
}


def wide(width: int, outputs: int = 10) -> Setting:
    """An MLP of any width and number of classes."""

    def net() -> nn.Module:
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(SIDE * SIDE, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, outputs),
        )

    return Setting(f"MLP, width {width}", net, lambda count: pixels(count, classes=outputs), 1024)


def long(length: int) -> Setting:
    """The language model on sequences of another length."""
    return Setting(
        f"T = {length}",
        lambda: LanguageModel(200, length=length),
        lambda count: text(count, length, 200),
        max(16, 4096 // length),
    )


GROWTH: dict[str, dict[int, Setting]] = {
    "examples": {
        count: Setting("LeNet5", lambda: lenet5(10), pixels, count) for count in (256, 1024, 4096)
    },
    "width of an MLP (parameters)": {width: wide(width) for width in (64, 256, 1024)},
    "classes": {outputs: wide(128, outputs) for outputs in (10, 100, 1000)},
    "sequence length": {length: long(length) for length in (16, 64, 256)},
}
GROWING = ("engram, Kronecker", "kronfluence, EK-FAC", "Jacobian, diagonal")
