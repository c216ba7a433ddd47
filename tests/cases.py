"""The table of small float64 problems: an architecture, a likelihood, data, what to ask of it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import architectures as nets
from likelihood_cases import (
    BERNOULLI,
    CATEGORICAL,
    FROM_LOSS,
    GAUSSIAN,
    GAUSSIAN_ONE,
    LIKELIHOODS,
    POISSON,
    SOFT_CATEGORICAL,
    LikelihoodCase,
)
from reference import Dense
from single_examples import select

NUM_DATA = 7
PRIOR_PRECISION = 1.3
STRUCTURES = ("isotropic", "diagonal", "kronecker", "ekfac", "full")
ESTIMATORS = ("linear", "corrected", "iterated", "paper")


class Examples(Dataset):
    """A map-style data set of (x, y), or of dicts with "labels" where x is a dict."""

    def __init__(self, inputs: Any, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Any:
        x = select(self.inputs, index)
        return (
            {**x, "labels": self.targets[index]}
            if isinstance(x, dict)
            else (x, self.targets[index])
        )


@dataclass(frozen=True)
class Case:
    """One problem; the seed makes it the same wherever it is built."""

    name: str
    build: Callable[[int], nn.Module]
    inputs: Callable[[int, torch.Generator], Any]
    likelihood: LikelihoodCase = CATEGORICAL
    structures: tuple[str, ...] = STRUCTURES
    last_layer: str | None = "head"
    num_outputs: int | None = None

    @cached_property
    def model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = self.build(self.num_outputs or self.likelihood.num_outputs).double()
            for module in model.modules():
                _give_statistics(module)
        return model.eval()

    def draw(self, num_data: int, seed: int) -> tuple[Any, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        inputs = self.inputs(num_data, generator)
        num_outputs = self.num_outputs or self.likelihood.num_outputs
        return inputs, self.likelihood.targets(num_data, num_outputs, generator)

    @cached_property
    def data(self) -> Any:
        return as_data(*self.draw(NUM_DATA, seed=1))

    @cached_property
    def test_data(self) -> Any:
        return as_data(*self.draw(4, seed=2))

    @cached_property
    def dense(self) -> Dense:
        return Dense(self.model, *self.draw(NUM_DATA, seed=1), self.likelihood.dense)

    @cached_property
    def dense_test(self) -> Dense:
        return Dense(self.model, *self.draw(4, seed=2), self.likelihood.dense)

    @property
    def public_likelihood(self) -> Any:
        return self.likelihood.make()


def as_data(inputs: Any, targets: Tensor) -> Any:
    """Two tensors as they are, anything else as a data set."""
    return (inputs, targets) if isinstance(inputs, Tensor) else Examples(inputs, targets)


def _give_statistics(module: nn.Module) -> None:
    """Norm layers start at identities, which would hide mistakes."""
    if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
        module.running_mean.normal_()
        module.running_var.uniform_(0.5, 2.0)
    if isinstance(
        module, nn.BatchNorm1d | nn.BatchNorm2d | nn.LayerNorm | nn.GroupNorm | nn.RMSNorm
    ):
        for parameter in module.parameters():
            parameter.data.uniform_(0.5, 1.5)


def real(*shape: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda n, g: torch.randn(n, *shape, generator=g, dtype=torch.float64)


def tokens(vocabulary: int, length: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda n, g: torch.randint(vocabulary, (n, length), generator=g)


def two_inputs(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return real(4)(n, generator), real(3)(n, generator)


def named_inputs(n: int, generator: torch.Generator) -> dict[str, Tensor]:
    mask = torch.ones(n, 5, dtype=torch.int64)
    mask[::2, 3:] = 0
    return {"input_ids": tokens(6, 5)(n, generator), "attention_mask": mask}


def headed(
    body: Callable[[], nn.Module], width: int, channels_first: bool = False
) -> Callable[[int], nn.Module]:
    return lambda k: nets.Headed(body(), width, k, channels_first)


def sequence(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*[layer() for layer in layers])


def _net(name: str, body: Callable[[], nn.Module], width: int, *shape: int, **rest: Any) -> Case:
    """A body under a linear head, on real inputs; channels first where they are images."""
    channels_first = rest.pop("channels_first", False)
    return Case(name, headed(body, width, channels_first), real(*shape), **rest)


def _conv(name: str, body: Callable[[], nn.Module], width: int, *shape: int, **rest: Any) -> Case:
    return _net(name, body, width, *shape, channels_first=True, **rest)


DENSE_NETS = (
    Case("mlp", nets.mlp, real(4)),
    Case("mlp_without_bias", lambda k: nets.mlp(k, bias=False), real(4), GAUSSIAN),
    Case(
        "one_output_vector", lambda k: nets.OneOutput(), real(4), BERNOULLI, last_layer="body.head"
    ),
    _net("positions", sequence(lambda: nn.Linear(4, 5), nn.Tanh), 5, 3, 4, likelihood=POISSON),
    _net("flattened_positions", nets.FlattensPositions, 5, 3, 4, likelihood=FROM_LOSS),
    _net("used_twice", nets.UsedTwice, 4, 4),
    _net("foreign_weight", nets.ForeignWeight, 4, 4),
    _net("functional_only", nets.FunctionalOnly, 5, 4, likelihood=POISSON),
    _net("subclass", sequence(lambda: nets.ScaledLinear(4, 5), nn.Tanh), 5, 4),
    _net("unused_layer", nets.WithUnusedLayer, 5, 4),
    _net("stop_gradient", nets.StopsGradient, 4, 4),
    _net("in_place_mlp", nets.InPlaceMLP, 4, 4, likelihood=GAUSSIAN),
    Case("weight_norm", nets.weight_normed, real(4), SOFT_CATEGORICAL),
    Case("frozen_layer", nets.frozen_first, real(4)),
    Case("two_inputs", nets.TwoInputs, two_inputs, GAUSSIAN_ONE),
    Case("named_inputs", nets.NamedInputs, named_inputs),
)

CONVOLUTIONAL = (
    _conv("conv1d", lambda: nn.Conv1d(2, 4, 3, stride=2, padding=1), 4, 2, 7),
    _conv("conv2d_groups", lambda: nn.Conv2d(4, 6, (3, 2), (2, 1), (1, 0), groups=2), 6, 4, 5, 4),
    _conv(
        "conv2d_dilated",
        sequence(
            lambda: nn.Conv2d(2, 3, 2, dilation=2, padding=1),
            nn.Tanh,
            lambda: nn.Conv2d(3, 3, 2, bias=False),
        ),
        3,
        2,
        5,
        5,
        likelihood=GAUSSIAN,
    ),
    _conv(
        "conv2d_circular",
        sequence(lambda: nn.Conv2d(2, 3, 3, padding="same", padding_mode="circular"), nn.Tanh),
        3,
        2,
        4,
        4,
    ),
    _conv("conv2d_depthwise", sequence(lambda: nn.Conv2d(3, 3, 2, groups=3), nn.Tanh), 3, 3, 4, 4),
    _conv(
        "conv3d",
        sequence(lambda: nn.Conv3d(2, 3, 2, padding=1, stride=2), nn.Tanh),
        3,
        2,
        3,
        3,
        3,
        likelihood=POISSON,
    ),
    _conv(
        "conv_transpose2d",
        sequence(
            lambda: nn.ConvTranspose2d(3, 2, 3, stride=2, padding=1, output_padding=1), nn.Tanh
        ),
        2,
        3,
        3,
        3,
        likelihood=GAUSSIAN,
    ),
    _conv(
        "conv_transpose2d_groups",
        sequence(lambda: nn.ConvTranspose2d(4, 4, 2, groups=2, dilation=2, bias=False), nn.Tanh),
        4,
        4,
        3,
        3,
    ),
    _conv("in_place_residual", nets.InPlaceResidual, 3, 2, 4, 4),
)

NORMS = (
    _net("layer_norm", sequence(lambda: nn.Linear(4, 5), lambda: nn.LayerNorm(5), nn.Tanh), 5, 4),
    _net("layer_norm_positions", sequence(lambda: nn.LayerNorm((3, 4)), nn.Tanh), 4, 3, 4),
    _net("rms_norm", sequence(lambda: nn.Linear(4, 5), lambda: nn.RMSNorm(5), nn.Tanh), 5, 3, 4),
    _conv("group_norm", sequence(lambda: nn.GroupNorm(2, 4), nn.Tanh), 4, 4, 3, 3),
    _net(
        "batch_norm1d", sequence(lambda: nn.Linear(4, 5), lambda: nn.BatchNorm1d(5), nn.ReLU), 5, 4
    ),
    _conv(
        "batch_norm2d",
        sequence(lambda: nn.Conv2d(2, 4, 2), lambda: nn.BatchNorm2d(4), nn.ReLU),
        4,
        2,
        4,
        4,
        likelihood=POISSON,
    ),
    _conv(
        "filter_response_norm",
        sequence(lambda: nn.Conv2d(2, 4, 2), lambda: nets.FilterResponseNorm(4)),
        4,
        2,
        4,
        4,
    ),
    _net(
        "layer_scale",
        sequence(lambda: nn.Linear(4, 5), lambda: nets.LayerScale(5), nn.Tanh),
        5,
        3,
        4,
    ),
    _net("prelu", sequence(lambda: nn.Linear(4, 5), lambda: nn.PReLU(5)), 5, 4),
)

SEQUENCES = (
    Case("embedding", headed(sequence(lambda: nn.Embedding(6, 4), nn.Tanh), 4), tokens(6, 5)),
    # What a padding token counts for in A is not defined, so no Kronecker structures.
    Case(
        "embedding_padding",
        headed(sequence(lambda: nn.Embedding(6, 4, padding_idx=0), nn.Tanh), 4),
        tokens(6, 5),
        structures=("isotropic", "diagonal", "full"),
    ),
    Case("tied_embedding", nets.TiedEmbedding, tokens(5, 4), num_outputs=5, last_layer=None),
    _net("attention_batch_first", lambda: nets.BuiltInAttention(True), 4, 3, 4),
    _net("attention_batch_second", lambda: nets.BuiltInAttention(False), 4, 3, 4),
    _net("attention_fused", nets.FusedAttention, 4, 3, 4, likelihood=GAUSSIAN),
    _net("encoder_layer", lambda: nets.encoder_layer(0.0), 4, 3, 4),
    _net("encoder_layer_dropout", lambda: nets.encoder_layer(0.1, norm_first=True), 4, 3, 4),
    Case("vision_transformer", nets.VisionTransformer, real(1, 4, 4), last_layer=None),
    _net("lstm", nets.Recurrent, 3, 4, 3),
)

ARCHITECTURES = DENSE_NETS + CONVOLUTIONAL + NORMS + SEQUENCES
BY_LIKELIHOOD = tuple(
    Case(f"mlp_{likelihood.name}", nets.mlp, real(4), likelihood) for likelihood in LIKELIHOODS
)
"""The likelihoods on one network, which with every structure is the whole product."""

CASES = {case.name: case for case in ARCHITECTURES + BY_LIKELIHOOD}
MLP = CASES["mlp"]
