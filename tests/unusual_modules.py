"""Legal PyTorch that is hard to take apart by example: each is right, or refused by name."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import grad, vmap
from torch.nn.utils import rnn


class Headed(nn.Module):
    """A function of some modules or parameters and the input, and a linear head."""

    def __init__(self, function: Callable[..., Tensor], width: int, **parts: object) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.function, self.head = function, nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.function(self, x))


def bare(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * 0.5)


class SparseExperts(nn.Module):
    """Each row goes to the two experts with the largest gates; others never see it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, 4)
        weights, chosen = self.gate(rows).softmax(-1).topk(2, -1)
        mixed = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, place = (chosen == number).nonzero(as_tuple=True)
            mixed = mixed.index_add(0, row, expert(rows[row]) * weights[row, place, None])
        return mixed.reshape(x.shape)


def packed(self: nn.Module, x: Tensor) -> Tensor:
    lengths = (x[:, :, 0] > 0).sum(1).clamp(min=1)
    sequences = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return self.layer(sequences)[1][0][-1]


def padded_again(self: nn.Module, x: Tensor) -> Tensor:
    lengths = (x[:, :, 0] > 0).sum(1).clamp(min=1)
    sequences = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    padded, _ = rnn.pad_packed_sequence(self.layer(sequences)[0], batch_first=True, total_length=3)
    return padded.sum(1)


def sorted_rows(self: nn.Module, x: Tensor) -> Tensor:
    order = x[:, 0].argsort()
    h = torch.tanh(self.layer(x[order]))
    restored = torch.empty_like(h)
    restored[order] = h
    return restored


def selected_rows(self: nn.Module, x: Tensor) -> Tensor:
    order = x[:, 0].argsort()
    return torch.tanh(self.layer(x.index_select(0, order))).index_select(0, order.argsort())


def listed_rows(self: nn.Module, x: Tensor) -> Tensor:
    order = x[:, 0].argsort()
    h = torch.tanh(self.layer(torch.stack([x[i] for i in order.tolist()])))
    return h[order.argsort().tolist()]


def masked_rows(self: nn.Module, x: Tensor) -> Tensor:
    h = self.layer(x).clone()
    chosen = x[:, 0] > 0
    h[chosen] = self.other(x[chosen])
    return h


def row_by_row(self: nn.Module, x: Tensor) -> Tensor:
    return torch.stack([(self.layer if row[0] > 0 else self.other)(row) for row in x]).tanh()


def cells(self: nn.Module, x: Tensor) -> Tensor:
    h = c = x.new_zeros(len(x), 5)
    for t in range(x.shape[1]):
        h, c = self.layer(x[:, t], (h, c))
    return h


def without_grad(self: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = self.other(x)
    return self.layer(x) * gate


def own_gradient(self: nn.Module, x: Tensor) -> Tensor:
    return vmap(grad(lambda row: torch.tanh(self.layer(row)).sum()))(x)


def changed_weight(self: nn.Module, x: Tensor) -> Tensor:
    weight = self.weight * 2
    weight += 1
    weight[0] = 0
    return x @ weight


def filled_weight(self: nn.Module, x: Tensor) -> Tensor:
    weight = torch.zeros(4, 5, dtype=x.dtype)
    weight[:, :3] = self.weight
    weight[:, 3:] = self.other
    return torch.tanh(x @ weight)


def squared_often(self: nn.Module, x: Tensor) -> Tensor:
    """Made from itself twice, thirty times over: as a tree it would have 2^30 leaves."""
    matrix = torch.tanh(self.weight)
    for _ in range(30):
        matrix = torch.tanh(matrix @ matrix)
    return x @ matrix


def normalised_often(self: nn.Module, x: Tensor) -> Tensor:
    """A long chain: rows and columns scaled in turn."""
    matrix = self.weight.exp()
    for _ in range(200):
        matrix = matrix / matrix.sum(0, keepdim=True)
        matrix = matrix / matrix.sum(1, keepdim=True)
    return x @ matrix


class Product(torch.autograd.Function):
    """A function of the user's own that vmap knows nothing of."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


class Cube(torch.autograd.Function):
    """Its backward is right, and has no derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient


class NumpyCube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(x.detach().numpy() ** 3)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return torch.from_numpy(3 * x.detach().numpy() ** 2 * gradient.detach().numpy())


ROWS, STEPS = (4,), (3, 4)
# name: function, its width, shape of an example, parts
UNUSUAL: dict[str, tuple[Callable[..., Tensor], int, tuple[int, ...], dict[str, Callable]]] = {
    "to_its_device": (
        lambda self, x: x @ (self.weight * 2).to(x.device).contiguous(),
        *(5, ROWS, {"weight": lambda: bare(4, 5)}),
    ),
    "clone_changed_in_place": (
        lambda self, x: x @ self.weight.clone().mul_(2),
        *(5, ROWS, {"weight": lambda: bare(4, 5)}),
    ),
    "derived_changed_in_place": (changed_weight, 5, ROWS, {"weight": lambda: bare(4, 5)}),
    "filled_weight": (
        filled_weight,
        *(5, ROWS, {"weight": lambda: bare(4, 3), "other": lambda: bare(4, 2)}),
    ),
    "squared_often": (squared_often, 4, ROWS, {"weight": lambda: bare(4, 4)}),
    "normalised_often": (normalised_often, 4, ROWS, {"weight": lambda: bare(4, 4)}),
    "experts_of_rows": (lambda self, x: self.experts(x), 4, ROWS, {"experts": SparseExperts}),
    "experts_of_tokens": (
        lambda self, x: self.experts(x).mean(1),
        *(4, STEPS, {"experts": SparseExperts}),
    ),
    "packed_lstm": (packed, 5, STEPS, {"layer": lambda: nn.LSTM(4, 5, batch_first=True)}),
    "packed_gru": (
        padded_again,
        *(5, STEPS, {"layer": lambda: nn.GRU(4, 5, batch_first=True)}),
    ),
    "lstm_cell": (cells, 5, STEPS, {"layer": lambda: nn.LSTMCell(4, 5)}),
    "projected_lstm": (
        lambda self, x: self.layer(x)[0][:, -1],
        *(2, STEPS, {"layer": lambda: nn.LSTM(4, 5, proj_size=2, batch_first=True)}),
    ),
    "sorted_rows": (sorted_rows, 5, ROWS, {"layer": lambda: nn.Linear(4, 5)}),
    "selected_rows": (selected_rows, 5, ROWS, {"layer": lambda: nn.Linear(4, 5)}),
    "listed_rows": (listed_rows, 5, ROWS, {"layer": lambda: nn.Linear(4, 5)}),
    "masked_rows": (
        masked_rows,
        *(5, ROWS, {"layer": lambda: nn.Linear(4, 5), "other": lambda: nn.Linear(4, 5)}),
    ),
    "row_by_row": (
        row_by_row,
        *(5, ROWS, {"layer": lambda: nn.Linear(4, 5), "other": lambda: nn.Linear(4, 5)}),
    ),
    "without_grad": (
        without_grad,
        *(5, ROWS, {"layer": lambda: nn.Linear(4, 5), "other": lambda: nn.Linear(4, 5)}),
    ),
    "own_gradient": (own_gradient, 4, ROWS, {"layer": lambda: nn.Linear(4, 5)}),
    "mapped_inside": (
        lambda self, x: vmap(lambda row: torch.tanh(self.layer(row)))(x),
        *(5, ROWS, {"layer": lambda: nn.Linear(4, 5)}),
    ),
    "own_function": (
        lambda self, x: torch.tanh(Product.apply(x, self.weight)),
        *(5, ROWS, {"weight": lambda: bare(4, 5)}),
    ),
    "once_differentiable": (
        lambda self, x: Cube.apply(self.layer(x)),
        *(5, ROWS, {"layer": lambda: nn.Linear(4, 5)}),
    ),
    "numpy_inside": (
        lambda self, x: NumpyCube.apply(self.layer(x)),
        *(5, ROWS, {"layer": lambda: nn.Linear(4, 5)}),
    ),
    "embedding_bag": (
        lambda self, x: self.layer((x > 0).long()),
        *(5, ROWS, {"layer": lambda: nn.EmbeddingBag(2, 5)}),
    ),
    "distances": (
        lambda self, x: torch.cdist(self.layer(x), self.weight),
        *(5, ROWS, {"layer": lambda: nn.Linear(4, 4), "weight": lambda: bare(5, 4)}),
    ),
    "slices_of_a_weight": (
        lambda self, x: F.linear(x, self.weight[:5]).tanh() + F.linear(x, self.weight[3:8]),
        *(5, ROWS, {"weight": lambda: bare(8, 4)}),
    ),
    "fourier": (
        lambda self, x: torch.fft.irfft(
            torch.fft.rfft(self.layer(x)) * torch.view_as_complex(self.weight), n=5
        ),
        *(5, ROWS, {"layer": lambda: nn.Linear(4, 5), "weight": lambda: bare(3, 2)}),
    ),
    "gathered": (
        lambda self, x: self.weight.expand(len(x), 5).gather(1, (x > 0).long()),
        *(4, ROWS, {"weight": lambda: bare(5)}),
    ),
    "batched_product": (
        lambda self, x: torch.baddbmm(
            self.offset.expand(len(x), 1, 5), x[:, None], self.weight.expand(len(x), 4, 5)
        )[:, 0].tanh(),
        *(5, ROWS, {"weight": lambda: bare(4, 5), "offset": lambda: bare(5)}),
    ),
    "lists_and_dicts": (
        lambda self, x: torch.tanh(x @ self.listed[0] + self.keyed["offset"]),
        5,
        ROWS,
        {
            "listed": lambda: nn.ParameterList([bare(4, 5)]),
            "keyed": lambda: nn.ParameterDict({"offset": bare(5)}),
        },
    ),
    "hypernetwork": (
        lambda self, x: torch.bmm(x[:, None], self.layer(x).view(len(x), 4, 5))[:, 0],
        *(5, ROWS, {"layer": lambda: nn.Linear(4, 20)}),
    ),
    "twice_the_batch": (
        lambda self, x: self.layer(torch.cat([x, -x])).chunk(2)[1],
        *(5, ROWS, {"layer": lambda: nn.Linear(4, 5)}),
    ),
}


def unusual(name: str) -> tuple[nn.Module, Tensor]:
    """The model in float64, and seven examples of which the first three are in order."""
    function, width, shape, parts = UNUSUAL[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Headed(function, width, **{key: make() for key, make in parts.items()}).double()
        x = torch.randn(7, *shape, dtype=torch.float64)
    first = torch.tensor([-1.5, 0.1, 0.2, 0.9, -0.7, 0.4, -0.2], dtype=torch.float64)
    x.reshape(7, -1)[:, 0] = first
    return model, x


class DetachedCube(torch.autograd.Function):
    """Right gradients, linear in what comes in, and a Hessian that lacks a part."""

    @staticmethod
    def forward(ctx, x):
        ctx.slope = 3 * x.detach() ** 2
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        return ctx.slope * gradient


class WholeCube(torch.autograd.Function):
    """The same with nothing detached."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient
