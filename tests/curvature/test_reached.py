"""K-FAC of padded sequences: what a batch is padded to does not matter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import engram

WORDS, WIDTH, NUMBER = 11, 6, 8


class Encoder(nn.Module):
    """Attention over tokens that are not padding (0), and their mean, or the first one's state."""

    def __init__(self, pools: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.wide, self.narrow = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.head, self.pools = nn.Linear(WIDTH, 3), pools

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(x, x, x, key_padding_mask=tokens == 0, need_weights=False)[0]
        x = x + self.narrow(nn.functional.gelu(self.wide(x)))
        if not self.pools:
            return self.head(x[:, 0])
        there = (tokens != 0)[:, :, None].to(x.dtype)
        return self.head((x * there).sum(1) / there.sum(1))


def sentences() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    tokens = torch.randint(1, WORDS, (NUMBER, 5))
    tokens[torch.arange(5) >= torch.randint(2, 6, (NUMBER, 1))] = 0
    return tokens, torch.arange(NUMBER) % 3


@pytest.mark.parametrize("pools", [True, False])
@pytest.mark.parametrize("structure", ["kronecker", "ekfac"])
def test_more_padding_changes_nothing(structure: str, pools: bool) -> None:
    tokens, targets = sentences()
    model = Encoder(pools).double()
    wider = nn.functional.pad(tokens, (0, 4))
    found = []
    for data in ((tokens, targets), (wider, targets)):
        posterior = engram.laplace(
            model, data, structure=structure, prior_precision=1.0, progress=False
        )
        result = engram.sensitivities(model, data, posterior, progress=False)
        ones = {name: torch.ones_like(p) for name, p in model.named_parameters()}
        found.append((result.loo_loss, posterior.multiply(ones)))
    torch.testing.assert_close(found[0][0], found[1][0])
    for name, value in found[0][1].items():
        torch.testing.assert_close(value, found[1][1][name], msg=name)


def test_the_factors_are_those_of_the_tokens_alone() -> None:
    """With factors by hand: the mean over tokens of c c' times the sum of r r'."""
    tokens, targets = sentences()
    model = Encoder(True).double()
    posterior = engram.laplace(
        model, (tokens, targets), structure="kronecker", prior_precision=1.0, progress=False
    )
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def keep(_: nn.Module, given: tuple[Tensor, ...], result: Tensor) -> None:
        inputs.append(given[0])
        outputs.append(result)

    handle = model.wide.register_forward_hook(keep)
    logits = model(tokens)
    handle.remove()
    there = tokens != 0
    columns = nn.functional.pad(inputs[0].detach()[there], (0, 1), value=1.0)
    probability = logits.softmax(1).detach()
    rows = torch.zeros(9, 9).double()
    for k in range(3):  # of the root with columns sqrt(p_k) (e_k - p)
        seed = probability[:, k, None].sqrt() * (torch.eye(3).double()[k] - probability)
        (own,) = torch.autograd.grad(logits, outputs[0], seed, retain_graph=True)
        rows += own[there].T @ own[there]
    expected = torch.kron(rows, columns.T @ columns / len(columns)) + torch.eye(63)
    matrix = torch.zeros(9, 7).double()
    matrix[2, 3], matrix[5, 6] = 1.0, -2.0
    step = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    step["wide.weight"], step["wide.bias"] = matrix[:, :-1], matrix[:, -1]
    image = posterior.multiply(step)
    moved = (expected @ matrix.flatten()).reshape(9, 7)
    torch.testing.assert_close(image["wide.weight"], moved[:, :-1])
    torch.testing.assert_close(image["wide.bias"], moved[:, -1])


def test_causal_models_of_padded_sequences_likewise() -> None:
    """The likelihood has a root for every token, and each says nothing of the others."""
    tokens, _ = sentences()

    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.mixing = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.head = nn.Linear(WIDTH, WORDS)

        def forward(self, x: Tensor) -> Tensor:
            mean = self.embedding(x).cumsum(1) / torch.arange(1, x.shape[1] + 1)[None, :, None]
            found: Tensor = self.head(torch.tanh(self.mixing(mean)))
            return found

    model, found = Causal().double(), []
    for extra in (0, 3):
        data = nn.functional.pad(tokens, (0, extra))
        labels = torch.where(data == 0, -100, data)
        posterior = engram.laplace(
            model,
            (data, labels),
            likelihood="tokens",
            structure="kronecker",
            curvature="ggn",
            prior_precision=1.0,
            progress=False,
        )
        found.append(
            engram.sensitivities(
                model, (data, labels), posterior, diagnostics=False, progress=False
            ).loo_loss
        )
    torch.testing.assert_close(*found)
