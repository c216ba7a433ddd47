"""The table of small problems: every architecture, and every likelihood on one of them."""

import torch
from torch import Tensor, nn

import architectures as nets
from likelihood_cases import (
    BERNOULLI,
    FROM_LOSS,
    GAUSSIAN,
    GAUSSIAN_ONE,
    LIKELIHOODS,
    POISSON,
    SOFT_CATEGORICAL,
)
from problems import STRUCTURES, Case, conv, headed, net, real, sequence, tokens
from user_modules import BODIES


def two_inputs(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return real(4)(n, generator), real(3)(n, generator)


def named_inputs(n: int, generator: torch.Generator) -> dict[str, Tensor]:
    mask = torch.ones(n, 5, dtype=torch.int64)
    mask[::2, 3:] = 0
    return {"input_ids": tokens(6, 5)(n, generator), "attention_mask": mask}


DENSE_NETS = (
    Case("mlp", nets.mlp, real(4)),
    Case("mlp_without_bias", lambda k: nets.mlp(k, bias=False), real(4), GAUSSIAN),
    Case(
        "one_output_vector", lambda k: nets.OneOutput(), real(4), BERNOULLI, last_layer="body.head"
    ),
    net("positions", sequence(lambda: nn.Linear(4, 5), nn.Tanh), 5, 3, 4, likelihood=POISSON),
    net("flattened_positions", nets.FlattensPositions, 5, 3, 4, likelihood=FROM_LOSS),
    net("used_twice", nets.UsedTwice, 4, 4),
    net("foreign_weight", nets.ForeignWeight, 4, 4),
    net("functional_only", nets.FunctionalOnly, 5, 4, likelihood=POISSON),
    net("subclass", sequence(lambda: nets.ScaledLinear(4, 5), nn.Tanh), 5, 4),
    net("unused_layer", nets.WithUnusedLayer, 5, 4),
    net("stop_gradient", nets.StopsGradient, 4, 4),
    net("in_place_mlp", nets.InPlaceMLP, 4, 4, likelihood=GAUSSIAN),
    Case("weight_norm", nets.weight_normed, real(4), SOFT_CATEGORICAL),
    Case("frozen_layer", nets.frozen_first, real(4)),
    Case("two_inputs", nets.TwoInputs, two_inputs, GAUSSIAN_ONE),
    Case("named_inputs", nets.NamedInputs, named_inputs),
)

CONVOLUTIONAL = (
    conv("conv1d", lambda: nn.Conv1d(2, 4, 3, stride=2, padding=1), 4, 2, 7),
    conv("conv2d_groups", lambda: nn.Conv2d(4, 6, (3, 2), (2, 1), (1, 0), groups=2), 6, 4, 5, 4),
    conv(
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
    conv(
        "conv2d_circular",
        sequence(lambda: nn.Conv2d(2, 3, 3, padding="same", padding_mode="circular"), nn.Tanh),
        3,
        2,
        4,
        4,
    ),
    conv("conv2d_depthwise", sequence(lambda: nn.Conv2d(3, 3, 2, groups=3), nn.Tanh), 3, 3, 4, 4),
    conv(
        "conv3d",
        sequence(lambda: nn.Conv3d(2, 3, 2, padding=1, stride=2), nn.Tanh),
        3,
        2,
        3,
        3,
        3,
        likelihood=POISSON,
    ),
    conv(
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
    conv(
        "conv_transpose2d_groups",
        sequence(lambda: nn.ConvTranspose2d(4, 4, 2, groups=2, dilation=2, bias=False), nn.Tanh),
        4,
        4,
        3,
        3,
    ),
    conv("in_place_residual", nets.InPlaceResidual, 3, 2, 4, 4),
)

NORMS = (
    net("layer_norm", sequence(lambda: nn.Linear(4, 5), lambda: nn.LayerNorm(5), nn.Tanh), 5, 4),
    net("layer_norm_positions", sequence(lambda: nn.LayerNorm((3, 4)), nn.Tanh), 4, 3, 4),
    net("rms_norm", sequence(lambda: nn.Linear(4, 5), lambda: nn.RMSNorm(5), nn.Tanh), 5, 3, 4),
    conv("group_norm", sequence(lambda: nn.GroupNorm(2, 4), nn.Tanh), 4, 4, 3, 3),
    net(
        "batch_norm1d", sequence(lambda: nn.Linear(4, 5), lambda: nn.BatchNorm1d(5), nn.ReLU), 5, 4
    ),
    conv(
        "batch_norm2d",
        sequence(lambda: nn.Conv2d(2, 4, 2), lambda: nn.BatchNorm2d(4), nn.ReLU),
        4,
        2,
        4,
        4,
        likelihood=POISSON,
    ),
    conv(
        "filter_response_norm",
        sequence(lambda: nn.Conv2d(2, 4, 2), lambda: nets.FilterResponseNorm(4)),
        4,
        2,
        4,
        4,
    ),
    net(
        "layer_scale",
        sequence(lambda: nn.Linear(4, 5), lambda: nets.LayerScale(5), nn.Tanh),
        5,
        3,
        4,
    ),
    net("prelu", sequence(lambda: nn.Linear(4, 5), lambda: nn.PReLU(5)), 5, 4),
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
    net("attention_batch_first", lambda: nets.BuiltInAttention(True), 4, 3, 4),
    net("attention_batch_second", lambda: nets.BuiltInAttention(False), 4, 3, 4),
    net("attention_fused", nets.FusedAttention, 4, 3, 4, likelihood=GAUSSIAN),
    net("encoder_layer", lambda: nets.encoder_layer(0.0), 4, 3, 4),
    net("encoder_layer_dropout", lambda: nets.encoder_layer(0.1, norm_first=True), 4, 3, 4),
    Case("vision_transformer", nets.VisionTransformer, real(1, 4, 4), last_layer=None),
    # Which of its products count as linear layers is the implementation's choice.
    net("lstm", nets.Recurrent, 3, 4, 3, structures=("isotropic", "diagonal", "full")),
)

# Whether projections inside another module's kernel are linear layers of their own is not defined.
# A layer whose rows run through positions first has no factors by example: it is a unit.
OPAQUE = {
    "cross_attention": ("isotropic", "diagonal", "full"),
    "positions_first": ("isotropic", "diagonal", "full"),
}
USERS_OWN = tuple(
    net(name, body, width, *shape, structures=OPAQUE.get(name, STRUCTURES))
    for name, (body, width, shape) in BODIES.items()
)

ARCHITECTURES = DENSE_NETS + CONVOLUTIONAL + NORMS + SEQUENCES + USERS_OWN
BY_LIKELIHOOD = tuple(
    Case(f"mlp_{likelihood.name}", nets.mlp, real(4), likelihood) for likelihood in LIKELIHOODS
)
"""The likelihoods on one network, which with every structure is the whole product."""

CASES = {case.name: case for case in ARCHITECTURES + BY_LIKELIHOOD}
MLP = CASES["mlp"]
