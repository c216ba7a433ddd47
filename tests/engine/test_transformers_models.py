"""Models of transformers, tiny and with random weights, against plain autograd."""

import pytest
import torch
from torch import nn

import engram
from autograd_deviation import expected_deviation
from fitted import assert_close

transformers = pytest.importorskip("transformers")
IDS = torch.randint(1, 50, (5, 6), generator=torch.Generator().manual_seed(0))
Y = torch.arange(5) % 3
MASK = torch.ones_like(IDS)
MASK[::2, 4:] = 0
COMMON = {"vocab_size": 50, "num_labels": 3, "pad_token_id": 0}
SIZES = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
GPT2 = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}


class Pooled(nn.Module):
    """The mean of a body's tokens, and a head of one's own."""

    def __init__(self, body):
        super().__init__()
        self.body, self.head = body, nn.Linear(8, 3)

    def forward(self, input_ids, attention_mask):
        hidden = self.body(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(hidden)
        return self.head((hidden * mask).sum(1) / mask.sum(1))


def gpt2():
    return transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**GPT2, **COMMON))


def gpt2_pooled():
    return Pooled(transformers.GPT2Model(transformers.GPT2Config(**GPT2, vocab_size=50)))


def t5_encoder():
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2}
    return Pooled(transformers.T5EncoderModel(transformers.T5Config(**sizes, vocab_size=50)))


def distilbert():
    sizes = {"dim": 8, "n_layers": 2, "n_heads": 2, "hidden_dim": 12}
    config = transformers.DistilBertConfig(**sizes, max_position_embeddings=16, **COMMON)
    return transformers.DistilBertForSequenceClassification(config)


def opt():
    sizes = {**SIZES, "ffn_dim": 12, "word_embed_proj_dim": 8}
    del sizes["intermediate_size"]
    return transformers.OPTForSequenceClassification(transformers.OPTConfig(**sizes, **COMMON))


def mixtral():
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    config = transformers.MixtralConfig(**sizes, **SIZES, **COMMON)
    config._experts_implementation = "eager"  # others have no double precision
    return transformers.MixtralForSequenceClassification(config)


def named(kind):
    def make():
        config = getattr(transformers, f"{kind}Config")(**SIZES, **COMMON)
        return getattr(transformers, f"{kind}ForSequenceClassification")(config)

    return make


# Llama, Mixtral and T5 normalise in single precision, whatever the model's own is
MODELS = {
    "gpt2": (gpt2, 1e-9),
    "gpt2_pooled": (gpt2_pooled, 1e-9),
    "bert": (named("Bert"), 1e-9),
    "distilbert": (distilbert, 1e-9),
    "opt": (opt, 1e-9),
    "llama": (named("Llama"), 1e-5),
    "t5_encoder": (t5_encoder, 1e-5),
    "mixtral": (mixtral, 1e-5),
}


def check(model, inputs, tolerance):
    data = {**inputs, "labels": Y}
    fitted = engram.laplace(model, data, structure="kronecker", progress=False, prior_precision=1.0)
    found = engram.sensitivities(model, data, fitted, estimator="linear", progress=False)
    assert_close(found.deviation, expected_deviation(model.eval(), inputs, Y, fitted), tolerance)
    return found.coverage


@pytest.mark.parametrize("name", MODELS)
def test_the_deviation_is_that_of_plain_autograd(name):
    make, tolerance = MODELS[name]
    torch.manual_seed(1)
    ways = check(make().double(), {"input_ids": IDS, "attention_mask": MASK}, tolerance)
    assert "unused" not in ways.values()
    assert set(ways.values()) == {"rule"}


def test_a_vision_transformer():
    config = transformers.ViTConfig(
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
        num_labels=3,
    )
    torch.manual_seed(1)
    model = transformers.ViTForImageClassification(config).double()
    pixels = torch.randn(5, 3, 8, 8, dtype=torch.float64)
    assert set(check(model, {"pixel_values": pixels}, 1e-9).values()) == {"rule"}


def test_a_batch_without_padding_goes_its_own_way():
    torch.manual_seed(1)
    model, mask = t5_encoder().double().eval(), torch.ones_like(IDS)
    mask[:2, 4:] = 0  # the first batch of two has padding, the next has none: its mask is dropped
    inputs = {"input_ids": IDS, "attention_mask": mask}
    data = {**inputs, "labels": Y}
    quiet = {"progress": False, "batch_size": 2}
    fitted = engram.laplace(model, data, structure="kronecker", prior_precision=1.0, **quiet)
    found = engram.sensitivities(model, data, fitted, estimator="linear", **quiet)
    assert_close(found.deviation, expected_deviation(model, inputs, Y, fitted), 1e-5)
