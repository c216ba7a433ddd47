"""What users write: parameters that enter the computation by all sorts of operations."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm


class MatrixProduct(nn.Module):
    """A linear map spelled as a matrix product of bare parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(4, 5) * 0.5)
        self.offset = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.matrix + self.offset)


class Summation(nn.Module):
    """einsum, with a parameter of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.core = nn.Parameter(torch.randn(2, 4, 5) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("ntd,hdk->nthk", x, self.core).tanh().sum(2)


class LowRankUpdate(nn.Module):
    """A frozen weight plus a trained product: the weight is derived, not a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 5).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, 4))
        self.up = nn.Parameter(torch.randn(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.base.weight + self.up @ self.down, self.base.bias))


class Prompted(nn.Module):
    """Learned tokens before the sequence, by repeat and not by expand."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(2, 4))
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        prompt = self.prompt.unsqueeze(0).repeat(len(x), 1, 1)
        return torch.tanh(self.mix(torch.cat([prompt, x], 1)).cumsum(1))


class SlicedPositions(nn.Module):
    """A table longer than the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.table[:, : x.shape[1]])


class Temperature(nn.Module):
    """One number, through its exponential."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.log_scale.exp())


class InPlaceOffset(nn.Module):
    """A parameter added in place to a layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 5, bias=False)
        self.offset = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x).add_(self.offset).tanh_()


class PositionsFirst(nn.Module):
    """Rows are (positions * batch): an example's rows are not next to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        positions_first = x.transpose(0, 1)
        h = torch.tanh(self.project(positions_first.reshape(-1, 4)))
        return h.reshape(*positions_first.shape[:2], 5).transpose(0, 1)


class MaskedToken(nn.Module):
    """A learned vector takes the place of some inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x[..., :1] > 0, x, self.token).sin()


class FunctionalNorm(nn.Module):
    """A norm's scale passed by hand, and used once more outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.layer_norm(x, (4,), self.scale)) * self.scale


class CrossAttention(nn.Module):
    """Separate key and value widths, learned queries, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 2, 4))
        self.attention = nn.MultiheadAttention(4, 2, kdim=3, vdim=3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = x[..., 0] > 1.0
        mask[:, 0] = False
        queries = self.queries.expand(len(x), -1, -1)
        return self.attention(queries, x, x, key_padding_mask=mask)[0]


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Bilinear(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.pair(x, x.sin())


class GatedBranch(nn.Module):
    """Two layers read one input, and one output feeds two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate, self.out = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        gated = self.value(x) * torch.sigmoid(self.gate(x))
        return gated + self.out(F.gelu(gated))


class Checkpointed(nn.Module):
    """Recomputes its body in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 5), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(self.inner, x, use_reentrant=False)


def spectrally_normed() -> nn.Module:
    return nn.Sequential(spectral_norm(nn.Linear(4, 5)), nn.Tanh())


BODIES: dict[str, tuple[Callable[[], nn.Module], int, tuple[int, ...]]] = {
    "matrix_product": (MatrixProduct, 5, (3, 4)),
    "summation": (Summation, 5, (3, 4)),
    "low_rank_update": (LowRankUpdate, 5, (4,)),
    "prompted": (Prompted, 4, (3, 4)),
    "sliced_positions": (SlicedPositions, 4, (3, 4)),
    "temperature": (Temperature, 4, (3, 4)),
    "in_place_offset": (InPlaceOffset, 5, (4,)),
    "positions_first": (PositionsFirst, 5, (3, 4)),
    "masked_token": (MaskedToken, 4, (3, 4)),
    "functional_norm": (FunctionalNorm, 4, (3, 4)),
    "cross_attention": (CrossAttention, 4, (5, 3)),
    "bilinear": (Bilinear, 3, (4,)),
    "gated_branch": (GatedBranch, 4, (3, 4)),
    "checkpointed": (Checkpointed, 5, (4,)),
    "spectral_norm": (spectrally_normed, 5, (4,)),
}
"""Body, its width, and the shape of one input."""
