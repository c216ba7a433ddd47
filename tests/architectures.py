"""Small models, one trap each, all ending in a layer called `head` with K outputs."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm


class Headed(nn.Module):
    """A body, its positions averaged away if it has any, and a linear head."""

    def __init__(self, body: nn.Module, width: int, num_outputs: int, channels_first: bool = False):
        super().__init__()
        self.body, self.head = body, nn.Linear(width, num_outputs)
        self.channels_first = channels_first

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        if h.ndim > 2:
            h = h.flatten(2).mean(2) if self.channels_first else h.flatten(1, -2).mean(1)
        return self.head(h)


def mlp(num_outputs: int, bias: bool = True) -> nn.Module:
    body = nn.Sequential(nn.Linear(4, 5, bias=bias), nn.Tanh())
    model = Headed(body, 5, num_outputs)
    if not bias:
        model.head = nn.Linear(5, num_outputs, bias=False)
    return model


class OneOutput(nn.Module):
    """Returns [N] instead of [N, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)[:, 0]


class FilterResponseNorm(nn.Module):
    """A user's own module with bare parameters, one of them inside a maximum."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(1, channels, 1, 1) + 0.5)
        self.shift = nn.Parameter(torch.randn(1, channels, 1, 1))
        self.threshold = nn.Parameter(torch.zeros(1, channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.square().mean((2, 3), keepdim=True) + 1e-6)
        return torch.maximum(self.scale * x + self.shift, self.threshold)


class LayerScale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.gamma * x


class BuiltInAttention(nn.Module):
    """nn.MultiheadAttention, which never calls its own output projection."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.attention = nn.MultiheadAttention(4, 2, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        h = self.attention(x, x, x, need_weights=False)[0]
        return h if self.batch_first else h.transpose(0, 1)


class FusedAttention(nn.Module):
    """Attention by hand around F.scaled_dot_product_attention."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 12)
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.project(x).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts)
        return self.out(mixed.transpose(1, 2).flatten(2))


def encoder_layer(dropout: float, norm_first: bool = False) -> nn.Module:
    return nn.TransformerEncoderLayer(
        4, 2, dim_feedforward=5, dropout=dropout, batch_first=True, norm_first=norm_first
    )


class VisionTransformer(nn.Module):
    """Class token and positions are bare parameters of the root module."""

    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, 4, 2, stride=2)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 4))
        self.pos_embedding = nn.Parameter(torch.randn(1, 5, 4) * 0.1)
        self.block = encoder_layer(0.0, norm_first=True)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls_token.expand(len(x), -1, -1), tokens], 1)
        return self.head(self.norm(self.block(tokens + self.pos_embedding))[:, 0])


class UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.shared(torch.tanh(self.shared(x))))


class TiedEmbedding(nn.Module):
    """The output layer's weight is the embedding's; K equals the vocabulary."""

    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_outputs, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, num_outputs)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embedding(tokens)).mean(1)))


class ForeignWeight(nn.Module):
    """Applies another layer's weight by F.linear; that layer also runs."""

    def __init__(self) -> None:
        super().__init__()
        self.owner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(torch.tanh(self.owner(x)), self.owner.weight))


class FunctionalOnly(nn.Module):
    """The layer holds the weight and never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.owner = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.owner.weight, self.owner.bias))


class InPlaceResidual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(3)
        self.second = nn.Conv2d(3, 3, 3, padding=1)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        identity = self.activation(self.norm(self.first(x)))
        out = self.second(identity)
        out += identity
        return self.activation(out)


class InPlaceMLP(nn.Module):
    """The layer's output is overwritten, then added to in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu_(self.first(x))
        out = self.second(h)
        out += x
        return out.mul_(0.5)


class FlattensPositions(nn.Module):
    """Rows are (batch * positions), as transformers' projections often are."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        batch, positions, width = x.shape
        h = torch.tanh(self.project(x.reshape(batch * positions, width)))
        return h.reshape(batch, positions, 5)


class ScaledLinear(nn.Linear):
    """A subclass of a known layer that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * F.linear(x, self.weight) + self.bias


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(3, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(x)[0]


class WithUnusedLayer(nn.Module):
    """A trained layer that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 5), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.used(x))


class StopsGradient(nn.Module):
    """One branch is detached: its derivative is zero both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return torch.tanh(self.second(h)) * h.detach()


def frozen_first(num_outputs: int) -> nn.Module:
    model = Headed(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)), 4, num_outputs)
    model.body[0].requires_grad_(False)
    return model


def weight_normed(num_outputs: int) -> nn.Module:
    return Headed(nn.Sequential(weight_norm(nn.Linear(4, 5)), nn.Tanh()), 5, num_outputs)


class TwoInputs(nn.Module):
    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 5), nn.Linear(3, 5)
        self.head = nn.Linear(5, num_outputs)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head(torch.tanh(self.left(left) * self.right(right)))


class NamedInputs(nn.Module):
    """Called by keywords and answering with `.logits`, as transformers' models do."""

    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, num_outputs)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        mask = attention_mask[:, :, None].to(self.head.weight.dtype)
        h = (self.embedding(input_ids) * mask).sum(1) / mask.sum(1)
        return SimpleNamespace(logits=self.head(torch.tanh(h)))
